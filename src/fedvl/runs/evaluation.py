"""Evaluate a finished run on labelled images: its own test images, or others, on one machine."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedvl.data.own_images import open_own
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.data.stores import Dataset
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import Counts, count
from fedvl.evaluation.figures import Evaluation, Numbers, choose_thresholds, figures, half
from fedvl.evaluation.predict import score_batches
from fedvl.files import checked, read_json, write_whole
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared, prepare
from fedvl.tensors import ByClient, IntArray, Tensors
from fedvl.version import __version__

FILE = "evaluation.json"
OWN_TEST = "the run's own test images"
AT_HALF = "a share of one half"
CHOSEN = "chosen on the run's own test images, by Youden's index"


def evaluate_run(folder: RunFolder, dataset: str | None, display: Display) -> Evaluation:
    """Evaluate the shared model of a run on labelled images, by default its own test images."""
    tensors, last = folder.tensors()
    if dataset is None:
        if folder.result.get("party"):
            raise FedVLError("The test images of a client are elsewhere: say which with --dataset.")
        counts = count_images(prepare(folder.experiment, display, splits=("test",)), tensors, last, folder)
        thresholds, source = None, AT_HALF
    else:
        counts = count_images(prepare_others(folder, dataset, display), tensors, last, folder)
        thresholds, source = thresholds_of(folder, tensors, last, display)
    names = list(folder.result["class_names"])
    return Evaluation(
        **facts_of(folder),
        images_from=OWN_TEST if dataset is None else Path(dataset).name,
        thresholds_from=source,
        secure_sum=False,
        sites=[],
        missing=[],
        refused=[],
        pooled=figures(counts, names, thresholds or [half()] * len(names)),
        by_site={},
    )


def facts_of(folder: RunFolder) -> dict[str, Any]:
    """Return what every evaluation says of the run."""
    return {
        "fedvl_version": __version__,
        "run": folder.path.resolve().name,
        "method": str(folder.result["method"]),
        "model": folder.experiment.model.name,
        "evaluated": datetime.now(UTC).isoformat(timespec="seconds"),
        "class_names": list(folder.result["class_names"]),
    }


def thresholds_of(
    folder: RunFolder, tensors: Tensors, last: ByClient, display: Display
) -> tuple[list[int] | None, str]:
    """Return thresholds chosen on the run's own test images; None if these are not here."""
    if folder.result.get("party"):
        return None, AT_HALF
    try:
        prepared = prepare(folder.experiment, display, splits=("test",))
    except (FedVLError, OSError):
        return None, AT_HALF
    return choose_thresholds(count_images(prepared, tensors, last, folder)), CHOSEN


def count_images(prepared: Prepared, tensors: Tensors, last: ByClient, folder: RunFolder) -> Counts:
    labels, shares = shares_of(prepared, tensors, last, folder)
    if not len(labels):
        raise FedVLError("There are no labelled images to evaluate on: name some with --dataset.")
    return count(labels, shares)


def shares_of(prepared: Prepared, tensors: Tensors, last: ByClient, folder: RunFolder) -> tuple[IntArray, Numbers]:
    """Return labels of labelled test images, and the shares that a run's model gives classes."""
    method = prepared.queried
    if method.clusters:
        raise FedVLError(f"Method '{folder.experiment.method.name}' sorts images into clusters, which have no scores.")
    samples = prepared.test.samples
    samples = samples.take(torch.nonzero(samples.labels >= 0).flatten())
    temperature = folder.result.get("temperature") or 1.0
    placed = {name: tensor.to(prepared.device) for name, tensor in method.tailor(tensors, last).items()}
    parts = [
        (scores.double() / temperature).softmax(-1).cpu()
        for scores in score_batches(method, placed, samples, prepared.experiment.evaluation.batch_size)
    ]
    shares = torch.cat(parts) if parts else torch.zeros(0, len(prepared.class_names), dtype=torch.float64)
    return samples.labels.cpu().numpy(), shares.numpy()


def prepare_others(folder: RunFolder, dataset: str, display: Display) -> Prepared:
    """Prepare labelled images under the run's classes: a test split, or all."""
    experiment, result = folder.experiment, folder.result
    templates: dict[str, tuple[str, ...]] = {experiment.data.templates: tuple(result["templates"])}
    own = open_own(dataset, tuple(result["class_names"]), templates)
    split = own.splits.get("test", own.splits["train"])
    labelled = Dataset(own.name, own.class_names, own.templates, {"test": split}, own.notes)
    changes = {"dataset": dataset, "classes": None, "additions": ()}
    asked = experiment.model_copy(
        update={
            "data": experiment.data.model_copy(update=changes),
            "evaluation": experiment.evaluation.model_copy(update={"protocol": "closed"}),
        }
    )
    return prepare(asked, display, Opener(lambda name, root: labelled, OPEN_ANEW.model), splits=("test",))


def write_evaluation(folder: RunFolder, found: Evaluation) -> None:
    write_whole(folder.file(FILE), found.model_dump_json(indent=1).encode())


def read_evaluation(folder: RunFolder) -> Evaluation | None:
    path = folder.file(FILE)
    content = read_json(path)
    return None if content is None else Evaluation(**checked(Evaluation, content, path))
