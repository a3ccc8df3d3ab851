"""Accuracy on classes with many, medium and few training images, of the long-tail protocol.

The usual bounds (Liu et al., 2019) are more than 100, 20 to 100 and fewer than 20 images. Where one
of these groups would be empty, the classes are cut into thirds by their numbers of images.
"""

from typing import get_args

import numpy as np

from fedvl.evaluation.contents import GroupName, LongTail, TailGroup
from fedvl.tensors import IntArray

NAMES: tuple[GroupName, ...] = get_args(GroupName)
MANY, FEW = 100, 20
BOUNDS = f"more than {MANY}, {FEW} to {MANY} and fewer than {FEW} training images a class"
THIRDS = "thirds of the classes, by their training images"


def groups(counts: IntArray) -> tuple[list[IntArray], str]:
    """Return the classes with many, medium and few training images, and how they were cut."""
    usual = [np.flatnonzero(chosen) for chosen in (counts > MANY, (counts >= FEW) & (counts <= MANY), counts < FEW)]
    if all(map(len, usual)):
        return usual, BOUNDS
    return [np.sort(third) for third in np.array_split(np.argsort(-counts, kind="stable"), len(NAMES))], THIRDS


def accuracy_by_group(counts: IntArray, confusion: IntArray, before: IntArray | None) -> LongTail:
    """Return the accuracy on each group's test images; ``before`` is the confusion of zero-shot."""
    found, by = groups(counts)
    matrices = {"accuracy": confusion} | ({} if before is None else {"zero_shot_accuracy": before})
    rows = []
    for name, classes in zip(NAMES, found, strict=True):
        images = int(confusion[classes].sum())
        figures = {
            key: 100 * float(matrix[classes, classes].sum() / images) if images else None
            for key, matrix in matrices.items()
        }
        trained = int(counts[classes].sum())
        rows.append(
            TailGroup(name=name, classes=classes.tolist(), training_images=trained, test_images=images, **figures)
        )
    return LongTail(by=by, groups=rows)
