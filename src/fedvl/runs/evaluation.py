"""Evaluate a finished run on labelled images: its own test images, or others, on one machine."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvl.config import Experiment
from fedvl.data.own_images import open_own
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.data.stores import Dataset
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import bin_edges, count
from fedvl.evaluation.figures import (
    Evaluation,
    Figures,
    PairedModels,
    choose_thresholds,
    figures_of_counts,
    half,
    paired_models,
)
from fedvl.evaluation.judge import Judge
from fedvl.evaluation.predict import predict_shares
from fedvl.files import Content, Finite, read_json, validated, write_whole
from fedvl.runs.contents import Result
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared, prepare
from fedvl.tensors import ByClient, FloatArray, IntArray, Tensors
from fedvl.version import __version__

FILE, THRESHOLDS = "evaluation.json", "thresholds.json"
OWN_TEST = "the run's own test images"
AT_HALF = "a share of one half"
ON_TEST = "chosen on the run's own test images, by Youden's index"
FROM_SERVER = "chosen on the server's labelled images, by Youden's index, and sent with an evaluation"
ON_VALIDATION = "chosen on validation images that clients held out, by Youden's index"


class Thresholds(Content):
    """thresholds.json of a run: the share of each class from which an image counts as of it."""

    chosen: str  # on which images, and how
    shares: dict[str, Finite]

    def bins(self, names: Sequence[str]) -> list[int]:
        """Return the bins of scores that begin at these shares; at one half for other classes."""
        return [int(np.abs(bin_edges()[:-1] - self.shares.get(name, 0.5)).argmin()) for name in names]


def evaluate_test(
    folder: RunFolder,
    result: Result,
    judge: Judge,
    validator: Judge | None,
    models: tuple[Tensors, ByClient],
    images: str = OWN_TEST,
) -> None:
    """Write figures of a run's test, and thresholds that go with its model.

    Thresholds are chosen on validation images if clients hold some out; otherwise on the test
    images, whose own figures are then given at a share of one half.
    """
    if judge.method.clusters or judge.candidates or judge.for_new is not None or not len(judge.test):
        return
    names, temperature = result.class_names, result.temperature or 1.0
    labels, shares = judge.shares(*models, temperature)
    if not len(labels):
        return
    counts = count(labels, shares)
    held = counts if validator is None else count(*validator.shares(*models, temperature))
    bins = choose_thresholds(held)
    write_thresholds(folder, thresholds_at(bins, names, ON_TEST if validator is None else ON_VALIDATION))
    at_half = validator is None
    found = figures_of_counts(counts, names, [half()] * len(names) if at_half else bins)
    facts = facts_of(folder, result)
    write_evaluation(folder, evaluation_of(facts, found, images, AT_HALF if at_half else ON_VALIDATION))


def evaluate_run(
    folder: RunFolder, dataset: str | None, display: Display, against: RunFolder | None = None
) -> Evaluation:
    """Evaluate the shared model of a run on labelled images, by default its own test images."""
    labels, shares = scores_on(folder, dataset, display)
    if not len(labels):
        raise FedVLError("There are no labelled images to evaluate on: name some with --dataset.")
    names = folder.result.class_names
    chosen = read_thresholds(folder)
    if chosen is None or (dataset is None and chosen.chosen == ON_TEST):
        bins, source = [half()] * len(names), AT_HALF
    else:
        bins, source = chosen.bins(names), chosen.chosen
    found = figures_of_counts(count(labels, shares), names, bins)
    compared = None if against is None else compare_with(folder, against, dataset, labels, shares, display)
    facts = facts_of(folder, folder.result)
    return evaluation_of(facts, found, OWN_TEST if dataset is None else Path(dataset).name, source, compared)


def evaluation_of(
    facts: dict[str, Any], found: Figures, images: str, thresholds: str, against: PairedModels | None = None
) -> Evaluation:
    """Return an evaluation on one machine."""
    return Evaluation(
        **facts,
        images_from=images,
        thresholds_from=thresholds,
        secure_sum=False,
        sites=[],
        missing=[],
        refused=[],
        pooled=found,
        by_site={},
        against=against,
    )


def compare_with(
    folder: RunFolder, other: RunFolder, dataset: str | None, labels: IntArray, shares: FloatArray, display: Display
) -> PairedModels:
    """Compare the model with that of another run, on the same images."""
    if folder.result.class_names != other.result.class_names:
        raise FedVLError(f"The run in {other.path} has other classes, so that the two models cannot be compared.")
    if dataset is None and folder.result.test_sha256 != other.result.test_sha256:
        raise FedVLError(f"The run in {other.path} has other test images; name images for both with --dataset.")
    others, theirs = scores_on(other, dataset, display)
    assert np.array_equal(labels, others)
    return paired_models(other.path.resolve().name, folder.result.class_names, labels, theirs, shares)


def scores_on(folder: RunFolder, dataset: str | None, display: Display) -> tuple[IntArray, FloatArray]:
    """Return labels and shares of a run's own test images, or of others."""
    if dataset is not None:
        prepared = prepare_others(folder, dataset, display)
    elif folder.result.party:
        raise FedVLError("The test images of a client are elsewhere: say which with --dataset.")
    else:
        prepared = prepare(without_validation(folder.experiment), display, splits=("test",))
    return shares_of(prepared, *folder.tensors(), folder)


def facts_of(folder: RunFolder, result: Result) -> dict[str, Any]:
    """Return what every evaluation says of the run."""
    return {
        "fedvl_version": __version__,
        "run": folder.path.resolve().name,
        "method": result.method,
        "model": folder.experiment.model.name,
        "evaluated": datetime.now(UTC).isoformat(timespec="seconds"),
        "class_names": result.class_names,
    }


def shares_of(prepared: Prepared, tensors: Tensors, last: ByClient, folder: RunFolder) -> tuple[IntArray, FloatArray]:
    """Return labels of labelled test images, and the shares that a run's model gives classes."""
    method = prepared.queried
    if method.clusters:
        raise FedVLError(f"Method '{folder.experiment.method.name}' sorts images into clusters, which have no scores.")
    samples = prepared.test.samples
    samples = samples.take(torch.nonzero(samples.labels >= 0).flatten())
    temperature = folder.result.temperature or 1.0
    placed = {name: tensor.to(prepared.device) for name, tensor in method.tailor(tensors, last).items()}
    size = prepared.experiment.evaluation.batch_size
    return samples.labels.cpu().numpy(), predict_shares(method, placed, samples, size, temperature)


def prepare_others(folder: RunFolder, dataset: str, display: Display) -> Prepared:
    """Prepare labelled images under the run's classes: a test split, or all."""
    experiment, result = folder.experiment, folder.result
    templates: dict[str, tuple[str, ...]] = {experiment.data.templates: tuple(result.templates)}
    own = open_own(dataset, tuple(result.class_names), templates)
    split = own.splits.get("test", own.splits["train"])
    labelled = Dataset(own.name, own.class_names, own.templates, {"test": split}, own.notes)
    changes = {"dataset": dataset, "classes": None, "additions": ()}
    asked = without_validation(experiment)
    asked = asked.model_copy(
        update={
            "data": asked.data.model_copy(update=changes),
            "evaluation": asked.evaluation.model_copy(update={"protocol": "closed"}),
        }
    )
    return prepare(asked, display, Opener(lambda name, root: labelled, OPEN_ANEW.model), splits=("test",))


def without_validation(experiment: Experiment) -> Experiment:
    """Return the experiment without images that clients hold out: only its test is prepared."""
    return experiment.model_copy(
        update={
            "evaluation": experiment.evaluation.model_copy(update={"validation": None}),
            "federation": experiment.federation.model_copy(update={"patience": None}),
        }
    )


def write_evaluation(folder: RunFolder, found: Evaluation) -> None:
    write_whole(folder.file(FILE), found.model_dump_json(indent=1).encode())


def read_evaluation(folder: RunFolder) -> Evaluation | None:
    path = folder.file(FILE)
    content = read_json(path)
    return None if content is None else validated(Evaluation, content, path)


def thresholds_at(bins: Sequence[int], names: Sequence[str], chosen: str) -> Thresholds:
    """Return thresholds at the beginnings of these bins of scores."""
    return Thresholds(
        chosen=chosen, shares={name: float(bin_edges()[bin_]) for name, bin_ in zip(names, bins, strict=True)}
    )


def write_thresholds(folder: RunFolder, found: Thresholds) -> None:
    write_whole(folder.file(THRESHOLDS), found.model_dump_json(indent=1).encode())


def read_thresholds(folder: RunFolder) -> Thresholds | None:
    path = folder.file(THRESHOLDS)
    content = read_json(path)
    return None if content is None else validated(Thresholds, content, path)
