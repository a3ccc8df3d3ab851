"""Real runs of every protocol on the embedded sets get their report."""

import json
from functools import cache

import numpy as np
import pytest
import torch

from fedvl.config import overlay
from fedvl.data.sources import Opener
from fedvl.display import TerminalDisplay
from fedvl.evaluation.examples import thumbnail
from fedvl.evaluation.statistics import wilson
from fedvl.report.page import write_report
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

SHORT = {"federation": {"rounds": 2, "threads": 1}, "training": {"local_epochs": 1}, "data": {"clients": 3, "shots": 8}}
FUSED = {"data": {"shots": 2, "test_shots": 3, "missing": "both:0.5"}, "federation": {"rounds": 1}}


@cache
def opener():
    return Opener.once()


@pytest.fixture
def run_of(tmp_path):
    def make(method, protocol, **settings):
        layered = {"method": {"name": method}, "evaluation": {"protocol": protocol}}
        overlay(layered, SHORT)
        overlay(layered, settings)
        RunFolder(tmp_path).describe(resolve_experiment(layered))
        threads = torch.get_num_threads()
        with TerminalDisplay(quiet=True) as display:
            result = complete(RunFolder(tmp_path), display, opener())
        torch.set_num_threads(threads)
        return result, write_report(tmp_path).read_text(encoding="utf-8")

    return make


def test_closed_shows_images_that_changed_from_a_file_of_their_own(run_of, tmp_path):
    result, page = run_of("linear", "closed", training={"learning_rate": 0.1})
    examples = json.loads((tmp_path / "examples.json").read_text())
    assert len(examples["gained"]) == 8
    assert page.count("<img") == len(examples["gained"]) + len(examples["lost"])
    for example in examples["gained"]:
        assert example["true"] == example["answer"] != example["zero_shot"]
        assert example["image"] in page
    for example in examples["lost"]:
        assert example["true"] == example["zero_shot"] != example["answer"]
    assert (tmp_path / "examples.json").stat().st_size < 150_000
    assert "examples" not in result.to_dict()
    assert "examples" not in json.loads((tmp_path / "result.json").read_text())


def test_no_image_leaves_the_dataset_if_none_is_wanted(run_of, tmp_path):
    _, page = run_of("linear", "closed", evaluation={"examples": 0})
    assert not (tmp_path / "examples.json").exists()
    assert "<img" not in page


def test_zero_shot_changes_nothing(run_of, tmp_path):
    _, page = run_of("zero-shot", "closed")
    assert not (tmp_path / "examples.json").exists()
    assert "No rounds: nothing was trained." in page


def test_open_asks_about_other_classes_and_shows_their_images(run_of, tmp_path):
    result, page = run_of("fedclip", "open", training={"learning_rate": 0.01})
    assert set(result.class_names) < set(result.partition_class_names)
    assert "open protocol" in page
    # Questions are asked in a shuffled order; each picture is one of the class that it is said to be of.
    dataset = opener().dataset("cifar10-mini", None)
    splits = (dataset.splits["test"], dataset.splits["train"])  # all images of the classes are asked about
    examples = json.loads((tmp_path / "examples.json").read_text())
    assert examples["gained"] + examples["lost"]
    for example in examples["gained"] + examples["lost"]:
        label = dataset.class_names.index(example["true"])
        assert example["image"] in {
            thumbnail(split.read(int(row))) for split in splits for row in np.flatnonzero(split.labels == label)
        }


def test_personal_shows_every_client(run_of):
    result, page = run_of("linear", "personal", training={"learning_rate": 0.1})
    keys = ("per_client_accuracy", "zero_shot_per_client_accuracy", "per_client_test_images")
    for client, (own, before, count) in enumerate(zip(*(getattr(result, key) for key in keys), strict=True)):
        low, high = wilson(own, count)
        name = f"client {client} (n = {count}, {low:.0f} to {high:.0f})"
        assert f"{name}: {own:.2f} %, zero-shot {before:.2f} %" in page


@pytest.mark.slow
def test_missing_shows_seven_conditions_and_the_map(run_of):
    result, page = run_of("fedavg-p", "missing", **FUSED)
    assert len(result.conditions) == 7
    for row in result.conditions:
        assert f">{row.condition}</th>" in page
    assert 'id="map"' in page
    assert 'id="zero-shot"' not in page
