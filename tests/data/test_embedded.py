"""The image sets inside the package: what they hold, and that the files are whole."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedvl.data import embedded as packaged
from fedvl.data.catalogue import find
from fedvl.data.embedded import IMAGES_FOLDER, stratified
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError

NAMES = ("cifar10-mini", "emoji-mini")


def described(name: str) -> dict:
    return json.loads((IMAGES_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def pixels(split) -> list[bytes]:
    return [split.read(index).tobytes() for index in range(len(split))]


def test_stratified_split_is_fixed() -> None:
    labels = np.array([0] * 10 + [1] * 5 + [2] * 1 + [3] * 2)
    train, test = stratified(labels)
    assert sorted([*train, *test]) == list(range(len(labels)))
    assert np.bincount(labels[test], minlength=4).tolist() == [2, 1, 0, 1]
    # Pinned: another numpy or another order of draws would silently change the test set of the emoji.
    assert test.tolist() == [4, 6, 11, 16]


def test_cifar10_mini_is_stratified() -> None:
    dataset = open_dataset("cifar10-mini")
    assert dataset.class_names == (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
    )  # fmt: skip
    assert np.bincount(dataset.splits["train"].labels).tolist() == [200] * 10
    assert np.bincount(dataset.splits["test"].labels).tolist() == [100] * 10
    assert dataset.splits["train"].texts is None
    assert dataset.splits["train"].read(0).size == (32, 32)
    # CIFAR-10's known means, within what a sample of 2,000 allows.
    mean = np.mean([np.asarray(dataset.splits["train"].read(index)) for index in range(2000)], axis=(0, 1, 2)) / 255
    assert np.allclose(mean, [0.4914, 0.4822, 0.4465], atol=0.01)


def test_emoji_mini_has_names_as_texts_and_categories_as_labels() -> None:
    dataset = open_dataset("emoji-mini")
    assert len(dataset.class_names) == 9
    assert "component" not in dataset.class_names
    train, test = dataset.splits["train"], dataset.splits["test"]
    assert 1400 <= len(train) + len(test) <= 1600
    for split in (train, test):
        assert split.texts is not None
        assert all(text and text == text.lower() for text in split.texts)
        assert split.read(0).size == (64, 64)
    shares = np.bincount(test.labels) / (np.bincount(test.labels) + np.bincount(train.labels))
    assert np.allclose(shares, 0.25, atol=0.01)
    labels = {
        text: dataset.class_names[label]
        for split in (train, test)
        for text, label in zip(split.texts or (), split.labels, strict=True)
    }
    assert labels["red apple"] == "food and drink"
    assert labels["duck"] == "animals and nature"


@pytest.mark.parametrize("name", NAMES)
def test_no_picture_is_in_train_and_test(name: str) -> None:
    splits = open_dataset(name).splits
    assert not set(pixels(splits["train"])) & set(pixels(splits["test"]))


@pytest.mark.parametrize("name", NAMES)
def test_files_match_their_hashes_and_the_catalogue(name: str) -> None:
    facts = described(name)
    entry = find(name)
    assert facts["attribution"]
    assert facts["licence"]
    assert set(facts["source"]) == {"package", "version", "sha256"}
    assert tuple(facts["class_names"]) == entry.class_names
    for split, part in facts["splits"].items():
        data = (IMAGES_FOLDER / part["sheet"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == part["sha256"]
        assert data[12:16] == b"VP8L"  # WebP's lossless coding
        assert len(part["labels"]) == len(part["origin"]) == entry.splits[split]


def test_twemoji_is_attributed() -> None:
    facts = described("emoji-mini")
    assert "Twitter" in facts["attribution"]
    assert "CC-BY 4.0" in facts["licence"]


def test_size_in_the_repository() -> None:
    files = [
        path for path in IMAGES_FOLDER.iterdir() if path.name.startswith(NAMES) and path.suffix in (".webp", ".json")
    ]
    assert len(files) == 6
    assert sum(path.stat().st_size for path in files) <= 9_000_000


def test_identity_is_the_same_each_time_and_differs_between_splits() -> None:
    first, second = open_dataset("cifar10-mini"), open_dataset("cifar10-mini")
    assert first.splits["train"].identity == second.splits["train"].identity
    assert first.splits["train"].identity != first.splits["test"].identity


def test_a_damaged_sheet_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in IMAGES_FOLDER.glob("cifar10-mini*"):
        shutil.copy(path, tmp_path)
    sheet = tmp_path / "cifar10-mini-test.webp"
    data = bytearray(sheet.read_bytes())
    data[-5] ^= 1
    sheet.write_bytes(data)
    monkeypatch.setattr(packaged, "IMAGES_FOLDER", tmp_path)
    dataset = open_dataset("cifar10-mini")
    dataset.splits["train"].read(0)
    with pytest.raises(FedVLError, match=r"SHA-256 differs.*install fedvl again"):
        dataset.splits["test"].read(0)
