"""Evaluating a finished run on one machine: its own test images, others, and what it refuses."""

import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn import metrics

from fedvl.data.sources import open_dataset
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.evaluation import AT_HALF, CHOSEN, evaluate_run, prepare_others, shares_of
from fedvl.runs.folder import RunFolder


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
    assert found.pooled.accuracy.value == pytest.approx(folder.result["accuracy"])
    assert found.pooled.balanced_accuracy.value == pytest.approx(folder.result["macro_recall"])
    assert abs(found.pooled.ece.value - folder.result["ece"]) <= found.pooled.ece.binning
    assert found.thresholds_from == AT_HALF


def test_other_images_are_evaluated_under_the_classes_of_the_run(run, others):
    folder = RunFolder(run)
    found: Any = evaluate_run(folder, str(others), Silent())
    labels, shares = shares_of(prepare_others(folder, str(others), Silent()), *folder.tensors(), folder)
    assert found.pooled.images == len(labels) == 36
    assert found.thresholds_from == CHOSEN
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
