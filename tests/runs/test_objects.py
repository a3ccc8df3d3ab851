"""Images, features, partitions and classes given from Python become files and names that a run can be repeated from."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedvl.data.imported import load_imported
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError
from fedvl.methods.linear import Linear
from fedvl.models.checkpoint import load_model
from fedvl.runs.objects import is_object, settings_of_objects

TINY = "fedvl-tiny"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))


def pictures(count, first=0):
    """Images that differ, of noise."""
    return np.random.default_rng(first).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def names(count):
    return [("cat", "dog")[row % 2] for row in range(count)]


def refused(**given):
    with pytest.raises(FedVLError) as error:
        settings_of_objects(given, TINY)
    text = str(error.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


def test_names_and_other_settings_are_left_as_they_are():
    given = {"method": "linear", "dataset": "photos/", "partition": "iid", "rounds": 3}
    assert settings_of_objects(given, TINY) == given
    assert not is_object(["iid", "even"])
    assert not is_object(None)


def test_images_become_a_dataset_with_the_same_pixels_labels_and_splits():
    train, test = pictures(6), pictures(4, 1)
    given = {"dataset": (train, names(6), [Image.fromarray(one) for one in test], names(4))}
    found = open_dataset(settings_of_objects(given, TINY)["dataset"])
    assert found.class_names == ("cat", "dog")
    for split, images in (("train", train), ("test", test)):
        own = found.splits[split]
        assert [found.class_names[label] for label in own.labels] == names(len(images))
        for row, image in enumerate(images):  # in the order in which they were given
            assert np.array_equal(np.asarray(own.read(row)), image)
            assert own.describe(row) == f"{split}/{row:07d}.png"


def test_without_test_images_a_fifth_is_held_out_by_content():
    found = open_dataset(settings_of_objects({"dataset": (pictures(60), names(60))}, TINY)["dataset"])
    assert len(found.splits["train"]) + len(found.splits["test"]) == 60
    assert 3 <= len(found.splits["test"]) <= 25


def test_an_image_may_be_a_file_and_a_label_may_be_missing(tmp_path):
    for number in range(3):
        Image.fromarray(pictures(1, number)[0]).save(tmp_path / f"{number}.bmp")
    files = [tmp_path / f"{number}.bmp" for number in range(3)]
    path = settings_of_objects({"dataset": (files, ["cat", "dog", None], files[:2], ["cat", "dog"])}, TINY)["dataset"]
    assert open_dataset(path).splits["train"].labels.tolist() == [0, 1, -1]
    assert open_dataset(path).splits["train"].describe(0) == "train/0000000.bmp"


def test_the_same_content_is_the_same_path_and_any_other_is_another(tmp_path):
    def path(images, labels):
        return str(settings_of_objects({"dataset": (images, labels)}, TINY)["dataset"])

    first = path(pictures(6), names(6))
    assert path(list(pictures(6)), tuple(names(6))) == first
    assert path(pictures(6, 1), names(6)) != first
    assert path(pictures(6), names(6)[::-1]) != first
    assert (tmp_path / "cache" / "given").stat().st_mode & 0o077 == 0


def test_an_interrupted_folder_without_a_manifest_is_written_again(tmp_path):
    given = {"dataset": (pictures(4), names(4), pictures(2, 1), names(2))}
    path = tmp_path / "cache" / "given"
    folder = settings_of_objects(given, TINY)["dataset"]
    (path / folder / "manifest.csv").unlink()
    (path / folder / "train" / "0000001.png").write_bytes(b"cut off")
    assert np.array_equal(
        np.asarray(open_dataset(settings_of_objects(given, TINY)["dataset"]).splits["train"].read(1)), pictures(4)[1]
    )


def test_features_are_kept_with_the_texts_and_scale_of_the_model_that_made_them():
    encoder = load_model(TINY)
    rows = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    test = torch.from_numpy(rows[:2] + 1).double()
    settings = settings_of_objects({"dataset": (rows, names(6), test, names(2))}, TINY)
    dataset, known = open_dataset(settings["dataset"]), load_imported(settings["model"])
    for split, wanted in (("train", rows), ("test", rows[:2] + 1)):
        found = known.look_up(dataset.splits[split], "features")
        assert torch.equal(found.tensor, torch.from_numpy(wanted))
    assert known.logit_scale == encoder.logit_scale
    (template,) = dataset.templates["default"]
    texts = encoder.encode_text(encoder.tokenise([template.replace("{}", name) for name in ("cat", "dog")]))
    torch.testing.assert_close(known.embed_names(["cat", "dog"], [template]), texts.detach())
    assert settings["evaluation.examples"] == 0


def test_rows_by_client_become_a_partition_file():
    given = [[0, 5], np.array([2, 3]), []]
    path = settings_of_objects({"partition": given}, TINY)["partition"]
    with open(path, encoding="utf-8") as file:
        assert json.load(file) == [[0, 5], [2, 3], []]
    assert settings_of_objects({"partition": [[0, 5], [2, 3], []]}, TINY)["partition"] == path


def test_a_class_of_the_package_goes_by_its_name():
    assert settings_of_objects({"method": Linear}, TINY) == {"method": "linear"}


def test_the_manifest_holds_what_was_given():
    folder = settings_of_objects({"dataset": (pictures(2), names(2), pictures(1, 1), ["cat"])}, TINY)["dataset"]
    with open(f"{folder}/manifest.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[1:] == [
        ["train/0000000.png", "cat", "train"],
        ["train/0000001.png", "dog", "train"],
        ["test/0000000.png", "cat", "test"],
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dataset": (pictures(2),)}, "A dataset of 1 parts"),
        ({"dataset": (pictures(2), ["cat"])}, "2 images and 1 labels"),
        ({"dataset": (pictures(2), [0, 1])}, "The label 0 is not a class name"),
        ({"dataset": (np.zeros((2, 3, 4)), names(2))}, "Features of shape (2, 3, 4)"),
        ({"dataset": (np.zeros((2, 5)), names(2))}, "The features have 5 numbers"),
        ({"dataset": (np.zeros((2, 256)), names(2))}, "all zeros"),
        ({"dataset": (pictures(2), names(2), np.ones((1, 256)), ["cat"])}, "or the reverse"),
        ({"dataset": (pictures(4), names(4)), "partition": [[0], [1]]}, "A partition by rows needs test images"),
        ({"partition": [0, 1]}, "A partition is a text"),
        ({"partition": [["a"], [1]]}, "A partition is a text"),
        ({"method": int}, "int is not a subclass"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_sentence(given, words):
    assert words in refused(**given)
