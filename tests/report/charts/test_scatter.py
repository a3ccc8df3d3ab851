"""Maps of samples, and entropies under their upper bound."""

import pytest
from helpers.drawings import drawn, titles, with_class

from fedvl.report.charts.scatter import Point, bound_chart, map_chart, mark
from fedvl.report.svg import colour


def test_map_fills_the_frame_and_puts_one_path_a_class_and_shape():
    places = [Point(-1.0, -1.0, 0), Point(0.0, 0.0, 11, "square"), Point(1.0, 1.0, 0)]
    names = [f"class {index}" for index in range(11)] + ["<b>"]
    root = drawn(map_chart(places, names, 200, 100))
    first, second = with_class(root, "points")
    # The smallest corner lies 10 pixels from the lower left, the largest as far from the upper right.
    assert first.get("d") == mark("circle", 10, 90) + mark("circle", 190, 10)
    assert second.get("d") == mark("square", 100, 50)
    assert second.get("class") == "points square c1"  # colours go round after ten
    assert colour(11) == "c1"
    assert titles(root) == ["class 0 (2)", "<b> (1)"]


def test_entropies_lie_under_the_line_of_their_bound():
    # Ticks of [3.30, 3.3219] are 3.3, 3.305 .. 3.325, from y = 178 up to y = 30 in a chart 200 high.
    root = drawn(bound_chart([3.30, 3.31], 3.3219, 400, 200, "entropy, bits", "upper bound"))
    (line,) = with_class(root, "reference")
    assert float(line.get("y1")) == pytest.approx(178 - 148 * 0.0219 / 0.025, abs=0.01)
    (cloud,) = with_class(root, "points")
    assert cloud.get("d") == mark("circle", 52, 178) + mark("circle", 384, 178 - 148 * 0.01 / 0.025)
    assert with_class(root, "reference-end")[0].text == "upper bound 3.322"
