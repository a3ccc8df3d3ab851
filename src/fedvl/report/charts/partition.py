"""Chart of the partition: bubbles, or a heat map for many clients or classes."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedvl.report.svg import LABEL_WIDTH, coordinate, drawing, element, every, fitted_names, label, text_width

MAX_BUBBLES = 40  # clients or classes; larger partitions become a heat map
MAX_AXIS = 200  # columns or rows of a heat map; beyond it neighbours are summed
LEVELS = 8
PAGE_WIDTH = 840.0
WIDEST = 80.0  # column of bubbles

Counts = NDArray[np.int64]


def partition_chart(counts: Counts, class_names: Sequence[str], width: float = PAGE_WIDTH) -> str:
    """Draw the number of samples per client (columns) and class (rows), for a page so wide."""
    if max(counts.shape) > MAX_BUBBLES:
        return _heat_map(counts, class_names)
    return _bubbles(counts, class_names, width)


def bubble_radius(count: float, largest: float, cell: float) -> float:
    """Return a radius with the area proportional to the count; the largest just fits its cell."""
    return math.sqrt(count / largest) * (cell / 2 - 1) if largest > 0 else 0.0


def _bubbles(counts: Counts, class_names: Sequence[str], width: float) -> str:
    clients, classes = counts.shape
    names, left = fitted_names(class_names, min(LABEL_WIDTH, width / 4))
    column = min(WIDEST, max(16.0, (width - left - 6) / clients))
    cell = min(34.0, column)
    top, largest = 44.0, int(counts.max(initial=0))
    right, bottom = left + clients * column, top + classes * cell
    parts = _client_bars(counts, left, top, column, [f"Client {index}" for index in range(clients)])
    for row in range(classes):
        middle = top + (row + 0.5) * cell
        parts.append(element("line", x1=left, x2=right, y1=middle, y2=middle, css="grid"))
        parts.append(label(left - 8, middle + 4, names[row], "tick", "end", class_names[row]))
        for client in range(clients):
            count = int(counts[client, row])
            if count:
                tip = f"Client {client}, {class_names[row]}: {count:,}"
                radius = bubble_radius(count, largest, cell)
                parts.append(
                    element("circle", "", tip, cx=left + (client + 0.5) * column, cy=middle, r=radius, css="bubble")
                )
    parts.extend(_client_ticks(range(clients), left, bottom, column, clients))
    x = left
    for count in sorted({max(1, round(largest * share)) for share in (1 / 16, 1 / 4, 1)} if largest else ()):
        parts.append(
            element("circle", cx=x + cell / 2, cy=bottom + 56, r=bubble_radius(count, largest, cell), css="bubble")
        )
        parts.append(label(x + cell + 2, bottom + 60, f"{count:,}", "tick"))
        x += cell + 12 + text_width(f"{count:,}")
    description = (
        f"{clients} clients and {classes} classes; the area of a bubble is the number of samples, at most {largest}"
    )
    return drawing(max(right, x, left + 90) + 6, bottom + 78, description, parts, "partition")


def group_size(count: int) -> int:
    """Return how many neighbours share a column or row of the heat map."""
    return math.ceil(count / MAX_AXIS)


def pool(counts: Counts, group: int, axis: int) -> Counts:
    """Sum `group` neighbours along an axis; the last group may be smaller."""
    return np.add.reduceat(counts, np.arange(0, counts.shape[axis], group), axis=axis)


def heat_level(count: float, largest: float) -> int:
    """Return 0 for none, else 1 to LEVELS by square root, so that small counts stay visible."""
    return math.ceil(LEVELS * math.sqrt(count / largest) - 1e-9) if largest > 0 else 0


def _heat_map(counts: Counts, class_names: Sequence[str]) -> str:
    clients, classes = counts.shape
    per_column, per_row = group_size(clients), group_size(classes)
    pooled = pool(pool(counts, per_column, 0), per_row, 1)
    columns, rows = pooled.shape
    names, left = fitted_names(class_names[::per_row])
    wide, high = min(34.0, max(3.0, (PAGE_WIDTH - left) / columns)), min(22.0, max(4.0, 700 / rows))
    top, largest = 44.0, int(pooled.max(initial=0))
    right, bottom = left + columns * wide, top + rows * high
    tips = [_column_tip(counts, start, per_column, class_names) for start in range(0, clients, per_column)]
    parts = _client_bars(pooled, left, top, wide, tips)
    parts.append(element("rect", x=left, y=top, width=right - left, height=bottom - top, css="track"))
    for row in every(rows, high, 12):
        parts.append(
            label(left - 8, top + (row + 0.5) * high + 4, names[row], "tick", "end", class_names[row * per_row])
        )
    # One path per level, not one element per cell, keeps the file small.
    paths: list[list[str]] = [[] for _ in range(LEVELS + 1)]
    box = f"h{coordinate(wide)}v{coordinate(high)}h-{coordinate(wide)}z"
    for column, row in np.argwhere(pooled > 0):
        corner = f"M{coordinate(left + column * wide)} {coordinate(top + row * high)}"
        paths[heat_level(int(pooled[column, row]), largest)].append(corner + box)
    for level, boxes in enumerate(paths):
        if boxes:
            parts.append(element("path", d="".join(boxes), css="heat", fill_opacity=level / LEVELS))
    for column, tip in enumerate(tips):
        x = left + column * wide
        parts.append(element("rect", "", tip, x=x, y=top, width=wide, height=bottom - top, css="hit"))
    parts.extend(_client_ticks(range(0, clients, per_column), left, bottom, wide, clients))
    x = left
    bounds = {
        max(1, int(largest * (level / LEVELS) ** 2)): level for level in (2, 4, 6, 8)
    }  # of few samples some agree
    for bound, level in bounds.items():
        words = f"≤ {bound:,}"
        box_style: dict[str, float | str] = {"css": "heat", "fill_opacity": level / LEVELS}
        parts.append(element("rect", x=x, y=bottom + 48, width=14, height=14, **box_style))
        parts.append(label(x + 18, bottom + 60, words, "tick"))
        x += 30 + text_width(words)
    description = f"{clients} clients and {classes} classes as a heat map, at most {largest}"
    return drawing(max(right, x) + 6, bottom + 78, description, parts, "partition")


def _column_tip(counts: Counts, start: int, group: int, class_names: Sequence[str]) -> str:
    held = counts[start : start + group].sum(axis=0)
    last = min(start + group, len(counts)) - 1
    who = f"Client {start}" if last == start else f"Clients {start} to {last}"
    most = ", ".join(
        f"{class_names[index]} {held[index]:,}" for index in np.argsort(-held, kind="stable")[:3] if held[index]
    )
    return f"{who}, most of: {most}" if most else f"{who}: no samples"


def _client_bars(counts: Counts, left: float, top: float, cell: float, tips: Sequence[str]) -> list[str]:
    """Draw a bar above each column: the client's number of samples."""
    totals = counts.sum(axis=1)
    largest, room = max(1, int(totals.max(initial=0))), top - 16
    parts = [label(left - 8, top - 6, "samples", "axis-name", "end")]
    for index, total in enumerate(totals):
        height = room * int(total) / largest
        bar = {"x": left + (index + 0.12) * cell, "y": top - 6 - height, "width": 0.76 * cell, "height": height}
        parts.append(element("rect", "", f"{tips[index]} ({int(total):,} samples)", css="bar", **bar))
    return parts


def _client_ticks(starts: range, left: float, bottom: float, cell: float, clients: int) -> list[str]:
    shown = every(len(starts), cell, text_width(str(clients)) + 6)
    parts = [label(left + (index + 0.5) * cell, bottom + 15, str(starts[index]), "tick", "middle") for index in shown]
    return [*parts, label(left, bottom + 33, "client", "axis-name")]
