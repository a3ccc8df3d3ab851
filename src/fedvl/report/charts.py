"""Charts as pure functions from numbers to SVG text. Colours come from the page's style sheet by class name."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedvl.report.svg import coordinate, drawing, element, every, label, scale, shorten, text_width, ticks

LARGEST_BUBBLES = 40  # clients or classes; beyond it the partition is a heat map
LARGEST_MATRIX = 30  # classes; beyond it the confusion matrix is a table of pairs
LARGEST_AXIS = 200  # columns or rows of a heat map; beyond it neighbours are pooled
LEVELS = 8
LABEL_WIDTH = 150.0
PAGE_WIDTH = 840.0
TIPS = 200

Counts = NDArray[np.int64]


def line_chart(
    values: Sequence[tuple[int, float]],
    reference: float | None,
    width: float,
    height: float,
    y_label: str,
    unit: str = "",
    form: str = ".2f",
) -> str:
    """Values over rounds, with the zero-shot value as a dashed line. `values` holds at least one round."""
    left, right, top, bottom = 46.0, width - 54.0, 24.0, height - 40.0
    known = [value for _, value in values] + ([] if reference is None else [reference])
    y_ticks = ticks(min(known), max(known))
    first, last = values[0][0], values[-1][0]

    def across(index: float) -> float:
        return scale(index, first, last, left + 8, right - 8)

    def up(value: float) -> float:
        return scale(value, y_ticks[0], y_ticks[-1], bottom, top)

    parts = [label(0, 12, y_label, "axis-name")]
    for tick in y_ticks:
        parts.append(element("line", x1=left, x2=right, y1=up(tick), y2=up(tick), css="grid"))
        parts.append(label(left - 6, up(tick) + 4, f"{tick:g}", "tick", "end"))
    for tick in ticks(first, last, wanted=int(width / 50), smallest_step=1):
        if first <= tick <= last:
            parts.append(label(across(tick), bottom + 17, f"{tick:g}", "tick", "middle"))
    parts.append(label((left + right) / 2, height - 4, "round", "axis-name", "middle"))

    if reference is not None:
        parts.append(element("line", x1=left, x2=right, y1=up(reference), y2=up(reference), css="reference"))
    spots = [(across(index), up(value)) for index, value in values]
    path = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in spots)
    if len(spots) > 1:
        parts.append(element("path", d=path, css="series"))
    if len(spots) * 9 <= right - left:
        parts.extend(element("circle", cx=x, cy=y, r=3, css="dot") for x, y in spots)

    ends = [(up(values[-1][1]), f"{values[-1][1]:{form}}", "series-end")]
    if reference is not None:
        ends.append((up(reference), f"{reference:{form}}", "reference-end"))
    for y, words, css in _apart(ends, 13):
        parts.append(label(right + 4, y + 4, words, css))

    # One tall strip a round is easier to point at than a dot.
    step = math.ceil(len(values) / TIPS)
    strip = (right - left) / max(1, len(values)) * step
    for (index, value), (x, _) in zip(values[::step], spots[::step], strict=True):
        against = "" if reference is None else f", zero-shot {reference:{form}}{unit}"
        tip = f"Round {index}: {value:{form}}{unit}{against}"
        parts.append(element("rect", "", tip, x=x - strip / 2, y=top, width=strip, height=bottom - top, css="hit"))
    said = f"{y_label} over {len(values)} rounds: {values[0][1]:{form}} first, {values[-1][1]:{form}} last"
    return drawing(width, height, said, parts, "lines")


def _apart(ends: list[tuple[float, str, str]], gap: float) -> list[tuple[float, str, str]]:
    """Labels in order of height, pushed apart evenly where two would overlap."""
    ordered = sorted(ends)
    if len(ordered) == 2 and ordered[1][0] - ordered[0][0] < gap:
        middle = (ordered[0][0] + ordered[1][0]) / 2
        ordered = [(middle - gap / 2, *ordered[0][1:]), (middle + gap / 2, *ordered[1][1:])]
    return ordered


def partition_chart(counts: Counts, class_names: Sequence[str]) -> str:
    """Who holds which classes: clients across, classes down; bubbles, or a heat map where there are many."""
    if max(counts.shape) > LARGEST_BUBBLES:
        return _heat_map(counts, class_names)
    return _bubbles(counts, class_names)


def bubble_radius(count: float, largest: float, cell: float) -> float:
    """The area, not the radius, is proportional to the count; the largest bubble just fits its cell."""
    return math.sqrt(count / largest) * (cell / 2 - 1) if largest > 0 else 0.0


def _bubbles(counts: Counts, class_names: Sequence[str]) -> str:
    clients, classes = counts.shape
    names, left = _names(class_names)
    cell = min(34.0, max(16.0, (PAGE_WIDTH - left) / clients))
    top, largest = 44.0, int(counts.max(initial=0))
    right, bottom = left + clients * cell, top + classes * cell
    parts = _client_bars(counts, left, top, cell, [f"Client {index}" for index in range(clients)])
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
                    element("circle", "", tip, cx=left + (client + 0.5) * cell, cy=middle, r=radius, css="bubble")
                )
    parts.extend(_client_ticks(range(clients), left, bottom, cell, clients))
    x = left
    for count in sorted({max(1, round(largest * share)) for share in (1 / 16, 1 / 4, 1)} if largest else ()):
        parts.append(
            element("circle", cx=x + cell / 2, cy=bottom + 56, r=bubble_radius(count, largest, cell), css="bubble")
        )
        parts.append(label(x + cell + 2, bottom + 60, f"{count:,}", "tick"))
        x += cell + 12 + text_width(f"{count:,}")
    said = f"{clients} clients and {classes} classes; the area of a bubble is the number of samples, at most {largest}"
    return drawing(max(right, x, left + 90) + 6, bottom + 78, said, parts, "partition")


def group_size(count: int) -> int:
    """How many neighbours share a column or row of the heat map."""
    return math.ceil(count / LARGEST_AXIS)


def pool(counts: Counts, group: int, axis: int) -> Counts:
    """Sums of `group` neighbours along an axis; the last group may be smaller."""
    return np.add.reduceat(counts, np.arange(0, counts.shape[axis], group), axis=axis)


def heat_level(count: float, largest: float) -> int:
    """0 for none, then 1 to LEVELS by the square root, so that small holdings can be told from none."""
    return math.ceil(LEVELS * math.sqrt(count / largest) - 1e-9) if largest > 0 else 0


def _heat_map(counts: Counts, class_names: Sequence[str]) -> str:
    clients, classes = counts.shape
    per_column, per_row = group_size(clients), group_size(classes)
    pooled = pool(pool(counts, per_column, 0), per_row, 1)
    columns, rows = pooled.shape
    names, left = _names(class_names[::per_row])
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
    # One path a level, not one element a cell: a hundred clients with a hundred classes stay small.
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
    for level in (2, 4, 6, 8):
        words = f"≤ {max(1, int(largest * (level / LEVELS) ** 2)):,}"
        box_style: dict[str, float | str] = {"css": "heat", "fill_opacity": level / LEVELS}
        parts.append(element("rect", x=x, y=bottom + 48, width=14, height=14, **box_style))
        parts.append(label(x + 18, bottom + 60, words, "tick"))
        x += 30 + text_width(words)
    said = f"{clients} clients and {classes} classes as a heat map, at most {largest}"
    return drawing(max(right, x) + 6, bottom + 78, said, parts, "partition")


def _names(class_names: Sequence[str]) -> tuple[list[str], float]:
    """Class names cut to fit beside a chart, and the width that they take."""
    names = [shorten(name, LABEL_WIDTH) for name in class_names]
    return names, max((text_width(name) for name in names), default=0.0) + 14


def _column_tip(counts: Counts, start: int, group: int, class_names: Sequence[str]) -> str:
    held = counts[start : start + group].sum(axis=0)
    last = min(start + group, len(counts)) - 1
    who = f"Client {start}" if last == start else f"Clients {start} to {last}"
    most = ", ".join(
        f"{class_names[index]} {held[index]:,}" for index in np.argsort(-held, kind="stable")[:3] if held[index]
    )
    return f"{who}, most of: {most}" if most else f"{who}: nothing"


def _client_bars(counts: Counts, left: float, top: float, cell: float, tips: Sequence[str]) -> list[str]:
    """A bar above each column: how many samples the client holds in all."""
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


def recall_bar(recall: float, reference: float | None) -> str:
    """A strip from 0 to 100 that stretches with its cell: what both reach, the gain or loss, a tick at zero-shot."""
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


def confusion_chart(confusion: Counts, class_names: Sequence[str]) -> str:
    """Rows are true classes, columns are predictions; shade is the share of the row."""
    classes = len(confusion)
    cell = min(44.0, max(20.0, 480 / classes))
    names, left = _names(class_names)
    # Column names stand upright, so the tallest of them sets the room above.
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
            verb = "recognised" if row == column else f"taken for {class_names[column]}"
            tip = f"{class_names[row]} {verb}: {count:,} of {total:,} ({100 * share:.1f} %)"
            # Mistakes are few: the square root makes them visible beside the diagonal.
            css, shade = ("right", share) if row == column else ("wrong", math.sqrt(share))
            parts.append(element("rect", "", tip, x=x, y=y, width=side, height=side, css=css, fill_opacity=shade))
            if share >= 0.005:
                words, css = f"{100 * share:.0f}", "share on" if shade > 0.55 else "share"
                parts.append(label(x + side / 2, y + side / 2 + 3.5, words, css, "middle"))
    size = classes * cell
    return drawing(
        max(left + size, 180) + 6, top + size + 6, f"Confusion matrix of {classes} classes", parts, "confusion"
    )


def confused_pairs(confusion: Counts, limit: int) -> list[tuple[int, int, int, int]]:
    """(true class, predicted class, count, size of the true class) of the commonest mistakes, commonest first."""
    mistakes = np.array(confusion, dtype=np.int64)
    np.fill_diagonal(mistakes, 0)
    sizes = np.asarray(confusion).sum(axis=1)
    order = np.argsort(-mistakes, axis=None, kind="stable")[:limit]
    pairs = (divmod(int(position), len(mistakes)) for position in order)
    return [
        (row, column, int(mistakes[row, column]), int(sizes[row])) for row, column in pairs if mistakes[row, column]
    ]
