"""Evaluating a finished run on one machine: its own test images, others, and what it refuses."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
from helpers.finished import RUNS, finish
from PIL import Image
from sklearn import metrics

from fedvl.data.sources import open_dataset
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import bin_edges, count
from fedvl.evaluation.figures import choose_thresholds, half
from fedvl.runs.evaluation import (
    AT_HALF,
    ON_TEST,
    ON_VALIDATION,
    evaluate_run,
    prepare_others,
    read_evaluation,
    read_thresholds,
    shares_of,
    without_validation,
)
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare


@pytest.fixture
def run(folder_of, tmp_path):
    shutil.copytree(folder_of("linear"), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def others(tmp_path):
    """Labelled images in folders: 12 of each of three of the run's classes."""
    dataset = open_dataset("cifar10-mini")
    split, left = dataset.splits["train"], dict.fromkeys(range(3), 12)
    for row, label in enumerate(split.labels.tolist()):
        if left.get(label):
            left[label] -= 1
            (tmp_path / "others" / dataset.class_names[label]).mkdir(parents=True, exist_ok=True)
            split.read(row).save(tmp_path / "others" / dataset.class_names[label] / f"{row}.png")
    return tmp_path / "others"


def test_the_figures_of_the_test_are_those_of_the_result(run):
    folder = RunFolder(run)
    found: Any = evaluate_run(folder, None, Silent())
    assert found.pooled.accuracy.value == pytest.approx(folder.result.accuracy)
    assert found.pooled.balanced_accuracy.value == pytest.approx(folder.result.macro_recall)
    assert abs(found.pooled.ece.value - folder.result.ece) <= found.pooled.ece.binning
    assert found.thresholds_from == AT_HALF


def test_other_images_are_evaluated_under_the_classes_of_the_run(run, others):
    folder = RunFolder(run)
    found: Any = evaluate_run(folder, str(others), Silent())
    labels, shares = shares_of(prepare_others(folder, str(others), Silent()), *folder.tensors(), folder)
    assert found.pooled.images == len(labels) == 36
    assert found.thresholds_from == ON_TEST
    assert found.pooled.accuracy.value == pytest.approx(100 * (shares.argmax(1) == labels).mean())
    for number, each in enumerate(found.pooled.classes):
        if number < 3:
            wanted = metrics.roc_auc_score(labels == number, shares[:, number])
            assert abs(each.auroc.value - wanted) <= each.auroc.binning + 1e-12
        else:
            assert each.auroc is None
    assert np.isclose(shares.sum(1), 1).all()


def test_classes_that_the_run_does_not_know_are_refused(run, tmp_path):
    (tmp_path / "others" / "melanoma").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "others" / "melanoma" / "1.png")
    with pytest.raises(FedVLError, match="classes that this federation does not know"):
        evaluate_run(RunFolder(run), str(tmp_path / "others"), Silent())


def scores_of(folder):
    prepared = prepare(without_validation(folder.experiment), Silent(), splits=("test",))
    tensors, last = folder.tensors()
    return shares_of(prepared, tensors, last, folder)


def test_a_finished_run_has_the_figures_and_the_thresholds_of_its_test(run):
    folder: Any = RunFolder(run)
    written: Any = read_evaluation(folder)
    again: Any = evaluate_run(folder, None, Silent())
    assert written.pooled == again.pooled
    labels, shares = scores_of(folder)
    chosen: Any = read_thresholds(folder)
    assert chosen.chosen == ON_TEST
    bins = choose_thresholds(count(labels, shares))
    assert chosen.bins(folder.result.class_names) == bins
    assert chosen.bins(["a class of nobody"]) == [half()]
    assert list(chosen.shares.values()) == [bin_edges()[bin_] for bin_ in bins]


def test_thresholds_are_chosen_on_held_out_images_if_there_are_some(tmp_path):
    settings = {**RUNS["linear"], "evaluation": {"validation": 0.3}}
    finish(tmp_path / "held", settings)
    folder = RunFolder(tmp_path / "held")
    chosen: Any = read_thresholds(folder)
    written: Any = read_evaluation(folder)
    assert chosen.chosen == written.thresholds_from == ON_VALIDATION
    labels, shares = scores_of(folder)
    for number, each in enumerate(written.pooled.classes):
        assert each.threshold == chosen.shares[each.name]
        said = shares[:, number] >= each.threshold
        assert each.sensitivity.value == pytest.approx(100 * metrics.recall_score(labels == number, said))
    again: Any = evaluate_run(folder, None, Silent())
    assert (again.pooled, again.thresholds_from) == (written.pooled, ON_VALIDATION)


def test_clients_own_models_are_evaluated_each_on_its_own_images(folder_of):
    folder = RunFolder(folder_of("fedpp"))
    written: Any = read_evaluation(folder)
    right = np.diag(folder.result.confusion).sum() / np.sum(folder.result.confusion)
    assert folder.experiment.evaluation.protocol == "personal"
    assert written.pooled.accuracy.value == pytest.approx(100 * right)


def test_two_models_are_compared_on_the_same_images(run, others, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    folder = RunFolder(run)
    same: Any = evaluate_run(folder, str(others), Silent(), RunFolder(other)).against
    assert (same.images, same.gained, same.lost, same.p) == (36, 0, 0, 1.0)
    assert [(each.difference.value, each.p) for each in same.classes] == [(0.0, 1.0)] * 3
    result = json.loads((other / "result.json").read_text())
    for changes, said in (
        ({"test_sha256": "0" * 64}, "other test images"),
        ({"class_names": result["class_names"][::-1]}, "other classes"),
    ):
        (other / "result.json").write_text(json.dumps({**result, **changes}))
        with pytest.raises(FedVLError, match=said):
            evaluate_run(folder, None, Silent(), RunFolder(other))
