"""Several methods or runs beside each other: a radar over datasets, and bars."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedvl.report.charts.parts import colour, fitted_names
from fedvl.report.svg import coordinate, drawing, element, label, shorten, text_width, ticks

LOGARITHMIC = 50.0  # bars whose largest is more than this many times their smallest grow by powers of ten
BAR = 17.0


class Spokes(NamedTuple):
    """One polygon of a radar: a value for each axis, None where there is none."""

    name: str
    values: Sequence[float | None]
    css: str = ""


def radar_chart(axes: Sequence[str], polygons: Sequence[Spokes], size: float, form: str = ".1f") -> str:
    """Rings are labelled, for their centre is a round number below the smallest value, not nought."""
    known = [value for one in polygons for value in one.values if value is not None]
    rings = ticks(min(known), max(known), wanted=4)
    if rings[0] == min(known):  # the smallest value should not vanish in the centre
        rings = [rings[0] - (rings[1] - rings[0]), *rings]
    names, room = fitted_names(axes, size / 4)
    middle, radius = size / 2 + room / 2, size / 2 - 26
    centre_y = size / 2

    def spot(axis: int, value: float) -> tuple[float, float]:
        share = (value - rings[0]) / (rings[-1] - rings[0])
        angle = 2 * math.pi * axis / len(axes) - math.pi / 2
        return middle + share * radius * math.cos(angle), centre_y + share * radius * math.sin(angle)

    parts = []
    for ring in rings[1:]:
        parts.append(element("path", d=_closed([spot(axis, ring) for axis in range(len(axes))]), css="grid ring"))
    for axis, name in enumerate(names):
        x, y = spot(axis, rings[-1])
        parts.append(element("line", x1=middle, y1=centre_y, x2=x, y2=y, css="grid"))
        side = "middle" if abs(x - middle) < 1 else "start" if x > middle else "end"
        lower = 12 if y > centre_y + 1 else -6 if y < centre_y - 1 else 4
        parts.append(label(x + {"start": 5, "end": -5, "middle": 0}[side], y + lower, name, "tick", side, axes[axis]))
    for ring in rings:
        parts.append(label(middle + 3, spot(0, ring)[1] + 10, f"{ring:g}", "tick ring-name"))
    for index, one in enumerate(polygons):
        spots = [(axis, value, *spot(axis, value)) for axis, value in enumerate(one.values) if value is not None]
        drawn = element("path", d=_closed([(x, y) for _, _, x, y in spots]), css="series area")
        for axis, value, x, y in spots:
            drawn += element("circle", "", f"{one.name}, {axes[axis]}: {value:{form}}", cx=x, cy=y, r=3.5, css="dot")
        parts.append(element("g", drawn, css=f"{colour(index)} {one.css}".strip()))
    said = f"Radar of {len(axes)} axes from {rings[0]:g} to {rings[-1]:g}: " + "; ".join(one.name for one in polygons)
    return drawing(size + room, size, said, parts, "radar")


def _closed(spots: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in spots) + "Z"


class Bar(NamedTuple):
    """`number` gives the colour; `mark` is another figure (a paper's, zero-shot's) shown as a tick on the bar."""

    name: str
    value: float
    number: int
    mark: float | None = None
    css: str = ""


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]], width: float, human: Callable[[float], str], mark_name: str = ""
) -> str:
    """Groups of lying bars under headings, all on one scale; by powers of ten where they differ too much for another."""
    bars = [bar for _, group in groups for bar in group]
    figures = [figure for bar in bars for figure in (bar.value, bar.mark) if figure is not None]
    grow = _growth(figures)
    names, left = fitted_names([bar.name for bar in bars], width / 3)
    fitted = iter(names)
    room = width - left - max(text_width(human(bar.value)) for bar in bars) - 12
    y, parts = 4.0, []
    for heading, group in groups:
        if heading:
            parts.append(label(0, y + 12, shorten(heading, width), "axis-name", "start", heading))
            y += 20
        for bar in group:
            length = room * grow(bar.value)
            marked = "" if bar.mark is None else f", {mark_name} {human(bar.mark)}"
            tip = f"{bar.name}{', ' + heading if heading else ''}: {human(bar.value)}{marked}"
            row = label(left - 8, y + 12, next(fitted), "tick", "end", bar.name)
            row += element("rect", "", tip, x=left, y=y + 2, width=length, height=BAR - 4, css="solid")
            if bar.mark is not None:
                x = left + room * grow(bar.mark)
                row += element("line", x1=x, x2=x, y1=y, y2=y + BAR - 0.5, css="mark")
            row += label(width, y + 12, human(bar.value), "value", "end")
            parts.append(element("g", row, css=f"{colour(bar.number)} {bar.css}".strip()))
            y += BAR
        y += 8
    return drawing(width, y, f"{len(bars)} bars, the longest {human(max(figures))}", parts, "bars")


def _growth(figures: Sequence[float]) -> Callable[[float], float]:
    """From a figure to its share of the longest bar."""
    largest = max(figures)
    if not is_logarithmic(figures):
        return lambda figure: max(0.0, figure) / largest if largest > 0 else 0.0
    smallest = min(figure for figure in figures if figure > 0)
    low = math.floor(math.log10(smallest)) - 0.5  # so that the smallest still is a bar
    return lambda figure: (math.log10(figure) - low) / (math.log10(largest) - low) if figure > 0 else 0.0


def is_logarithmic(figures: Sequence[float]) -> bool:
    """Whether bars of these figures grow by powers of ten; a caption must say so."""
    positive = [figure for figure in figures if figure > 0]
    return bool(positive) and max(positive) / min(positive) > LOGARITHMIC
