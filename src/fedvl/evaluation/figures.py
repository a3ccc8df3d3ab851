"""Clinical figures of an evaluation, from its counts alone, with intervals of 95 %.

Scores are known by bin, so that the order of images within a bin is not: ``binning`` says by how
much a figure may differ from that of the scores themselves. Curves and areas follow scikit-learn:
one class against all others.
"""

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from fedvl.evaluation.counts import GROUPS, MERGED, PARTS, Counts, bin_edges, given
from fedvl.evaluation.statistics import SEED, Interval, Z, delong, mcnemar_of_counts, percentile_interval, wilson
from fedvl.files import Content, Count, Finite, Names
from fedvl.tensors import FloatArray, IntArray

DRAWS = 200  # of counts, for the interval of a figure without a formula
BENEFITS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)  # thresholds near which net benefit is given


class Estimate(Content):
    """A figure, its interval, and by how much binning may have moved it."""

    value: Finite
    low: Finite
    high: Finite
    binning: Finite = 0.0
    noise: Finite = 0.0  # by how much noise on counts may have moved it (95 %), which the interval covers


class NetBenefit(Content):
    """Net benefit of acting above a share, beside acting for all images."""

    threshold: Finite
    model: Finite
    all: Finite


class RocPoint(Content):
    """A point of a ROC curve, in percent."""

    alarms: Finite  # images of other classes that count as of this one
    hits: Finite  # images of this class that do


class ClassFigures(Content):
    """One class against all others; figures at a threshold are in percent."""

    name: str
    images: Count
    auroc: Estimate | None
    average_precision: Estimate | None
    threshold: Finite | None  # share from which an image counts as of this class
    sensitivity: Estimate | None = None
    specificity: Estimate | None = None
    ppv: Estimate | None = None
    npv: Estimate | None = None
    net_benefit: list[NetBenefit] = []
    roc: Annotated[list[RocPoint], Field(max_length=1000)] = []  # from the highest share down


class CalibrationBin(Content):
    """Images whose predicted class has about this share, and the percentage that is right."""

    share: Finite
    right: Finite
    images: Count


class Figures(Content):
    """What counts say of a model; None: not known, or withheld by a site."""

    images: Count
    accuracy: Estimate | None
    balanced_accuracy: Estimate | None
    auroc: Estimate | None
    average_precision: Estimate | None
    ece: Estimate | None
    calibration: list[CalibrationBin]
    classes: Annotated[list[ClassFigures], Field(max_length=100_000)]


class PairedClass(Content):
    """Two models on one class: the second area under the ROC curve less the first (DeLong)."""

    name: str
    first: Finite
    second: Finite
    difference: Estimate
    p: Finite


class PairedModels(Content):
    """Two models on the same images; differences are this model less the other, in points."""

    other: str
    images: Count
    gained: Count  # images that only this model has right
    lost: Count
    difference: Estimate
    p: Finite  # of McNemar's exact test
    classes: list[PairedClass]  # none where only counts are known


class Evaluation(Content):
    """evaluation.json of a run: figures on labelled images, of all sites and of each."""

    fedvl_version: str
    run: str
    method: str
    model: str
    images_from: str
    thresholds_from: str
    secure_sum: bool
    evaluated: str  # when
    class_names: Names
    sites: Names
    missing: Names
    refused: Names
    pooled: Figures
    by_site: dict[str, Figures]
    against: PairedModels | None = None
    epsilon: Finite | None = None  # at delta, of the noise that hides each image in the counts
    delta: Finite | None = None


class Curve(NamedTuple):
    """Images of this class and others in each bin that is given, from the highest share down."""

    positive: IntArray
    negative: IntArray
    begins: IntArray  # number of the bin where each begins


def curve_of(scores: IntArray) -> Curve:
    bins = [(first, counts) for first, _, counts in given(scores)][::-1]
    return Curve(
        np.array([counts[1] for _, counts in bins]),
        np.array([counts[0] for _, counts in bins]),
        np.array([first for first, _ in bins]),
    )


def figures_of_counts(counts: Counts, names: Sequence[str], thresholds: Sequence[int]) -> Figures:
    """Return all figures; ``thresholds``: the bin of each class from which an image is of it."""
    classes = [
        class_figures(name, curve_of(table), threshold)
        for name, table, threshold in zip(names, counts.scores, thresholds, strict=True)
    ]
    images = counts.images
    hits = np.diag(counts.confusion)
    known = not (hits == MERGED).any() and images.any()
    whole = images.any() and not (counts.calibration == MERGED).any() and counts.calibration.sum() == images.sum()
    return Figures(
        images=int(images.sum()),
        accuracy=share_estimate(int(hits.sum()), int(images.sum())) if known else None,
        balanced_accuracy=balanced(hits, images) if known else None,
        auroc=mean_estimate([each.auroc for each in classes]),
        average_precision=mean_estimate([each.average_precision for each in classes]),
        ece=binned_error(counts.calibration) if whole else None,
        calibration=calibration_curve(counts.calibration) if whole else [],
        classes=classes,
    )


def class_figures(name: str, curve: Curve, threshold: int) -> ClassFigures:
    positives, negatives = int(curve.positive.sum()), int(curve.negative.sum())
    figures = ClassFigures(name=name, images=positives, auroc=None, average_precision=None, threshold=None)
    if not (positives and negatives):
        return figures
    at = int(np.argmin(np.abs(curve.begins - threshold)))  # a merged bin may have no edge there
    hits, alarms = (int(part[: at + 1].sum()) for part in (curve.positive, curve.negative))
    rest = positives - hits, negatives - alarms
    return figures.model_copy(
        update={
            "auroc": auroc(curve),
            "average_precision": average_precision(curve),
            "threshold": float(bin_edges()[curve.begins[at]]),
            "sensitivity": share_estimate(hits, positives),
            "specificity": share_estimate(rest[1], negatives),
            "ppv": share_estimate(hits, hits + alarms),
            "npv": share_estimate(rest[1], sum(rest)),
            "net_benefit": net_benefits(curve),
            "roc": roc_points(curve),
        }
    )


def roc_points(curve: Curve) -> list[RocPoint]:
    """Return the ROC curve; points on a straight line between others are left out."""
    points = np.zeros((len(curve.begins) + 1, 2))
    for column, part in enumerate((curve.negative, curve.positive)):
        points[1:, column] = 100 * np.cumsum(part) / part.sum()
    points = points[np.append(True, (np.diff(points, axis=0) != 0).any(1))]  # bins without images
    steps = np.diff(points, axis=0)
    turns = steps[:-1, 0] * steps[1:, 1] != steps[:-1, 1] * steps[1:, 0]
    kept = [points[0], *points[1:-1][turns], points[-1]]
    return [RocPoint(alarms=float(alarms), hits=float(hits)) for alarms, hits in kept]


def choose_thresholds(counts: Counts) -> list[int]:
    """Return the bin of each class with the largest sensitivity + specificity (Youden's index)."""
    found = []
    for table in counts.scores:
        curve = curve_of(table)
        rates = (np.cumsum(part) / max(1, part.sum()) for part in (curve.positive, curve.negative))
        sensitivity, alarms = rates
        both = bool(curve.positive.sum() and curve.negative.sum())
        found.append(int(curve.begins[int(np.argmax(sensitivity - alarms))]) if both else half())
    return found


def half() -> int:
    """Return the bin that begins at a share of one half."""
    return int(np.searchsorted(bin_edges(), 0.5))


def share_estimate(hits: int, count: int) -> Estimate | None:
    """Return a percentage with Wilson's interval; None of nothing."""
    if not count:
        return None
    low, high = wilson(100 * hits / count, count)
    return Estimate(value=100 * hits / count, low=low, high=high)


def balanced(hits: IntArray, images: IntArray) -> Estimate:
    """Return the mean recall of the classes that occur; each class has its own images."""
    seen = images > 0
    rates = [wilson(100 * hit / n, int(n)) for hit, n in zip(hits[seen], images[seen], strict=True)]
    percents = 100 * hits[seen] / images[seen]
    mean = float(percents.mean())
    below, above = (
        math.sqrt(sum((bounds[side] - percent) ** 2 for bounds, percent in zip(rates, percents, strict=True)))
        for side in (0, 1)
    )
    return Estimate(value=mean, low=mean - below / len(rates), high=mean + above / len(rates))


def mean_estimate(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """Return the mean of classes: as the same images are in each, so is that of the bounds."""
    known = [each for each in estimates if each is not None]
    if not known:
        return None
    return Estimate(**{name: float(np.mean([getattr(each, name) for each in known])) for name in Estimate.model_fields})


def auroc(curve: Curve) -> Estimate:
    """Return the area under the ROC curve; pairs within a bin count half (DeLong's variance)."""
    positives, negatives = curve.positive.sum(), curve.negative.sum()
    below = negatives - np.cumsum(curve.negative)  # others in lower bins
    above = np.cumsum(curve.positive) - curve.positive  # of the class in higher bins
    of_positive = (below + curve.negative / 2) / negatives
    of_negative = (above + curve.positive / 2) / positives
    value = float((curve.positive * of_positive).sum() / positives)
    variance = sum(
        (counts * (parts - value) ** 2).sum() / (max(1, total - 1) * total)
        for counts, parts, total in (
            (curve.positive, of_positive, positives),
            (curve.negative, of_negative, negatives),
        )
    )
    binning = float((curve.positive * curve.negative).sum() / (2 * positives * negatives))
    low, high = on_odds(value, math.sqrt(float(variance)), int(min(positives, negatives)))
    return Estimate(value=value, low=low, high=high, binning=binning)


def on_odds(value: float, error: float, images: int) -> Interval:
    """Return an interval that is symmetric in log-odds; of 0 and 1, that of no miss in n images."""
    if not 0 < value < 1 or error == 0:
        low, high = wilson(100 * value, images)
        return Interval(low / 100, high / 100)
    odds, half_width = math.log(value / (1 - value)), Z * error / (value * (1 - value))
    return Interval(*(1 / (1 + math.exp(-(odds + side * half_width))) for side in (-1, 1)))


def average_precision(curve: Curve) -> Estimate:
    """Return the average precision, with the bounds of every order within the bins."""
    value = float(precision_areas(curve.positive[None], curve.negative[None])[0])
    best, worst = 0.0, 0.0
    hits, alarms = 0, 0
    for positive, negative in zip(curve.positive.tolist(), curve.negative.tolist(), strict=True):
        steps = hits + np.arange(1, positive + 1)
        best += float((steps / (steps + alarms)).sum())
        worst += float((steps / (steps + alarms + negative)).sum())
        hits, alarms = hits + positive, alarms + negative
    binning = max(best / hits - value, value - worst / hits, 0.0)
    generator = np.random.default_rng(SEED)
    drawn = (
        generator.multinomial(int(part.sum()), part / part.sum(), DRAWS) for part in (curve.positive, curve.negative)
    )
    low, high = percentile_interval(precision_areas(*drawn))
    return Estimate(value=value, low=low, high=high, binning=binning)


def precision_areas(positive: IntArray, negative: IntArray) -> FloatArray:
    """Return the average precision of each row of counts, from the highest bin down."""
    hits, alarms = np.cumsum(positive, 1), np.cumsum(negative, 1)
    areas: FloatArray = (positive * hits / np.maximum(1, hits + alarms)).sum(1) / hits[:, -1]
    return areas


def net_benefits(curve: Curve) -> list[NetBenefit]:
    """Return hits less weighted false alarms per image, near some thresholds."""
    starts, positives = bin_edges()[curve.begins], int(curve.positive.sum())
    images = positives + int(curve.negative.sum())
    found = {}
    for wanted in BENEFITS:
        at = int(np.argmin(np.abs(starts - wanted)))
        share = float(starts[at])
        if 0 < share < 1:
            hits, alarms = curve.positive[: at + 1].sum(), curve.negative[: at + 1].sum()
            weight = share / (1 - share)
            found[share] = NetBenefit(
                threshold=share,
                model=float(hits - weight * alarms) / images,
                all=float(positives - weight * (images - positives)) / images,
            )
    return list(found.values())


# --- two models


def paired_models(
    other: str, names: Sequence[str], labels: IntArray, first: FloatArray, second: FloatArray
) -> PairedModels:
    """Compare the shares that two models give on the same images: ``first`` of the other model."""
    right = [scores.argmax(1) == labels for scores in (first, second)]
    gained, lost = int((~right[0] & right[1]).sum()), int((right[0] & ~right[1]).sum())
    classes = []
    for number, name in enumerate(names):
        truth = labels == number
        if 1 < truth.sum() < len(truth) - 1:
            test = delong(truth, first[:, number], second[:, number])
            low, high = test.interval
            difference = Estimate(value=test.second - test.first, low=low, high=high)
            classes.append(
                PairedClass(name=name, first=test.first, second=test.second, difference=difference, p=test.p)
            )
    return paired_counts(other, gained, lost, len(labels), classes)


def paired_counts(other: str, gained: int, lost: int, images: int, classes: Sequence[PairedClass] = ()) -> PairedModels:
    """Compare two models by how many images only one of them has right."""
    test = mcnemar_of_counts(gained, lost, images)
    return PairedModels(
        other=other,
        images=images,
        gained=gained,
        lost=lost,
        difference=Estimate(value=test.difference, low=test.interval.low, high=test.interval.high),
        p=test.p,
        classes=list(classes),
    )


# --- calibration


SIZE = GROUPS * PARTS
MIDDLES = (np.arange(SIZE) + 0.5) / SIZE  # of the parts of shares


def calibration_curve(calibration: IntArray) -> list[CalibrationBin]:
    """Return the bins of the ECE that have images."""
    images = calibration.sum(0).reshape(GROUPS, PARTS)
    right = calibration[1].reshape(GROUPS, PARTS).sum(1)
    middles = MIDDLES.reshape(GROUPS, PARTS)
    return [
        CalibrationBin(
            share=float((middles[group] * images[group]).sum() / total),
            right=100 * int(right[group]) / total,
            images=total,
        )
        for group, total in enumerate(images.sum(1).tolist())
        if total
    ]


def binned_error(calibration: IntArray) -> Estimate:
    """Return the ECE in points; binning: shares are known to half the width of a part."""
    images = int(calibration.sum())

    def error(tables: IntArray) -> FloatArray:
        surplus = tables[:, 1] - MIDDLES * tables.sum(1)
        parts: FloatArray = 100 * np.abs(surplus.reshape(-1, GROUPS, PARTS).sum(-1)).sum(-1) / images
        return parts

    drawn = np.random.default_rng(SEED).multinomial(images, calibration.ravel() / images, DRAWS)
    low, high = percentile_interval(error(drawn.reshape(DRAWS, 2, SIZE)))
    value = float(error(calibration[None])[0])
    return Estimate(value=value, low=low, high=high, binning=100 / (2 * SIZE))
