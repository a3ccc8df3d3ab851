"""Line charts over rounds, shots, clients or any other ordered axis."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedvl.report.svg import apart, colour, coordinate, drawing, element, label, scale, shorten, text_width, ticks

TIPS = 200  # tooltips in a chart at most


class Series(NamedTuple):
    """A curve, which a page can hide by its CSS class; one without points is not drawn."""

    name: str
    points: Sequence[tuple[float, float]]
    css: str = ""
    errors: Mapping[float, tuple[float, float]] = {}  # ends of the whisker at some x values
    band: Sequence[tuple[float, float, float]] = ()  # x, low and high, shaded behind the curve


def line_chart(
    series: Sequence[Series],
    reference: float | None,
    width: float,
    height: float,
    y_label: str,
    x_label: str = "round",
    unit: str = "",
    form: str = ".2f",
    places: Sequence[str] = (),
    ring: float | None = None,
) -> str:
    """Draw curves and a dashed zero-shot line; `places` names the x values 0, 1, 2 and so on.

    ``ring`` is the x value of a point to mark on the first curve.
    """
    names = _end_names(series, reference, width / 4)
    margin = 54.0 + max(map(text_width, names), default=0.0)
    left, right, top, bottom = 46.0, width - margin, 24.0, height - 40.0
    known = [y for one in series for _, y in one.points] + ([] if reference is None else [reference])
    known += [end for one in series for ends in one.errors.values() for end in ends]
    known += [end for one in series for _, *ends in one.band for end in ends]
    y_ticks = ticks(min(known), max(known))
    stops = sorted({x for one in series for x, _ in one.points})
    first, last = stops[0], stops[-1]

    def across(index: float) -> float:
        return scale(index, first, last, left + 8, right - 8)

    def up(value: float) -> float:
        return scale(value, y_ticks[0], y_ticks[-1], bottom, top)

    parts = [label(0, 12, y_label, "axis-name")]
    for tick in y_ticks:
        parts.append(element("line", x1=left, x2=right, y1=up(tick), y2=up(tick), css="grid"))
        parts.append(label(left - 6, up(tick) + 4, f"{tick:g}", "tick", "end"))
    room = (right - left - 16) / max(1.0, last - first)
    for tick in stops if places else ticks(first, last, wanted=int(width / 50), smallest_step=1):
        if first <= tick <= last:
            words = shorten(places[int(tick)], room) if places else f"{tick:g}"
            parts.append(label(across(tick), bottom + 17, words, "tick", "middle", places[int(tick)] if places else ""))
    parts.append(label((left + right) / 2, height - 4, x_label, "axis-name", "middle"))
    if reference is not None:
        parts.append(element("line", x1=left, x2=right, y1=up(reference), y2=up(reference), css="reference"))
    for index, one in enumerate(series):
        edge = [(x, high) for x, _, high in one.band] + [(x, low) for x, low, _ in reversed(one.band)]
        if edge:
            outline = "M" + "L".join(f"{coordinate(across(x))} {coordinate(up(y))}" for x, y in edge) + "Z"
            parts.append(element("path", d=outline, css=f"band {colour(index)} {one.css}".strip()))
    styles = [(one, f"{colour(index)} {one.css}".strip()) for index, one in enumerate(series) if one.points]
    parts += [_curve([(across(x), up(y)) for x, y in one.points], css, right - left) for one, css in styles]
    for place, (one, css) in enumerate(styles):
        aside = 3 * (place - (len(styles) - 1) / 2)  # so that whiskers of curves that meet can be told apart
        for x, (low, high) in one.errors.items():
            at = across(x) + aside
            parts.append(element("line", x1=at, x2=at, y1=up(low), y2=up(high), css=f"error {css}"))

    for one, css in styles[:1]:
        marked = [(across(x), up(y)) for x, y in one.points if x == ring]
        parts += [element("circle", cx=x, cy=y, r=7, css=f"ring-mark {css}") for x, y in marked]
    ends = [(one.points[-1], f"series-end {css}", one.name) for one, css in styles]
    ends += [] if reference is None else [((last, reference), "reference-end", "zero-shot")]
    for name, ((x, value), css, whole), y in zip(names, ends, apart([up(e[0][1]) for e in ends], 13), strict=True):
        if x < last:  # the curve ends before the others: its label is still beside the chart
            parts.append(element("line", x1=across(x), x2=right, y1=up(value), y2=y, css=f"{css} leader"))
        parts.append(
            label(
                right + 4, y + 4, f"{name} {value:{form}}".strip(), css, "start", "" if name in ("", whole) else whole
            )
        )

    # A tall strip per x value is easier to hover than a dot.
    step = math.ceil(len(stops) / TIPS)
    strip = (right - left) / len(stops) * step
    for stop in stops[::step]:
        where = places[int(stop)] if places else f"{x_label.capitalize()} {stop:g}"
        tip = f"{where}: {_values_at(stop, series, form, unit)}"
        tip += "" if reference is None else f", zero-shot {reference:{form}}{unit}"
        x = across(stop) - strip / 2
        parts.append(element("rect", "", tip, x=x, y=top, width=strip, height=bottom - top, css="hit"))
    return drawing(width, height, _description(series, y_label, x_label, form), parts, "lines")


def _end_names(series: Sequence[Series], reference: float | None, width: float) -> list[str]:
    """Return the names at the lines' ends; a single curve needs none."""
    drawn = [one.name for one in series if one.points]
    drawn += ["zero-shot"] if reference is not None else []
    return [""] * len(drawn) if len(drawn) < 2 or not drawn[0] else [shorten(name, width) for name in drawn]


def _curve(spots: Sequence[tuple[float, float]], css: str, room: float) -> str:
    path = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in spots)
    drawn = [element("path", d=path, css="series")] if len(spots) > 1 else []
    if len(spots) * 9 <= room:
        drawn += [element("circle", cx=x, cy=y, r=3, css="dot") for x, y in spots]
    return element("g", "".join(drawn), css=css)


def _values_at(stop: float, series: Sequence[Series], form: str, unit: str) -> str:
    """List each curve's value at an x value; a single curve needs no name."""
    found = [(one.name, y) for one in series for x, y in one.points if x == stop]
    return ", ".join(f"{name + ' ' if len(series) > 1 else ''}{y:{form}}{unit}" for name, y in found)


def _description(series: Sequence[Series], y_label: str, x_label: str, form: str) -> str:
    if len(series) == 1:
        values = [y for _, y in series[0].points]
        return f"{y_label} over {len(values)} {x_label}s: {values[0]:{form}} first, {values[-1]:{form}} last"
    return f"{y_label} by {x_label}: " + "; ".join(
        f"{one.name} ends at {one.points[-1][1]:{form}}" for one in series if one.points
    )
