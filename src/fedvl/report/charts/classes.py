"""Per-class charts: recall against zero-shot, and the confusion matrix."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedvl.report.svg import LABEL_WIDTH, coordinate, drawing, element, fitted_names, label

SMALLEST_CELL = 16.0  # pixels
MAX_MATRIX = 30  # classes; larger confusion matrices become a table of pairs

Counts = NDArray[np.int64]


def recall_bar(recall: float, reference: float | None) -> str:
    """Draw recall from 0 to 100, its gain or loss against zero-shot, and a tick at zero-shot."""
    parts = [element("rect", x=0, y=0, width=100, height=10, css="track")]
    shared = recall if reference is None else min(recall, reference)
    parts.append(element("rect", x=0, y=0, width=shared, height=10, css="shared"))
    if reference is not None:
        css = "gain" if recall > reference else "loss"
        parts.append(element("rect", x=shared, y=0, width=abs(recall - reference), height=10, css=css))
        spot = min(99.5, max(0.5, reference))
        parts.append(element("line", x1=spot, x2=spot, y1=0, y2=10, css="mark", vector_effect="non-scaling-stroke"))
    return element(
        "svg", "".join(parts), viewBox="0 0 100 10", preserveAspectRatio="none", css="strip", aria_hidden="true"
    )


def confusion_chart(
    confusion: Counts,
    class_names: Sequence[str],
    link: Callable[[int, int], str] | None = None,
    width: float = 848.0,
) -> str:
    """Draw true classes as rows and predictions as columns, shaded by the share of the row.

    ``link`` is the address of a cell's images, by its row and column.
    """
    classes = len(confusion)
    names, left = fitted_names(class_names, min(LABEL_WIDTH, width / 4))
    cell = min(44.0, max(20.0, 480 / classes), max(SMALLEST_CELL, (width - left - 6) / classes))
    # Column names are rotated, so the longest sets the space above.
    top = left + 16
    parts = [label(0, 12, "true class ↓   predicted →", "axis-name")]
    for index, name in enumerate(names):
        middle = (index + 0.5) * cell
        parts.append(label(left - 8, top + middle + 4, name, "tick", "end", class_names[index]))
        x, y = left + middle + 4, top - 6
        turn = f"rotate(-90 {coordinate(x)} {coordinate(y)})"
        parts.append(label(x, y, name, "tick", "start", class_names[index], transform=turn))
    side = cell - 1
    for row in range(classes):
        total, y = int(confusion[row].sum()), top + row * cell
        parts.append(element("rect", x=left, y=y, width=classes * cell - 1, height=side, css="track"))
        for column in np.flatnonzero(confusion[row]).tolist():
            count, x = int(confusion[row, column]), left + column * cell
            share = count / total
            verb = "predicted correctly" if row == column else f"predicted as {class_names[column]}"
            tip = f"{class_names[row]} {verb}: {count:,} of {total:,} ({100 * share:.1f} %)"
            # Errors are few: the square root makes them visible next to the diagonal.
            css, shade = ("right", share) if row == column else ("wrong", math.sqrt(share))
            drawn = element("rect", "", tip, x=x, y=y, width=side, height=side, css=css, fill_opacity=shade)
            if share >= 0.005:
                words, css = f"{100 * share:.0f}", "share on" if shade > 0.55 else "share"
                drawn += label(x + side / 2, y + side / 2 + 3.5, words, css, "middle")
            parts.append(element("a", drawn, href=link(row, column), aria_label=tip) if link else drawn)
    size = classes * cell
    name, role = f"Confusion matrix of {classes} classes", "group" if link else "img"
    return drawing(max(left + size, 180) + 6, top + size + 6, name, parts, "confusion", role)


def confused_pairs(confusion: Counts, limit: int) -> list[tuple[int, int, int, int]]:
    """Return (true, predicted, count, size of the true class) of the most frequent errors."""
    errors = np.array(confusion, dtype=np.int64)
    np.fill_diagonal(errors, 0)
    sizes = np.asarray(confusion).sum(axis=1)
    order = np.argsort(-errors, axis=None, kind="stable")[:limit]
    pairs = (divmod(int(position), len(errors)) for position in order)
    return [(row, column, int(errors[row, column]), int(sizes[row])) for row, column in pairs if errors[row, column]]
