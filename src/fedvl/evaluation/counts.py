"""What a site sends of an evaluation: counts of images, and no score of a single one.

Three tables of whole numbers, which add up over sites:

    scores       [class, other or this class, bin] images by the log-odds of the class
    confusion    [true class, predicted class] images
    calibration  [wrong or right, bin] images by the share of the predicted class

A table that leaves by itself has no small cells (:func:`withheld`): bins are merged until each has
no image or enough of them. A bin that is counted with the next one holds -1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvl.tensors import IntArray

LIMIT, BINS = 16.0, 256  # of log-odds: bins of 1/8 between these limits
STEP = 2 * LIMIT / BINS
GROUPS, PARTS = 15, 20  # of the share of the predicted class: bins of the ECE, and parts of each
PAIR = ("both", "first", "second", "neither")  # of two models, which has an image right
MERGED = -1  # in place of a count that is not given by itself
MAX_IMAGES = 2**31  # images of a site: what claims more is a lie


class Counts(NamedTuple):
    """How a model did on images, as counts."""

    scores: IntArray
    confusion: IntArray
    calibration: IntArray

    @property
    def images(self) -> IntArray:
        """The number of images of each class."""
        found: IntArray = np.maximum(self.scores[:, 1], 0).sum(-1)
        return found


def shapes_of_counts(classes: int) -> dict[str, tuple[int, ...]]:
    return {"scores": (classes, 2, BINS), "confusion": (classes, classes), "calibration": (2, GROUPS * PARTS)}


def empty(classes: int) -> Counts:
    return Counts(*(np.zeros(shape, np.int64) for shape in shapes_of_counts(classes).values()))


def misstated(tables: Mapping[str, NDArray[np.int64]], classes: int) -> str | None:
    """Return why these are not the tables of one set of images, or None."""
    wanted = shapes_of_counts(classes)
    if {name: tuple(table.shape) for name, table in tables.items()} != wanted:
        return "its counts have other shapes than those of an evaluation"
    found = Counts(**tables)
    if any(((table < MERGED) | (table > MAX_IMAGES)).any() for table in found):
        return "its counts are negative or too large"
    if (found.scores[..., -1] == MERGED).any() or (found.calibration[:, -1] == MERGED).any():
        return "the last bin of its counts is not given"
    if (found.scores == MERGED).any(1).sum() * 2 != (found.scores == MERGED).sum():
        return "the bins of its counts differ between rows"
    images = found.images
    if (np.maximum(found.scores, 0).sum((1, 2)) != images.sum()).any():
        return "its counts are not of the same images in each class"
    whole = ~(found.confusion == MERGED).any(1)
    diagonal = np.diag(found.confusion)
    if (found.confusion[whole].sum(1) != images[whole]).any() or (diagonal > images).any():
        return "its confusion matrix is of other images than its scores"
    if np.maximum(found.calibration, 0).sum() not in (0, images.sum()):
        return "its calibration counts are of other images than its scores"
    return None


def bin_edges() -> NDArray[np.float64]:
    """Return the share at which each bin of scores begins, and the end of the last."""
    return 1 / (1 + np.exp(-np.linspace(-LIMIT, LIMIT, BINS + 1)))


def count(labels: IntArray, shares: NDArray[np.float64]) -> Counts:
    """Count images by the shares of all classes (rows that add up to 1)."""
    images, classes = shares.shape
    found = empty(classes)
    with np.errstate(divide="ignore"):
        odds = np.log(shares) - np.log1p(-shares)
    bins = np.clip(np.floor((odds + LIMIT) / STEP), 0, BINS - 1).astype(np.int64)
    columns = np.broadcast_to(np.arange(classes), shares.shape)
    np.add.at(found.scores, (columns, (labels[:, None] == columns).astype(int), bins), 1)
    answers, rows = shares.argmax(1), np.arange(images)
    np.add.at(found.confusion, (labels, answers), 1)
    parts = np.minimum((shares[rows, answers] * GROUPS * PARTS).astype(np.int64), GROUPS * PARTS - 1)
    np.add.at(found.calibration, ((labels == answers).astype(int), parts), 1)
    return found


def add_counts(tables: Sequence[Counts]) -> Counts:
    """Add up tables; a cell that one of them does not give by itself is not given in the sum."""
    confusions = np.stack([table.confusion for table in tables])
    together = np.where((confusions == MERGED).any(0), MERGED, confusions.sum(0))
    return Counts(
        add_merged([table.scores for table in tables]),
        together,
        add_merged([table.calibration for table in tables]),
    )


def add_merged(tables: Sequence[IntArray]) -> IntArray:
    """Add tables whose last axis is bins; two bins are apart if they are in every table."""
    stacked = np.stack(tables)
    merged = (stacked == MERGED).any(0)
    totals = np.cumsum(np.where(stacked == MERGED, 0, stacked).sum(0), -1)
    before = np.maximum.accumulate(np.where(merged, 0, totals), -1)  # the total at the last bin that is given
    before = np.concatenate([np.zeros_like(before[..., :1]), before[..., :-1]], -1)
    return np.where(merged, MERGED, totals - before)


def withheld(labels: IntArray, shares: NDArray[np.float64], least: int) -> Counts:
    """Count images as :func:`count` does, without cells of fewer images than ``least``.

    Images of a class with fewer are left out. Bins are merged; of a row of the confusion matrix
    with a small cell, the hits and errors stay if neither are few.
    """
    classes = shares.shape[1]
    kept = np.bincount(labels, minlength=classes)[labels] >= least
    found = count(labels[kept], shares[kept])
    for table in found.scores:
        merge_bins(table, least)
    confusion = found.confusion
    hidden = False
    for number, row in enumerate(confusion):
        errors = row.sum() - row[number]
        if small(row, least).any():
            hits = MERGED if small(row[number], least) or small(errors, least) else row[number]
            row[:] = MERGED
            row[number] = hits
            hidden = hidden or hits == MERGED
    if hidden:  # the number of right answers is that of all hits
        found.calibration[:] = 0
    merge_bins(found.calibration, least)
    return found


def misstated_pair(table: NDArray[np.int64], counts: Counts) -> str | None:
    """Return why this is not the table of two models on the images of these counts, or None."""
    if table.shape != (len(PAIR),):
        return "its counts of two models have another shape"
    if (table == MERGED).all():
        return None
    if (table < 0).any() or table.sum() != counts.images.sum():
        return "its counts of two models are of other images than its scores"
    hits = np.diag(counts.confusion)
    if not (hits == MERGED).any() and table[:2].sum() != hits.sum():
        return "its counts of two models have other right answers than its confusion matrix"
    return None


def count_pair(labels: IntArray, first: NDArray[np.float64], second: NDArray[np.float64]) -> IntArray:
    """Count images by which of two models have them right, in the order of ``PAIR``."""
    of_first, of_second = (shares.argmax(1) == labels for shares in (first, second))
    found: IntArray = np.bincount(2 * ~of_first + ~of_second, minlength=len(PAIR))
    return found


def withheld_pair(labels: IntArray, first: NDArray[np.float64], second: NDArray[np.float64], least: int) -> IntArray:
    """Count images as :func:`count_pair` does; give nothing if a count is small, or gives one away.

    The images are those of :func:`withheld`. If it hides hits of a class, the number of all right
    answers would tell them.
    """
    kept = np.bincount(labels, minlength=first.shape[1])[labels] >= least
    found = count_pair(labels[kept], first[kept], second[kept])
    hidden = any((np.diag(withheld(labels, shares, least).confusion) == MERGED).any() for shares in (first, second))
    return np.full_like(found, MERGED) if hidden or small(found, least).any() else found


def small(counts: IntArray, least: int) -> NDArray[np.bool_]:
    return (counts > 0) & (counts < least)


def merge_bins(table: IntArray, least: int) -> None:
    """Merge bins, of all rows alike, until no row has a small count; in place.

    If a row has few images in all, the table is emptied.
    """
    if small(table.sum(1), least).any():
        table[:] = 0
        return
    last = table.shape[1] - 1
    total, ends = np.zeros(len(table), np.int64), list[int]()
    left = table.sum(1)
    for number in range(last + 1):
        total, left = total + table[:, number], left - table[:, number]
        if not (small(total, least).any() or small(left, least).any()):
            ends.append(number)
            total = np.zeros_like(total)
    sums = np.cumsum(table, 1)[:, ends]
    table[:] = MERGED
    table[:, ends] = np.diff(sums, axis=1, prepend=0)


def given(table: IntArray) -> Iterator[tuple[int, int, IntArray]]:
    """Yield the bins that are given: the first, the last, and the counts of all rows."""
    first = 0
    for number in range(table.shape[1]):
        if table[0, number] != MERGED:
            yield first, number, table[:, number]
            first = number + 1
