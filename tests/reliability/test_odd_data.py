"""Data that nobody planned for: a defined result, or one sentence."""

import json
import math

import pytest
from helpers.kills import SMALL
from helpers.runs import run_experiment
from PIL import Image

from fedvl.data.sources import Opener, open_dataset
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.report.page import write_report
from fedvl.runs.requirements import MAX_CLASSES
from fedvl.runs.settings import resolve_experiment

OPENER = Opener(open_dataset, SMALL.model)


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """Write a JSON-lines manifest of images of these (label, how many) and say where it is."""
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))

    def write(classes, rows=()):
        lines = []
        for number, (label, count) in enumerate(classes):
            for index in range(count):
                name = f"{number}-{index}.png"
                Image.new("RGB", (20, 20), (40 * number % 256, 25 * index % 256, 99)).save(tmp_path / name)
                lines.append({"path": name, "label": label, "split": "test" if index % 4 == 3 else "train"})
        path = tmp_path / "set.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in [*lines, *rows]), encoding="utf-8")
        return path

    return write


def perform(path, folder, method="linear", **data):
    experiment = resolve_experiment(
        {
            "method": {"name": method},
            "data": {"dataset": str(path), "clients": 3, "partition": "iid", **data},
            "federation": {"rounds": 2, "threads": 1},
        }
    )
    folder.mkdir()
    result = run_experiment(experiment, folder, Silent(), OPENER)
    write_report(folder)
    return result


NAMES = {
    "emoji": ["🐈", "👩‍👩‍👧‍👦 family"],
    "right to left": ["قطة", "כלב"],
    "four kilobytes": ["long " * 820 + "cat", "long " * 820 + "dog"],
    "markup and control characters": ["<script>alert(1)</script>", 'a "quoted",\tname\u202e'],
    "accents in two spellings of Unicode": ["caf\u00e9", "the\u0301"],
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_any_kind_give_a_result_and_a_report(manifest, tmp_path, kind):
    result = perform(manifest([(name, 8) for name in NAMES[kind]]), tmp_path / "run")
    assert len(result.class_names) == 2
    assert math.isfinite(result.accuracy)
    assert "<script>alert(1)" not in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_client_of_one_image_and_clients_of_none(manifest, tmp_path):
    path = manifest([("cat", 8), ("dog", 8)])  # 12 to train on
    one = perform(path, tmp_path / "one", clients=12)
    assert [sum(row) for row in one.partition_counts] == [1] * 12
    some = perform(path, tmp_path / "none", clients=8, partition="dirichlet:0.05", minimum=0)
    sizes = [sum(row) for row in some.partition_counts]
    assert 0 in sizes
    assert sum(sizes) == 12
    assert math.isfinite(some.accuracy)


def test_a_client_of_one_class(manifest, tmp_path):
    result = perform(manifest([("cat", 8), ("dog", 8)]), tmp_path / "run", clients=2, partition="disjoint")
    assert sorted(sum(count > 0 for count in row) for row in result.partition_counts) == [1, 1]
    assert math.isfinite(result.accuracy)


REFUSED = {
    "one class": ([("cat", 8)], (), "only one class"),
    "the same class in two spellings": ([("red panda", 8), ("Red_Panda", 8)], (), "Red_Panda"),
    "a label that training lacks": (
        [("cat", 8), ("dog", 8)],
        [{"path": "0-0.png", "label": "yeti", "split": "test"}],
        "yeti",
    ),
    "a training image without a label": (
        [("cat", 8), ("dog", 8)],
        [{"path": "0-0.png", "split": "train"}],
        "needs labels",
    ),
    "more clients than images": ([("cat", 2), ("dog", 2)], (), "3"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_one_sentence(manifest, tmp_path, kind):
    classes, rows, words = REFUSED[kind]
    clients = 30 if kind == "more clients than images" else 3
    with pytest.raises(FedVLError, match=words) as caught:
        perform(manifest(classes, rows), tmp_path / "run", clients=clients)
    assert "\n" not in str(caught.value)


def test_a_hundred_thousand_classes_are_one_sentence_before_anything_is_encoded(manifest, tmp_path):
    """Results count every pair of classes, which would take 80 GB: that is said at once."""
    rows = [{"path": "0-0.png", "label": f"class {number}", "split": "train"} for number in range(1, 100_000)]
    with pytest.raises(FedVLError, match=f"100,000 classes, more than {MAX_CLASSES:,}"):
        perform(manifest([("class 0", 4)], rows), tmp_path / "run")
    assert not (tmp_path / "cache").exists()
