"""Test images that show what training changed: some that it set right, some that it set wrong."""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 72  # pixels of a thumbnail's longer side
QUALITY = 70

Integers = NDArray[np.int64]


def changed_rows(labels: Integers, before: Integers, after: Integers, count: int) -> dict[str, list[int]]:
    """At most ``count`` rows that were wrong and are right ("gained"), and as many of the reverse ("lost")."""
    asked = after >= 0
    right_before, right_after = before == labels, after == labels
    return {
        "gained": spread(np.flatnonzero(asked & ~right_before & right_after), labels, count),
        "lost": spread(np.flatnonzero(asked & right_before & ~right_after), labels, count),
    }


def spread(rows: Integers, labels: Integers, count: int) -> list[int]:
    """The first of these rows of each class, then the second of each, and so on, up to ``count``; by class in the end."""
    turns: dict[int, int] = {}
    ranked = []
    for row in rows.tolist():
        label = int(labels[row])
        turns[label] = turns.get(label, 0) + 1
        ranked.append((turns[label], label, row))
    chosen = sorted(ranked)[:count]
    return [row for _, _, row in sorted(chosen, key=lambda entry: entry[1:])]


def thumbnail(image: Image.Image) -> str:
    """A small copy as a data URI, some two kilobytes."""
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    small.save(data, "WEBP", quality=QUALITY)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()
