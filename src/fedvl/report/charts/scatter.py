"""Scatter charts: t-SNE maps of samples, and entropies under their upper bound."""

from collections.abc import Sequence
from typing import NamedTuple

from fedvl.report.svg import colour, coordinate, drawing, element, label, scale, ticks

RADIUS = 3.0
MODALITIES = {"both": "circle", "text": "triangle", "image": "square"}  # marker shapes by the modalities present


class Point(NamedTuple):
    """A sample on a map: coordinates, true or predicted class, and marker shape."""

    x: float
    y: float
    label: int
    shape: str = "circle"


def mark(shape: str, x: float, y: float) -> str:
    """Return a point as a path, so that hundreds fit into one element."""
    r, wide = coordinate(RADIUS), coordinate(2 * RADIUS)
    if shape == "triangle":
        return f"M{coordinate(x)} {coordinate(y - RADIUS)}l{r} {wide}h-{wide}z"
    if shape == "square":
        return f"M{coordinate(x - RADIUS)} {coordinate(y - RADIUS)}h{wide}v{wide}h-{wide}z"
    if shape == "cross":
        return f"M{coordinate(x - RADIUS)} {coordinate(y)}h{wide}M{coordinate(x)} {coordinate(y - RADIUS)}v{wide}"
    return f"M{coordinate(x - RADIUS)} {coordinate(y)}a{r} {r} 0 1 0 {wide} 0a{r} {r} 0 1 0 -{wide} 0"


def key_of(shape: str) -> str:
    """Return the marker alone, for a legend."""
    return element(
        "svg",
        element("path", d=mark(shape, 6, 6), css="points"),
        css="key-mark",
        viewBox="0 0 12 12",
        aria_hidden="true",
    )


def map_chart(points: Sequence[Point], names: Sequence[str], width: float, height: float) -> str:
    """Draw samples in a plane without units, coloured and named by class."""
    groups: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for point in sorted(points, key=lambda point: (point.label, point.shape)):
        groups.setdefault((point.label, point.shape), []).append((point.x, point.y))
    left, right = min(point.x for point in points), max(point.x for point in points)
    low, high = min(point.y for point in points), max(point.y for point in points)

    def marked(shape: str, x: float, y: float) -> str:
        return mark(shape, scale(x, left, right, 10, width - 10), scale(y, low, high, height - 10, 10))

    parts = [element("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, css="frame")]
    for (number, shape), spots in groups.items():
        path = "".join(marked(shape, x, y) for x, y in spots)
        tip = f"{names[number]} ({len(spots)})"
        parts.append(element("path", "", tip, d=path, css=f"points {shape} {colour(number)}"))
    return drawing(width, height, f"Map of {len(points)} samples of {len(names)} classes", parts, "map")


def bound_chart(
    values: Sequence[float], bound: float, width: float, height: float, y_label: str, bound_name: str
) -> str:
    """Draw a point per value, in order, and the upper bound as a line."""
    left, right, top, bottom = 46.0, width - 10.0, 30.0, height - 22.0
    y_ticks = ticks(min(values), max(bound, *values))

    def up(value: float) -> float:
        return scale(value, y_ticks[0], y_ticks[-1], bottom, top)

    parts = [label(0, 12, y_label, "axis-name")]
    for tick in y_ticks:
        parts.append(element("line", x1=left, x2=right, y1=up(tick), y2=up(tick), css="grid"))
        parts.append(label(left - 6, up(tick) + 4, f"{tick:g}", "tick", "end"))
    parts.append(label((left + right) / 2, height - 6, "image", "axis-name", "middle"))
    last = max(1, len(values) - 1)
    path = "".join(mark("circle", scale(i, 0, last, left + 6, right - 6), up(value)) for i, value in enumerate(values))
    parts.append(element("path", d=path, css="points circle c0"))
    parts.append(element("line", x1=left, x2=right, y1=up(bound), y2=up(bound), css="reference"))
    parts.append(label(right, up(bound) - 6, f"{bound_name} {bound:.3f}", "reference-end", "end"))
    description = f"{y_label} of {len(values)} images: {min(values):.3f} to {max(values):.3f}, bound {bound:.3f}"
    return drawing(width, height, description, parts, "cloud")
