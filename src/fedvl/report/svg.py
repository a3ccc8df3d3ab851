"""SVG building blocks of all charts: elements, text, scales, ticks and label widths."""

import math
import unicodedata
from collections.abc import Sequence
from html import escape

TEXT_SIZE = 11


def coordinate(value: float) -> str:
    """Format with at most two decimals and no trailing zeros, for small reproducible files."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def scale(value: float, low: float, high: float, start: float, end: float) -> float:
    """Map `value` from [low, high] to [start, end]; to the middle if the range is empty."""
    if high == low:
        return (start + end) / 2
    return start + (value - low) / (high - low) * (end - start)


def ticks(low: float, high: float, wanted: int = 5, smallest_step: float = 0.0) -> list[float]:
    """Return round numbers that cover [low, high] in about `wanted` steps of 1, 2 or 5 x 10^n."""
    span = high - low
    if span <= 1e-8 * max(abs(low), abs(high), 1.0):  # too small for distinct ticks
        span = max(abs(high) * 0.1, 1.0)
    raw = max(span / wanted, smallest_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:
        last += 1
    return [round(index * step, 10) for index in range(first, last + 1)]


def element(name: str, content: str = "", title: str = "", /, **attributes: float | str) -> str:
    """Return an SVG element; all but `content` is escaped, `css` means class, `_` means `-`."""
    parts = []
    for key, value in attributes.items():
        text = value if isinstance(value, str) else coordinate(value)
        parts.append(f' {"class" if key == "css" else key.replace("_", "-")}="{escape(text)}"')
    inner = (f"<title>{escape(title)}</title>" if title else "") + content
    return f"<{name}{''.join(parts)}>{inner}</{name}>" if inner else f"<{name}{''.join(parts)}/>"


def label(
    x: float, y: float, words: str, css: str = "", anchor: str = "start", title: str = "", **more: float | str
) -> str:
    styles = {"css": css} if css else {}
    return element("text", escape(words), title, x=x, y=y, text_anchor=anchor, **styles, **more)


def drawing(width: float, height: float, description: str, parts: Sequence[str], css: str, role: str = "img") -> str:
    """Return a whole chart at its natural size; the page's style sheet colours it by class.

    A chart with links in it has the ``role`` of a group.
    """
    return element(
        "svg",
        "".join(parts),
        width=width,
        height=height,
        viewBox=f"0 0 {coordinate(width)} {coordinate(height)}",
        role=role,
        aria_label=description,
        css=f"chart {css}",
    )


def text_width(words: str) -> float:
    """Estimate the width in pixels; East Asian text and emoji are wide, combining marks zero."""
    units = 0.0
    for character in words:
        if unicodedata.combining(character):
            continue
        units += 1.05 if unicodedata.east_asian_width(character) in "WF" else 0.58
    return units * TEXT_SIZE


def shorten(words: str, width: float) -> str:
    """Truncate `words` with an ellipsis if they are wider than `width`."""
    if text_width(words) <= width:
        return words
    kept = words
    while kept and text_width(kept + "…") > width:
        kept = kept[:-1]
    return kept.rstrip() + "…"


def every(count: int, size: float, needed: float) -> range:
    """Return which labels to show so that labels of `needed` pixels fit cells of `size` pixels."""
    return range(0, count, max(1, math.ceil(needed / size)))


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
