"""Charts that compare methods or runs: a radar over datasets, and bars."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedvl.report.svg import (
    colour,
    coordinate,
    drawing,
    element,
    fitted_names,
    label,
    scale,
    shorten,
    text_width,
    ticks,
)

LOGARITHMIC = 50.0  # ratio of the largest to the smallest bar above which the scale is logarithmic
BAR = 17.0  # height


class Spokes(NamedTuple):
    """One polygon of a radar: a value per axis, None where there is none."""

    name: str
    values: Sequence[float | None]
    css: str = ""


def radar_chart(axes: Sequence[str], polygons: Sequence[Spokes], size: float, form: str = ".1f") -> str:
    """Draw a radar; its rings are labelled, because the centre is not zero."""
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
    description = f"Radar of {len(axes)} axes from {rings[0]:g} to {rings[-1]:g}: " + "; ".join(
        one.name for one in polygons
    )
    return drawing(size + room, size, description, parts, "radar")


def _closed(spots: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in spots) + "Z"


class Bar(NamedTuple):
    """A bar in the colour of `number`, with a reference value, points of seeds and a whisker."""

    name: str
    value: float
    number: int
    mark: float | None = None
    css: str = ""
    values: Sequence[float] = ()
    error: tuple[float, float] | None = None


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    width: float,
    human: Callable[[float], str],
    mark_name: str = "",
    axis: str = "",
) -> str:
    """Draw groups of horizontal bars on one scale, logarithmic if the values differ too much.

    ``axis`` names the measure and its unit below a scale.
    """
    bars = [bar for _, group in groups for bar in group]
    values = [v for bar in bars for v in (bar.value, bar.mark, *bar.values, *(bar.error or ())) if v is not None]
    grow = _growth(values)
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
            row += _spread(bar, lambda value: left + room * grow(value), y)
            row += label(width, y + 12, human(bar.value), "value", "end")
            parts.append(element("g", row, css=f"{colour(bar.number)} {bar.css}".strip()))
            y += BAR
        y += 8
    if axis:
        for tick in [] if is_logarithmic(values) else ticks(0.0, max(values), wanted=int(room / 60)):
            if tick <= max(values):
                x = left + room * grow(tick)
                parts.insert(0, element("line", x1=x, x2=x, y1=0, y2=y, css="grid"))
                parts.append(label(x, y + 12, f"{tick:g}", "tick", "middle"))
        parts.append(label(left + room / 2, y + 30, axis, "axis-name", "middle"))
        y += 36
    longest = max(bar.value for bar in bars)
    return drawing(width, y, f"{len(bars)} bars, the longest {human(longest)}", parts, "bars")


def _spread(bar: Bar, across: Callable[[float], float], y: float) -> str:
    """Draw a bar's whisker, and a point for each seed where there are several."""
    middle, drawn = y + BAR / 2, ""
    if bar.error:
        low, high = map(across, bar.error)
        drawn += element("line", x1=low, x2=high, y1=middle, y2=middle, css="whisker")
        drawn += "".join(element("line", x1=x, x2=x, y1=middle - 3, y2=middle + 3, css="whisker") for x in (low, high))
    if len(bar.values) > 1:
        drawn += "".join(element("circle", cx=across(v), cy=middle, r=2.5, css="seed") for v in bar.values)
    return drawn


def _growth(values: Sequence[float]) -> Callable[[float], float]:
    """Return a function from a value to its share of the longest bar."""
    largest = max(values)
    if not is_logarithmic(values):
        return lambda value: max(0.0, value) / largest if largest > 0 else 0.0
    smallest = min(value for value in values if value > 0)
    low = math.floor(math.log10(smallest)) - 0.5  # so that the smallest bar stays visible
    return lambda value: (math.log10(value) - low) / (math.log10(largest) - low) if value > 0 else 0.0


def is_logarithmic(values: Sequence[float]) -> bool:
    """Return whether the scale is logarithmic, which a caption has to say."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) > LOGARITHMIC


def signed_bars(bars: Sequence[Bar], width: float, human: Callable[[float], str]) -> str:
    """Draw horizontal bars to both sides of zero, with their whiskers."""
    ends = [end for bar in bars for end in (bar.value, *(bar.error or ()))]
    names, left = fitted_names([bar.name for bar in bars], width / 3)
    room = width - left - max(text_width(human(bar.value)) for bar in bars) - 12
    low, high = min(0.0, *ends), max(0.0, *ends)

    def across(value: float) -> float:
        return scale(value, low, high, left, left + room)

    y, parts = 4.0, []
    for bar, name in zip(bars, names, strict=True):
        first, last = sorted((across(0), across(bar.value)))
        row = label(left - 8, y + 12, name, "tick", "end", bar.name)
        tip = f"{bar.name}: {human(bar.value)}"
        row += element("rect", "", tip, x=first, y=y + 2, width=last - first, height=BAR - 4, css="solid")
        row += _spread(bar, across, y) + label(width, y + 12, human(bar.value), "value", "end")
        parts.append(element("g", row, css=f"{colour(bar.number)} {bar.css}".strip()))
        y += BAR
    parts.append(element("line", x1=across(0), x2=across(0), y1=0, y2=y, css="mark"))
    return drawing(width, y + 4, f"{len(bars)} bars about zero", parts, "bars")
