"""Counts of an evaluation with noise that hides each image, and what it does to figures.

Two tables of whole numbers; of fewer bins than without noise, as each has noise of its own:

    scores  [class, other or this class, bin] images by the log-odds of the class
    hits    [class] images of the class that the model has right

One image more adds 1 to a bin of each class and at most 1 to the hits, so that the tables move by
a norm of sqrt(classes + 1) at most. The server knows how much noise there is. It makes counts
that can be (without negative ones), and draws the noise again to see by how much figures move.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedvl.evaluation.counts import BINS, GROUPS, MERGED, Counts
from fedvl.evaluation.counts import PARTS as PARTS_OF_SHARE
from fedvl.evaluation.figures import ClassFigures, Estimate, Figures, figures_of_counts, share_estimate
from fedvl.evaluation.statistics import SEED, Z
from fedvl.tensors import FloatArray, IntArray

WIDTH_OF_BIN = 6  # bins without noise, of log-odds 0.75, for log-odds between -5.25 and 5.25; the rest is in two
COARSE_STARTS = (0, *range(BINS // 2 - 7 * WIDTH_OF_BIN, BINS // 2 + 8 * WIDTH_OF_BIN, WIDTH_OF_BIN))
COARSE_ENDS = [start - 1 for start in (*COARSE_STARTS[1:], BINS)]
COARSE_BINS = len(COARSE_STARTS)
REDRAWS = 40
SURE = 4.0  # deviations of the noise that the images of a class must exceed
OVERALL_FIGURES = ("accuracy", "balanced_accuracy", "auroc", "average_precision")
CLASS_FIGURES = ("auroc", "average_precision", "sensitivity", "specificity", "ppv", "npv")

CoarseTables = Mapping[str, IntArray]


def coarse_shapes(classes: int) -> dict[str, tuple[int, ...]]:
    return {"scores": (classes, 2, COARSE_BINS), "hits": (classes,)}


def sensitivity_to_an_image(classes: int) -> float:
    """Return the norm by which one image more moves both tables, at most."""
    return math.sqrt(classes + 1)


def coarse(counts: Counts) -> dict[str, IntArray]:
    """Return the tables to which noise is added."""
    scores: IntArray = np.add.reduceat(counts.scores, COARSE_STARTS, axis=-1)
    return {"scores": scores, "hits": np.diag(counts.confusion).copy()}


def figures_with_noise(
    tables: CoarseTables, deviation: float, names: Sequence[str], thresholds: Sequence[int]
) -> Figures:
    """Return figures of tables with noise of this deviation on each count.

    Intervals cover the noise as well: it is drawn again for counts that are like these. A class
    with few images beside the noise has no figures, for they would be those of the noise.
    """
    least = SURE * deviation * math.sqrt(COARSE_BINS)
    known = tables["scores"][:, 1].sum(-1) > least
    found = measured_figures(tables, known, names, thresholds)
    like: CoarseTables = {"scores": possible_counts(tables)["scores"], "hits": tables["hits"]}
    generator = np.random.default_rng(SEED)
    again = [
        measured_figures(redrawn(like, deviation, generator), known, names, thresholds)
        for _ in range(REDRAWS if deviation else 0)
    ]
    wider = {key: widened(getattr(found, key), [getattr(each, key) for each in again]) for key in OVERALL_FIGURES}
    classes = [
        widened_class(each, [other.classes[number] for other in again]) for number, each in enumerate(found.classes)
    ]
    return found.model_copy(update={**wider, "classes": classes})


def measured_figures(
    tables: CoarseTables | Mapping[str, FloatArray],
    known: NDArray[np.bool_],
    names: Sequence[str],
    thresholds: Sequence[int],
) -> Figures:
    """Return the figures of tables with noise, of classes that are ``known`` to have images.

    The accuracy is of sums of the noisy counts themselves, whose noise has no preferred direction.
    """
    possible = possible_counts(tables)
    possible["scores"][~known, 1] = possible["hits"][~known] = 0
    images = max(0, round(float(tables["scores"].sum((1, 2)).mean())))
    hits = min(max(0, round(float(tables["hits"].sum()))), images)
    found = figures_of_counts(as_counts(possible), names, thresholds)
    return found.model_copy(update={"images": images, "accuracy": share_estimate(hits, images)})


def redrawn(tables: CoarseTables, deviation: float, generator: np.random.Generator) -> dict[str, FloatArray]:
    return {name: table + generator.normal(0, deviation, table.shape) for name, table in tables.items()}


def possible_counts(tables: Mapping[str, IntArray] | Mapping[str, FloatArray]) -> dict[str, IntArray]:
    """Return the nearest counts that can be: none is negative, and rows keep their sums."""
    scores = np.stack([[nearest_counts(row) for row in of_class] for of_class in tables["scores"]])
    images = scores[:, 1].sum(-1)
    hits: IntArray = np.clip(np.rint(tables["hits"]), 0, images).astype(np.int64)
    return {"scores": scores, "hits": hits}


def nearest_counts(row: IntArray | FloatArray) -> IntArray:
    """Return the nearest row without negative numbers and with the same sum, in whole numbers."""
    total = float(row.sum())
    if total <= 0:
        return np.zeros(len(row), np.int64)
    falling = np.sort(row)[::-1]
    excess = (np.cumsum(falling) - total) / np.arange(1, len(row) + 1)
    kept = np.flatnonzero(falling > excess)[-1]
    whole: IntArray = np.rint(np.maximum(row - excess[kept], 0)).astype(np.int64)
    return whole


def as_counts(tables: CoarseTables) -> Counts:
    """Return the tables with merged bins; what they do not say is not given."""
    classes = len(tables["hits"])
    scores = np.full((classes, 2, BINS), MERGED)
    scores[..., COARSE_ENDS] = tables["scores"]
    confusion = np.full((classes, classes), MERGED)
    np.fill_diagonal(confusion, tables["hits"])
    return Counts(scores, confusion, np.zeros((2, GROUPS * PARTS_OF_SHARE), np.int64))


def widened_class(found: ClassFigures, again: Sequence[ClassFigures]) -> ClassFigures:
    figures = {key: widened(getattr(found, key), [getattr(each, key) for each in again]) for key in CLASS_FIGURES}
    return found.model_copy(update=figures)


def widened(found: Estimate | None, again: Sequence[Estimate | None]) -> Estimate | None:
    """Return an estimate whose interval covers the noise; None if it has a value by chance only."""
    values = [each.value for each in again if each is not None]
    if found is None or len(values) < len(again):
        return None
    noise = Z * float(np.std(values)) if values else 0.0
    below, above = (math.hypot(bound - found.value, noise) for bound in (found.low, found.high))
    return found.model_copy(update={"low": found.value - below, "high": found.value + above, "noise": noise})
