"""Helpers shared by charts: colours by index, truncated names, labels moved apart."""

from collections.abc import Sequence

from fedvl.report.svg import shorten, text_width

LABEL_WIDTH = 150.0
COLOURS = 10  # in the style sheet, c0 to c9


def colour(index: int) -> str:
    """Return the CSS class that colours the series, run or class of this index."""
    return f"c{index % COLOURS}"


def fitted_names(names: Sequence[str], width: float = LABEL_WIDTH) -> tuple[list[str], float]:
    """Truncate names to fit beside a chart; return them and the width they take."""
    fitted = [shorten(name, width) for name in names]
    return fitted, max((text_width(name) for name in fitted), default=0.0) + 14


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return the nearest heights, in the same order, of which no two are less than `gap` apart."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    # Labels that touch form a block: the mean height its labels ask for its first one, and their number.
    blocks: list[tuple[float, int]] = []
    for rank, index in enumerate(order):
        mean, count = heights[index] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, size = blocks.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        blocks.append((mean, count))
    placed = [mean for mean, count in blocks for _ in range(count)]
    moved = dict(zip(order, (mean + rank * gap for rank, mean in enumerate(placed)), strict=True))
    return [moved[index] for index in range(len(heights))]
