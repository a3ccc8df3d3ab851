"""Test images whose prediction training changed, as thumbnails for the report."""

import base64
import io

import numpy as np
from PIL import Image

from fedvl.tensors import IntArray

THUMBNAIL_SIDE = 72  # pixels of a thumbnail's longer side
QUALITY = 70


def changed_rows(labels: IntArray, before: IntArray, after: IntArray, count: int) -> dict[str, list[int]]:
    """Return up to ``count`` rows that became correct ("gained") and that became wrong ("lost")."""
    evaluated = after >= 0
    correct_before, correct_after = before == labels, after == labels
    return {
        "gained": spread_over_classes(np.flatnonzero(evaluated & ~correct_before & correct_after), labels, count),
        "lost": spread_over_classes(np.flatnonzero(evaluated & correct_before & ~correct_after), labels, count),
    }


def spread_over_classes(rows: IntArray, labels: IntArray, count: int) -> list[int]:
    """Choose up to ``count`` rows in turn from each class, sorted by class."""
    turns: dict[int, int] = {}
    ranked = []
    for row in rows.tolist():
        label = int(labels[row])
        turns[label] = turns.get(label, 0) + 1
        ranked.append((turns[label], label, row))
    chosen = sorted(ranked)[:count]
    return [row for _, _, row in sorted(chosen, key=lambda entry: entry[1:])]


def thumbnail(image: Image.Image) -> str:
    """Return a small copy as a data URI of about 2 kB."""
    small = image.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    data = io.BytesIO()
    small.save(data, "WEBP", quality=QUALITY)
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()
