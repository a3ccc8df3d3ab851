"""What several kinds of charts share: colours by number, names cut to fit, labels pushed apart."""

from collections.abc import Sequence

from fedvl.report.svg import shorten, text_width

LABEL_WIDTH = 150.0
COLOURS = 10  # that the style sheet knows, as c0 to c9


def colour(index: int) -> str:
    """The style sheet's class for the series, run or class of this number."""
    return f"c{index % COLOURS}"


def fitted_names(names: Sequence[str], width: float = LABEL_WIDTH) -> tuple[list[str], float]:
    """Names cut to fit beside a chart, and the width that they take."""
    fitted = [shorten(name, width) for name in names]
    return fitted, max((text_width(name) for name in fitted), default=0.0) + 14


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights, in the same order from above, of which no two are less than `gap` apart."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    blocks: list[tuple[float, int]] = []  # mean of where its labels would have their first stand, how many labels
    for rank, index in enumerate(order):
        mean, count = heights[index] - rank * gap, 1
        while blocks and blocks[-1][0] > mean:
            other, size = blocks.pop()
            mean, count = (mean * count + other * size) / (count + size), count + size
        blocks.append((mean, count))
    placed = [mean for mean, count in blocks for _ in range(count)]
    moved = dict(zip(order, (mean + rank * gap for rank, mean in enumerate(placed)), strict=True))
    return [moved[index] for index in range(len(heights))]
