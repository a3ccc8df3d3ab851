"""Every source gives the same images, labels, texts and splits; wrong input gives one plain sentence."""

import csv
import hashlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedvl.config import DataConfig
from fedvl.data.catalogue import class_key, find
from fedvl.data.fetch import default_data_root
from fedvl.data.sources import OPEN_ANEW, BadImage, Dataset, Opener, is_flat, open_dataset
from fedvl.errors import FedVLError

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

CLASSES = ("cat", "dog", "red_panda")


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def rows(per_class: int = 10) -> list[dict]:
    """Ten images a class, seven to train and three to test; in the order in which a folder is read."""
    return [
        {
            "name": f"{label}_{number:02d}.png",
            "image": picture(100 * position + number),
            "label": label,
            "split": split,
            "text": f"a {label} no. {number}",
        }
        for split, numbers in (("test", range(7, per_class)), ("train", range(7)))
        for position, label in enumerate(CLASSES)
        for number in numbers
    ]


def write_folder(root: Path, samples: list[dict], with_splits: bool = True) -> Path:
    for sample in samples:
        folder = root / sample["split"] / sample["label"] if with_splits else root / sample["label"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / sample["name"]).write_bytes(sample["image"])
    return root


def write_parquet(path: Path, samples: list[dict], **options: object) -> Path:
    columns = {column: [sample[column] for sample in samples] for column in ("image", "label", "split", "text")}
    pq.write_table(pa.table(columns), path, **options)
    return path


def write_manifest(path: Path, samples: list[dict], images: Path, absolute: bool = False) -> Path:
    images.mkdir(exist_ok=True)
    listed = []
    for sample in samples:
        (images / sample["name"]).write_bytes(sample["image"])
        place = str(images / sample["name"]) if absolute else f"{images.name}/{sample['name']}"
        listed.append({"path": place, **{column: sample[column] for column in ("label", "text", "split")}})
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, ["path", "label", "text", "split"])
            writer.writeheader()
            writer.writerows(listed)
        else:
            file.writelines(json.dumps(row) + "\n" for row in listed)
    return path


def content(dataset: Dataset) -> dict:
    return {
        name: [(split.read(index).tobytes(), int(split.labels[index])) for index in range(len(split))]
        for name, split in dataset.splits.items()
    }


@pytest.mark.parametrize("kind", ["parquet", "small row groups", "csv", "jsonl", "absolute csv"])
def test_all_sources_give_the_same(kind: str, tmp_path: Path) -> None:
    folder = open_dataset(str(write_folder(tmp_path / "folder", rows())))
    if kind == "parquet":
        path = write_parquet(tmp_path / "set.parquet", rows())
    elif kind == "small row groups":
        path = write_parquet(tmp_path / "set.parquet", rows(), row_group_size=4)
    else:
        path = tmp_path / f"set.{kind.split()[-1]}"
        write_manifest(path, rows(), tmp_path / "images", absolute="absolute" in kind)
    other = open_dataset(str(path))
    assert other.name == "set"
    assert folder.class_names == other.class_names == ("cat", "dog", "red panda")
    assert content(folder) == content(other)
    assert {name: len(split) for name, split in other.splits.items()} == {"train": 21, "test": 9}
    texts = other.splits["test"].texts
    assert texts is not None
    assert texts[0] == "a cat no. 7"
    assert folder.splits["test"].texts is None
    assert not folder.notes
    assert not other.notes


def test_parquet_in_the_layout_of_hugging_face(tmp_path: Path) -> None:
    samples = rows()
    label_names = {"info": {"features": {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}}}
    table = pa.table(
        {
            "image": [{"bytes": sample["image"], "path": sample["name"]} for sample in samples],
            "label": [CLASSES.index(sample["label"]) for sample in samples],
            "split": [sample["split"] for sample in samples],
        }
    ).replace_schema_metadata({"huggingface": json.dumps(label_names)})
    pq.write_table(table, tmp_path / "hub.parquet")
    dataset = open_dataset(str(tmp_path / "hub.parquet"))
    assert dataset.class_names == ("cat", "dog", "red panda")
    assert content(dataset) == content(open_dataset(str(write_folder(tmp_path / "folder", samples))))


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_a_table_as_excel_on_windows_writes_it(delimiter: str, tmp_path: Path) -> None:
    """With a byte order mark, semicolons or tabs, and backslashes in paths."""
    samples = rows()
    plain = write_manifest(tmp_path / "plain.csv", samples, tmp_path / "images")
    lines = [["Path", "Label", "Split"], *([f"images\\{s['name']}", s["label"], s["split"]] for s in samples)]
    text = "\r\n".join(delimiter.join(line) for line in lines)
    (tmp_path / "excel.csv").write_bytes(text.encode("utf-8-sig"))
    assert content(open_dataset(str(tmp_path / "excel.csv"))) == content(open_dataset(str(plain)))


def test_class_names_that_are_numbers_are_noted(tmp_path: Path) -> None:
    samples = [{**sample, "label": str(CLASSES.index(sample["label"]))} for sample in rows()]
    assert open_dataset(str(write_folder(tmp_path / "set", samples))).notes == (
        "The class names are numbers, which tell the model little; call the classes by words.",
    )


@pytest.mark.parametrize("header", ["id,breed,class", "Image_ID,set,Category", "file_name,note,label"])
def test_a_table_as_kaggle_has_it(header: str, tmp_path: Path) -> None:
    """Names without extension, images in a folder that is named as the table, and columns of other names."""
    samples = [{**sample, "split": ""} for sample in rows()]
    (tmp_path / "train").mkdir()
    lines = [header]
    for sample in samples:
        (tmp_path / "train" / sample["name"]).write_bytes(sample["image"])
        lines.append(f"{sample['name'].removesuffix('.png')},unused,{sample['label']}")
    (tmp_path / "train.csv").write_text("\n".join(lines))
    dataset = open_dataset(str(tmp_path / "train.csv"))
    expected = open_dataset(str(write_folder(tmp_path / "folder", samples, with_splits=False)))
    assert dataset.class_names == expected.class_names
    for part in ("train", "test"):
        found, wanted = dataset.splits[part], expected.splits[part]
        assert sorted(found.sha256(row) for row in range(len(found))) == sorted(
            wanted.sha256(row) for row in range(len(wanted))
        )


def test_identity_follows_content_and_not_place(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "here", rows())
    before = {name: split.identity for name, split in open_dataset(str(root)).splits.items()}
    shutil.move(root, tmp_path / "there")
    moved = open_dataset(str(tmp_path / "there"))
    assert {name: split.identity for name, split in moved.splits.items()} == before
    changed = tmp_path / "there/train/dog/dog_03.png"
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    after = open_dataset(str(tmp_path / "there")).splits
    assert after["train"].identity != before["train"]
    assert after["test"].identity == before["test"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "absolute csv"])
def test_identity_of_other_sources(kind: str, tmp_path: Path) -> None:
    def identity(place: str, samples: list[dict]) -> str:
        root = tmp_path / place
        root.mkdir()
        if kind == "parquet":
            path = write_parquet(root / "set.parquet", samples)
        else:
            path = write_manifest(root / "set.csv", samples, root / "images", absolute="absolute" in kind)
        return open_dataset(str(path)).splits["train"].identity

    changed = rows()
    changed[-1]["image"] = picture(999)
    first = identity("a", rows())
    assert identity("b", rows()) == first
    assert identity("c", changed) != first


def fifth(samples: list[dict]) -> list[str]:
    """The names of the samples whose bytes put them in the test: SHA-256 of size and SHA-256, below a fifth of all."""
    described = {
        sample["name"]: f"{len(sample['image'])} {hashlib.sha256(sample['image']).hexdigest()}" for sample in samples
    }
    return sorted(
        name for name, text in described.items() if int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) < 2**64 / 5
    )


def test_a_split_is_made_where_there_is_none(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", rows(), with_splits=False)
    first, second = open_dataset(str(root)), open_dataset(str(root))
    test = first.splits["test"]
    assert sorted(Path(test.describe(row)).name for row in range(len(test))) == fifth(rows())
    assert len(first.splits["train"]) + len(test) == 30
    assert content(first) == content(second)
    marked_all = [{**sample, "split": "all"} for sample in sorted(rows(), key=lambda sample: sample["name"])]
    assert content(open_dataset(str(write_parquet(tmp_path / "all.parquet", marked_all)))) == content(first)


CONTENTS = st.binary(min_size=1, max_size=3)
FILES = st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), CONTENTS, max_size=8)


def sides_of(files: dict[tuple[str, int], bytes]) -> dict[bytes, set[str]]:
    """Which splits of a folder of these files hold each content; the bytes need be no images to be split."""
    with tempfile.TemporaryDirectory() as root:
        always = {(label, 10 + number): f"{label} {number}".encode() for label in "ab" for number in range(12)}
        for (label, number), data in (always | files).items():
            folder = Path(root, label)
            folder.mkdir(exist_ok=True)
            (folder / f"{number}.jpg").write_bytes(data)
        splits = open_dataset(root).splits
        found: dict[bytes, set[str]] = {}
        for part, split in splits.items():
            for row in range(len(split)):
                found.setdefault(Path(root, split.describe(row)).read_bytes(), set()).add(part)
    return found


@settings(max_examples=60, deadline=None)
@given(FILES, FILES, st.data())
def test_no_file_moves_another_between_train_and_test(files: dict, added: dict, data: st.DataObject) -> None:
    """Files are added, removed, renamed and moved to other classes, copies among them."""
    before = sides_of(files)
    assert all(len(sides) == 1 for sides in before.values())
    kept = {place: content for place, content in files.items() if data.draw(st.booleans())}
    places = data.draw(st.permutations(list(kept)))
    renamed = dict(zip(places, kept.values(), strict=True))
    for changed in (files | added, kept, renamed):
        after = sides_of(changed)
        assert all(len(sides) == 1 for sides in after.values())
        assert all(before[content] == sides for content, sides in after.items() if content in before)


def test_an_unlabelled_copy_of_a_test_image_is_not_trained_on(tmp_path: Path) -> None:
    held = fifth(rows())[0]
    samples = [{**sample, "split": ""} for sample in rows()]
    copy = next({**sample, "label": None} for sample in samples if sample["name"] == held)
    other = next({**sample, "label": None} for sample in samples if sample["name"] not in fifth(rows()))
    plain = open_dataset(str(write_parquet(tmp_path / "plain.parquet", samples)))
    mixed = open_dataset(str(write_parquet(tmp_path / "mixed.parquet", [*samples, copy, other])))
    assert len(mixed.splits["train"]) == len(plain.splits["train"]) + 1
    assert len(mixed.splits["test"]) == len(plain.splits["test"])


def test_names_of_splits(tmp_path: Path) -> None:
    names = {"trainval": "train", "valid": "val", "Test": "test", "unlisted": None, "all": None}
    samples = [{**sample, "split": split} for split in names for sample in rows() if sample["split"] == "train"]
    dataset = open_dataset(str(write_parquet(tmp_path / "set.parquet", samples)))
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 21, "val": 21, "test": 21}
    assert dataset.notes == (
        "42 images are in neither train, val nor test and were left out (split 'unlisted', 'all').",
    )


def test_val_stands_in_for_test_and_train_alone_is_split(tmp_path: Path) -> None:
    samples = [{**sample, "split": {"test": "val"}.get(sample["split"], "train")} for sample in rows()]
    dataset = open_dataset(str(write_parquet(tmp_path / "val.parquet", samples)))
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 21, "test": 9}
    assert "val split is used" in dataset.notes[0]
    samples = [{**sample, "split": "train"} for sample in rows()]
    dataset = open_dataset(str(write_parquet(tmp_path / "train.parquet", samples)))
    held = len(fifth(rows()))
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 30 - held, "test": held}
    assert "held out" in dataset.notes[0]


def test_names_in_any_script(tmp_path: Path) -> None:
    names = ["猫", "כלב", "🐼 مرحبا", "cafe\u0301", "naïve_Straße"]
    samples = [{**sample, "label": label} for label in names for sample in rows()[:12]]
    dataset = open_dataset(str(write_folder(tmp_path / "sét 集", samples)))
    assert set(dataset.class_names) == {"猫", "כלב", "🐼 مرحبا", "café", "naïve Straße"}
    assert open_dataset(str(write_parquet(tmp_path / "x.parquet", samples))).class_names == dataset.class_names
    assert len(dataset.splits["train"].identity) == 64
    assert dataset.splits["train"].describe(0).startswith("train/")


def test_hidden_and_foreign_files_are_ignored_but_bad_images_are_not(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", rows())
    good = len(open_dataset(str(root)).splits["train"])
    for name in (".DS_Store", "._cat.png", "notes.txt", "labels.csv"):
        (root / "train/cat" / name).write_bytes(b"x")
    (root / ".git").mkdir()
    (root / "train/.cache").mkdir()
    (root / "train/loose.png").write_bytes(picture(1))
    dataset = open_dataset(str(root))
    assert len(dataset.splits["train"]) == good
    assert dataset.notes == ("1 image of 'train' outside any class folder left out.",)
    (root / "train/cat/empty.JPG").write_bytes(b"")
    split = open_dataset(str(root)).splits["train"]
    assert len(split) == good + 1
    index = [split.describe(index) for index in range(len(split))].index("train/cat/empty.JPG")
    with pytest.raises(BadImage, match="empty"):
        split.read(index)


def test_pictures_that_are_not_read_are_counted_by_format(tmp_path: Path, without_heic: None) -> None:
    root = write_folder(tmp_path / "set", rows())
    (root / "train/cat/raw.dng").write_bytes(b"x")
    assert open_dataset(str(root)).notes == (
        "1 DNG left out: FedVL does not read such files here; save them as JPEG or PNG.",
    )
    for name in ("one.heic", "two.HEIC", ".hidden.heic", "notes.txt"):
        (root / "train/cat" / name).write_bytes(b"x")
    assert open_dataset(str(root)).notes == (
        "1 DNG, 2 HEIC left out: FedVL does not read such files here; "
        'pip install "pillow-heif>=1.1" for HEIC, or save them as JPEG or PNG.',
    )


def test_heic_photos_stand_in_a_folder_beside_others_with_the_extra(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    root = write_folder(tmp_path / "set", rows())
    before = open_dataset(str(root))
    Image.new("RGB", (32, 32), "red").save(root / "train/cat/phone.HEIC", "HEIF")
    split = open_dataset(str(root)).splits["train"]
    assert len(split) == len(before.splits["train"]) + 1
    index = [split.describe(index) for index in range(len(split))].index("train/cat/phone.HEIC")
    red, green, blue = np.asarray(split.read(index))[16, 16]
    assert red > 240
    assert max(green, blue) < 15


def flat_folder(root: Path) -> Path:
    root.mkdir()
    for sample in rows():
        (root / sample["name"]).write_bytes(sample["image"])
    return root


def listing(**columns: str) -> bytes:
    """A CSV of the flat folder's images under other names of its columns."""
    names = {"name": "path", "label": "label", "split": "split"} | columns
    lines = [",".join(names.values()), *(",".join(sample[key] for key in names) for sample in rows())]
    return "\n".join(lines).encode()


def as_json_lines() -> bytes:
    samples = ({"path": sample["name"], "label": sample["label"], "split": sample["split"]} for sample in rows())
    return "\n".join(map(json.dumps, samples)).encode()


@pytest.mark.parametrize(
    "name, content",
    [("manifest.csv", listing()), ("manifest.jsonl", as_json_lines()), ("manifest.csv", listing(name="file"))],
)
def test_labels_of_a_manifest_beside_the_images_stay_when_classes_are_chosen(
    name: str, content: bytes, tmp_path: Path
) -> None:
    root = flat_folder(tmp_path / "photos")
    (root / name).write_bytes(content)
    everything = open_dataset(str(root))
    assert [len(everything.splits[part]) for part in ("train", "test")] == [21, 9]
    chosen = open_dataset(str(root), classes=("cat", "dog"))
    assert chosen.class_names == ("cat", "dog")
    assert [np.bincount(chosen.splits[part].labels).tolist() for part in ("train", "test")] == [[7, 7], [3, 3]]
    assert chosen.notes == ("2 of the 3 classes were kept (data.classes).",)


def test_labels_of_a_parquet_file_beside_images_stay_when_classes_are_chosen(tmp_path: Path) -> None:
    root = flat_folder(tmp_path / "photos")
    write_parquet(root / "train.parquet", rows())
    chosen = open_dataset(str(root), classes=("cat", "dog"))
    assert chosen.class_names == ("cat", "dog")
    assert min(chosen.splits["train"].labels) == 0


def test_pictures_of_many_images_are_not_images_without_labels(tmp_path: Path) -> None:
    root = flat_folder(tmp_path / "cifar10")
    assert is_flat(root)
    (root / "data_batch_1.png").write_bytes(picture(0))
    assert not is_flat(root)


@pytest.mark.parametrize("name", ["labels.csv", "LABELS.CSV", "labels.jsonl", "labels.arrow"])
@pytest.mark.parametrize("classes", [None, ("cat", "dog")])
def test_another_table_beside_images_must_be_given_by_its_path(
    name: str, classes: tuple[str, ...] | None, tmp_path: Path
) -> None:
    root = flat_folder(tmp_path / "photos")
    (root / name).write_bytes(listing())
    with pytest.raises(FedVLError, match=f"give its path: .*/photos/{name}"):
        open_dataset(str(root), classes=classes)
    (root / name).rename(root / f".{name}")
    assert len(open_dataset(str(root), classes=("cat", "dog")).splits["train"]) == 30


def test_a_flat_folder_is_all_for_training_under_the_given_names(tmp_path: Path, without_heic: None) -> None:
    flat_folder(tmp_path / "scans")
    (tmp_path / "scans/photo.heic").write_bytes(b"x")
    dataset = open_dataset(str(tmp_path / "scans"), classes=("well", "pneu_monia"))
    assert dataset.class_names == ("well", "pneu monia")
    assert dataset.splits.keys() == {"train"}
    assert dataset.splits["train"].labels.tolist() == [-1] * 30
    assert dataset.notes[1].startswith("1 HEIC left out")
    for classes, said in ((("well",), "two or more"), (("well", "Well"), "that differ"), (None, "--classes cat,dog")):
        with pytest.raises(FedVLError, match=said):
            open_dataset(str(tmp_path / "scans"), classes=classes)
    assert open_dataset("cifar10-mini", classes=("dog", "cat")).class_names == ("cat", "dog")  # these are kept


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    samples = [{**sample, "label": {"cat": "train"}.get(sample["label"], "bus")} for sample in rows()]
    dataset = open_dataset(str(write_folder(tmp_path / "vehicles", samples, with_splits=False)))
    assert dataset.class_names == ("bus", "train")


def test_missing_file_of_a_manifest_is_a_bad_image(tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "set.csv", rows(), tmp_path / "images")
    (tmp_path / "images/cat_00.png").unlink()
    split = open_dataset(str(path)).splits["train"]
    assert len(split.identity) == 64
    with pytest.raises(BadImage, match="cannot be read"):
        split.read(0)


def test_images_without_a_label(tmp_path: Path) -> None:
    samples = [{**sample, "label": sample["label"] if sample["split"] == "test" else ""} for sample in rows()]
    dataset = open_dataset(str(write_manifest(tmp_path / "set.jsonl", samples, tmp_path / "images")))
    assert dataset.class_names == ("cat", "dog", "red panda")
    assert set(dataset.splits["train"].labels) == {-1}
    assert set(dataset.splits["test"].labels) == {0, 1, 2}


def test_catalogue_names_are_found_under_the_data_root(tmp_path: Path) -> None:
    samples = [
        {**sample, "label": {"cat": "AnnualCrop", "dog": "SeaLake"}.get(sample["label"], "Moon")} for sample in rows()
    ]
    write_folder(tmp_path / "eurosat", samples)
    dataset = open_dataset("EuroSAT", tmp_path)
    assert dataset.name == "eurosat"
    assert dataset.class_names == ("annual crop land", "sea or lake", "Moon")
    assert dataset.templates["coop"] == ("a centered satellite photo of {}.",)
    assert "'Moon'" in dataset.notes[0]
    assert "2 of the 10 classes" in dataset.notes[1]


def test_folders_of_domains_are_read_domain_by_domain(tmp_path: Path) -> None:
    for number, domain in enumerate(("art_painting", "cartoon", "photo", "Sketch")):
        for sample in rows()[:9]:
            folder = tmp_path / "pacs" / domain / {"cat": "dog", "dog": "horse"}.get(sample["label"], "house")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / sample["name"]).write_bytes(picture(1000 * number + len(list(folder.iterdir()))))
    dataset = open_dataset("PACS", tmp_path)
    assert dataset.class_names == ("dog", "horse", "house")
    together = [name for split in dataset.splits.values() for name in split.domains or ()]
    assert {name: together.count(name) for name in together} == dict.fromkeys(find("pacs").domains, 9)
    train = dataset.splits["train"]
    names = [train.store.describe(int(row)).split("/")[0] for row in train.rows]
    assert [class_key(name) for name in names] == [class_key(name) for name in train.domains or ()]
    shutil.rmtree(tmp_path / "pacs" / "photo")
    with pytest.raises(FedVLError, match="has no folder of the domain photo; put DOMAIN/CLASS"):
        open_dataset("pacs", tmp_path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_domains_of_a_manifest_or_parquet_file(kind: str, tmp_path: Path) -> None:
    samples = [
        {**sample, "text": "", "domain": "night" if number % 2 else "day"} for number, sample in enumerate(rows())
    ]
    path = tmp_path / f"set.{kind}"
    if kind == "csv":
        write_manifest(path, samples, tmp_path / "images")
        head, *lines = path.read_text().splitlines()
        told = [f"{line},{sample['domain']}" for line, sample in zip(lines, samples, strict=True)]
        path.write_text("\n".join([f"{head},domain", *told]))
    else:
        columns = {name: [sample[name] for sample in samples] for name in ("image", "label", "split", "domain")}
        pq.write_table(pa.table(columns), path)
    test = open_dataset(str(path)).splits["test"]
    assert test.domains == ("day", "night") * 4 + ("day",)


def test_folders_that_are_no_class_are_left_out(tmp_path: Path) -> None:
    samples = [
        {**sample, "label": {"cat": "BACKGROUND_Google", "dog": "Faces"}.get(sample["label"], "emu")}
        for sample in rows()
    ]
    write_parquet(tmp_path / "caltech101.parquet", samples)
    dataset = open_dataset("caltech101", tmp_path)
    assert dataset.class_names == ("face", "emu")  # as the folders: capitals first
    assert len(dataset.splits["train"]) == 14
    assert "10 images of 'BACKGROUND_Google' were left out" in dataset.notes[0]


def test_a_list_of_the_catalogue_chooses_classes(tmp_path: Path) -> None:
    faces = {"cat": "Faces_easy", "dog": "Faces", "red_panda": "accordion"}
    samples = [{**sample, "label": faces[sample["label"]]} for sample in rows()]
    write_parquet(tmp_path / "caltech101.parquet", samples)
    assert open_dataset("caltech101", tmp_path).class_names == ("face", "faces easy", "accordion")
    assert open_dataset("caltech101", tmp_path, ("coop100",)).class_names == ("face", "accordion")
    with pytest.raises(
        FedVLError, match="one name, 'coop'; name two or more classes, or a list of the catalogue: coop100"
    ):
        open_dataset("caltech101", tmp_path, ("coop",))
    with pytest.raises(FedVLError, match=r"one name, 'cat'; name two or more classes\.$"):
        open_dataset("cifar10-mini", None, ("cat",))


def test_texts_come_with_a_manifest_under_the_data_root(tmp_path: Path) -> None:
    (tmp_path / "mm-imdb").mkdir()
    write_manifest(tmp_path / "mm-imdb/manifest.jsonl", rows(), tmp_path / "mm-imdb/images")
    texts = open_dataset("mm-imdb", tmp_path).splits["train"].texts
    assert texts is not None
    assert texts[0] == "a cat no. 0"


def test_data_root_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVL_DATA", str(tmp_path))
    assert default_data_root() == tmp_path
    write_parquet(tmp_path / "cub.parquet", rows())
    assert open_dataset("cub").class_names == ("cat", "dog", "red panda")
    monkeypatch.delenv("FEDVL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_data_root() == tmp_path / "cache/fedvl/data"


def test_an_own_folder_of_a_catalogue_name_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "dtd", rows())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedVLError, match=r"write \./dtd"):
        open_dataset("dtd", tmp_path / "elsewhere")
    assert open_dataset("./dtd").class_names == ("cat", "dog", "red panda")


def empty_class(root: Path) -> Path:
    (write_folder(root / "set", rows()) / "train/unicorn").mkdir()
    return root / "set"


def test_an_empty_class_folder_is_left_out_with_a_note(tmp_path: Path) -> None:
    root = empty_class(tmp_path)
    assert open_dataset(str(root)).class_names == ("cat", "dog", "red panda")
    assert open_dataset(str(root)).notes == ("The class folder 'unicorn' was left out: it has no images.",)
    (root / "train/unicorn/a.jxl").write_bytes(b"x")
    note, further = open_dataset(str(root)).notes
    assert note.startswith("The class folder 'unicorn' was left out: it has no images that FedVL reads (1 JXL); ")
    assert further.startswith("1 JXL left out")


def test_images_without_an_extension_are_read(tmp_path: Path) -> None:
    """As PACS exports DICOM files, and phones some JPEGs; other files without one are not images."""
    samples = [{**sample, "name": f"IM{number:06d}"} for number, sample in enumerate(rows())]
    samples[0]["name"] = "1.2.840.113"
    root = write_folder(tmp_path / "set", samples)
    (root / "train/cat/VERSION").write_text("1")
    dataset = open_dataset(str(root))
    assert [len(dataset.splits[part]) for part in ("train", "test")] == [21, 9]
    assert "test/cat/1.2.840.113" in {dataset.splits["test"].describe(index) for index in range(9)}


def test_corrected_labels_are_read_from_a_table(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set", rows())
    (tmp_path / "corrected.csv").write_text(
        "file,truth,prediction\ntest/cat/cat_07.png,Dog,dog\ntest/dog/dog_08.png,,cat\n"
    )
    data = DataConfig(dataset=str(root), corrections=str(tmp_path / "corrected.csv"))
    before, after = open_dataset(str(root)).splits["test"], OPEN_ANEW.dataset_of(data).splits["test"]
    known = {after.describe(index): CLASSES[after.labels[index]] for index in range(len(after))}
    expected = {before.describe(index): CLASSES[before.labels[index]] for index in range(len(before))}
    del expected["test/dog/dog_08.png"]
    assert known == expected | {"test/cat/cat_07.png": "dog"}
    (tmp_path / "wrong.csv").write_text("name,class\na,b\n")
    for content, said in (
        ("picture,truth\na,b\n", "has no rows with the columns `file` and `label`"),
        ("", "has no rows with the columns"),
        ("file,label\nabsent.png,cat\n", "names 'absent.png', which 'set' does not have"),
        ("file,label\ntest/cat/cat_07.png,yeti\n", "the label 'yeti', but 'set' has other classes"),
    ):
        (tmp_path / "wrong.csv").write_text(content)
        with pytest.raises(FedVLError, match=said):
            OPEN_ANEW.dataset_of(data.model_copy(update={"corrections": str(tmp_path / "wrong.csv")}))
    with pytest.raises(FedVLError, match=r"in UTF-8 \(No such file or directory\)"):
        OPEN_ANEW.dataset_of(data.model_copy(update={"corrections": str(tmp_path / "absent.csv")}))


def one_class(root: Path) -> Path:
    return write_folder(root / "set", [sample for sample in rows() if sample["label"] == "cat"])


def no_images(root: Path) -> Path:
    (root / "set").mkdir()
    (root / "set/readme.txt").write_text("nothing")
    return root / "set"


def stranger_in_test(root: Path) -> Path:
    return write_folder(root / "set", [*rows(), {**rows()[0], "label": "yeti", "split": "test"}])


def two_spellings(root: Path) -> Path:
    return write_folder(root / "set", [*rows(), {**rows()[0], "label": "Red Panda", "split": "train"}])


def only_test(root: Path) -> Path:
    return write_parquet(root / "set.parquet", [sample for sample in rows() if sample["split"] == "test"])


def none_held_out(root: Path) -> Path:
    return write_folder(root / "set", [s for s in rows() if s["name"] not in fifth(rows())], with_splits=False)


def all_held_out(root: Path) -> Path:
    lone = next({**sample, "label": "yeti"} for sample in rows() if sample["name"] in fifth(rows()))
    return write_folder(root / "set", [*(s for s in rows() if s["name"] != lone["name"]), lone], with_splits=False)


def unlabelled_test(root: Path) -> Path:
    return write_parquet(root / "set.parquet", [*rows(), {**rows()[0], "label": None}])


def no_name(root: Path) -> Path:
    return write_folder(root / "set", [*rows(), {**rows()[0], "label": "___", "split": "train"}])


def written(name: str, data: bytes):
    def make(root: Path) -> Path:
        (root / name).write_bytes(data)
        return root / name

    return make


def without_images(root: Path) -> Path:
    pq.write_table(pa.table({"label": ["a", "b"]}), root / "set.parquet")
    return root / "set.parquet"


def paths_for_images(root: Path) -> Path:
    pq.write_table(pa.table({"image": ["a.png", "b.png"], "label": ["a", "b"]}), root / "set.parquet")
    return root / "set.parquet"


def csv_without_labels(root: Path) -> Path:
    (root / "a.png").write_bytes(picture(1))
    return written("set.csv", b"path,diagnosis\na.png,cat\n")(root)


WRONG = {
    "one class": (one_class, "only one class, 'cat'"),
    "no images": (no_images, "no images in class folders"),
    "stranger in test": (stranger_in_test, "test split that are missing from its train split: 'yeti'"),
    "two spellings": (two_spellings, "'Red Panda' and 'red_panda'"),
    "only test": (only_test, "no images to train on"),
    "none held out": (none_held_out, "None of the .* images of .* is in the fifth .*; add images, or mark"),
    "all held out": (all_held_out, "The one image of 'yeti' .*, and none is left to train on; add images of it"),
    "unlabelled test": (unlabelled_test, "test images without a label"),
    "no name": (no_name, "'___', which is blank"),
    "no such thing": (lambda root: root / "absent", "no dataset, folder or file"),
    "other file": (written("set.zip", b"PK"), "is not a dataset"),
    "broken parquet": (written("set.parquet", b"PAR1 no"), "cannot be read as parquet"),
    "parquet without images": (without_images, "no column image"),
    "parquet with paths": (paths_for_images, "does not hold bytes"),
    "empty csv": (written("set.csv", b"path,label\n"), "lists no images"),
    "csv without paths": (
        written("set.csv", b"picture,label\na.png,cat\n"),
        "Line 2 .* has no `path`; .*'picture, label'",
    ),
    "csv not utf-8": (written("set.csv", b"path,label\na.png,caf\xe9\n"), "not in UTF-8; save it so"),
    "csv in utf-16": (written("set.csv", "path\tlabel\na.png\tcat\n".encode("utf-16")), "not in UTF-8; save it so"),
    "spreadsheet": (written("set.xlsx", b"PK"), "in Excel: save as CSV UTF-8"),
    "csv of images elsewhere": (written("set.csv", b"file,label\na.png,cat\n"), "None of the 1 images .* 'a.png'"),
    "csv that leads out": (written("set.csv", b"path,label\n..\\a.png,cat\n"), "Line 2 .* which is not below"),
    "csv without labels": (csv_without_labels, "has no labels; put them in a column `label`"),
    "broken json": (written("set.jsonl", b'{"path": "a.png"}\n{"path": \n'), "Line 2 .* is not JSON"),
    "json list": (written("set.jsonl", b"[1]\n"), "not a JSON object"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_input_gives_one_sentence(kind: str, tmp_path: Path) -> None:
    make, reason = WRONG[kind]
    with pytest.raises(FedVLError, match=reason) as caught:
        open_dataset(str(make(tmp_path)))
    assert "\n" not in str(caught.value)


def test_no_name_at_all() -> None:
    with pytest.raises(FedVLError, match="no dataset, folder or file ''"):
        open_dataset("")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "set.parquet", rows())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FedVLError, match='pip install "pyarrow>=17"'):
        open_dataset(str(path))


def test_added_images_follow_those_of_the_dataset(tmp_path: Path) -> None:
    for name in ("mine", "more"):
        write_folder(tmp_path / name, rows())
    opener, own = Opener(), open_dataset(str(tmp_path / "mine"))
    plain = opener.dataset_of(DataConfig(dataset=str(tmp_path / "mine")))
    assert content(plain) == content(own)
    added = opener.dataset_of(DataConfig(dataset=str(tmp_path / "mine"), additions=[f"new={tmp_path / 'more'}"]))
    assert content(added) == {name: 2 * images for name, images in content(own).items()}
