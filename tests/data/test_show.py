"""The catalogue and a dataset as tables in the terminal."""

import pytest

from fedvl.data.catalogue import catalogue
from fedvl.data.show import how, list_datasets, show_dataset
from fedvl.data.sources import default_data_root, open_dataset


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


@pytest.mark.parametrize(
    "embedded, fetchable, expected",
    [
        (True, False, "embedded"),
        (True, True, "embedded"),
        (False, True, "fedvl data get"),
        (False, False, "fedvl data show"),
    ],
)
def test_how_images_are_got(embedded, fetchable, expected):
    assert how(embedded, fetchable) == expected


def test_each_dataset_of_the_catalogue_has_a_row(capsys):
    list_datasets()
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines[1:] if line.strip()}
    for name, entry in catalogue().items():
        assert entry.title in rows[name]
        assert f" {entry.classes} " in rows[name]
        assert rows[name].rstrip().endswith(how(entry.embedded, entry.fetchable))
    assert f"Datasets are stored in {default_data_root()}." in lines[-1]


def test_images_are_counted_by_class_and_split_with_templates_and_notes(capsys, tmp_path):
    from PIL import Image

    for split, label, count in (("train", "cat", 3), ("train", "dog", 2), ("test", "dog", 4), ("test", "cat", 1)):
        (tmp_path / "pets" / split / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (4, 4), (number, len(label), 0)).save(tmp_path / "pets" / split / label / f"{number}.png")
    (tmp_path / "pets" / "readme.gif").write_bytes(b"")
    show_dataset(str(tmp_path / "pets"), None)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    dataset = open_dataset(str(tmp_path / "pets"))
    assert lines[0] == f"{dataset.name}: 2 classes".split()
    assert lines[1] == ["class", *dataset.splits]
    rows = {line[0]: line[1:] for line in lines if line}
    counts = {
        "cat": {"train": "3", "test": "1"},
        "dog": {"train": "2", "test": "4"},
        "all": {"train": "5", "test": "5"},
    }
    for name, expected in counts.items():
        assert rows[name] == [expected[split] for split in dataset.splits]
    assert sum(line[:1] == ["templates"] for line in lines) == len(dataset.templates)
    assert sum(line[:1] == ["Note:"] for line in lines) == len(dataset.notes)
