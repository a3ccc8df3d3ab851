"""Charts that compare methods: corners of a radar, lengths of bars, and their whiskers."""

import pytest
from helpers.drawings import drawn, titles, with_class

from fedvl.report.charts.comparing import Bar, Spokes, bar_chart, is_logarithmic, radar_chart, signed_bars
from fedvl.report.svg import fitted_names


def test_radar_corners_lie_on_their_axes_at_their_share_of_the_radius():
    # Rings of [60, 80] are 55 (below the smallest), 60 .. 80. The first axis points up, the others follow clockwise.
    axes = ["a", "b", "c", "d"]
    root = drawn(radar_chart(axes, [Spokes("x", [80.0, 60.0, 70.0, None])], 400))
    _, room = fitted_names(axes, 100)
    middle, radius = 200 + room / 2, 174
    corners = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in with_class(root, "dot")]
    assert corners[0] == pytest.approx((middle, 200 - radius), abs=0.01)
    assert corners[1] == pytest.approx((middle + radius * 5 / 25, 200), abs=0.01)
    assert corners[2] == pytest.approx((middle, 200 + radius * 15 / 25), abs=0.01)
    assert len(corners) == 3
    assert "x, b: 60.0" in titles(root)


def test_bars_are_as_long_as_their_figures_and_the_tick_is_the_other_figure():
    root = drawn(bar_chart([("group", [Bar("a", 50.0, 0, 25.0), Bar("b", 100.0, 1)])], 400, "{:.0f}".format, "paper"))
    lengths = [float(bar.get("width")) for bar in with_class(root, "solid")]
    assert lengths[0] * 2 == pytest.approx(lengths[1], abs=0.02)
    (tick,) = with_class(root, "mark")
    left = float(with_class(root, "solid")[0].get("x"))
    assert float(tick.get("x1")) - left == pytest.approx(lengths[0] / 2, abs=0.02)
    assert "a, group: 50, paper 25" in titles(root)


def test_the_axis_of_bars_has_round_numbers_at_their_lengths_and_names_the_unit():
    root = drawn(bar_chart([("", [Bar("a", 80.0, 0)])], 400, "{:.0f}".format, axis="accuracy, %"))
    (bar,) = with_class(root, "solid")
    numbers = {each.text: float(each.get("x")) for each in with_class(root, "tick") if each.text}
    assert numbers["0"] == float(bar.get("x"))
    assert numbers["80"] == pytest.approx(float(bar.get("x")) + float(bar.get("width")), abs=0.02)
    assert [each.text for each in with_class(root, "axis-name")] == ["accuracy, %"]
    assert len(with_class(root, "grid")) == len(numbers)
    logarithmic = drawn(bar_chart([("", [Bar("a", 1.0, 0), Bar("b", 1000.0, 1)])], 400, "{:.0f}".format, axis="bytes"))
    assert with_class(logarithmic, "grid") == []


def test_bars_that_differ_too_much_grow_by_powers_of_ten():
    assert [is_logarithmic(figures) for figures in ([1, 50], [1, 51], [0, 5], [0.0])] == [False, True, False, False]
    root = drawn(bar_chart([("", [Bar("a", 10.0, 0), Bar("b", 1000.0, 1), Bar("c", 0.0, 2)])], 400, "{:.0f}".format))
    lengths = [float(bar.get("width")) for bar in with_class(root, "solid")]
    # From 10**0.5 to 10**3: ten is 0.5 of 2.5 powers.
    assert lengths[0] / lengths[1] == pytest.approx(0.2, abs=1e-3)
    assert lengths[2] == 0


def test_signed_bars_begin_at_zero_on_either_side():
    bars = [Bar("client 0", 3.0, 0, error=(2.0, 4.0)), Bar("client 1", -1.0, 0)]
    root = drawn(signed_bars(bars, 400, lambda value: f"{value:+.1f}"))
    plus, minus = with_class(root, "solid")
    (zero,) = with_class(root, "mark")
    assert float(plus.get("x")) == pytest.approx(float(zero.get("x1")), abs=0.02)
    assert float(minus.get("x")) + float(minus.get("width")) == pytest.approx(float(zero.get("x1")), abs=0.02)
    assert float(plus.get("width")) == pytest.approx(3 * float(minus.get("width")), abs=0.05)
    assert len(with_class(root, "whisker")) == 3
    assert {"client 0: +3.0", "client 1: -1.0"} <= set(titles(root))
