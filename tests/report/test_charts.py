from xml.etree import ElementTree

import numpy as np
import pytest

from fedvl.report.charts import classes as class_charts
from fedvl.report.charts import partition as partition_charts
from fedvl.report.charts.comparing import Bar, Spokes, bar_chart, is_logarithmic, radar_chart, signed_bars
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.charts.scatter import Point, bound_chart, map_chart, mark
from fedvl.report.svg import apart, colour, fitted_names


def drawn(svg):
    return ElementTree.fromstring(svg)


def with_class(root, name):
    return [node for node in root.iter() if name in (node.get("class") or "").split()]


def titles(root):
    return [node.text for node in root.iter("title")]


def test_line_chart_puts_points_and_reference_at_their_heights():
    # Ticks of [60, 80] are 60..80; the plot reaches from y = 24 (80 %) to y = 260 (60 %) in a chart 300 high.
    root = drawn(line_chart([Series("", [(1, 60.0), (2, 70.0), (3, 80.0)])], 65.0, 760, 300, "accuracy, %", unit=" %"))
    dots = with_class(root, "dot")
    assert [float(dot.get("cy")) for dot in dots] == [260, 142, 24]
    # Equal steps across, 8 pixels inside the axes at 46 and 706.
    assert [float(dot.get("cx")) for dot in dots] == [54, 376, 698]
    (reference,) = with_class(root, "reference")
    assert float(reference.get("y1")) == float(reference.get("y2")) == 201
    assert with_class(root, "series")[0].get("d") == "M54 260L376 142L698 24"


def test_line_chart_tells_each_round_in_a_tooltip():
    root = drawn(line_chart([Series("", [(4, 61.234), (5, 70.0)])], 65.0, 760, 300, "accuracy, %", unit=" %"))
    assert titles(root) == ["Round 4: 61.23 %, zero-shot 65.00 %", "Round 5: 70.00 %, zero-shot 65.00 %"]


def test_a_ring_marks_the_first_curve_alone():
    curves = [Series("mine", [(1, 60.0), (2, 70.0)]), Series("theirs", [(1, 65.0), (2, 75.0)])]
    assert len(with_class(drawn(line_chart(curves, None, 760, 300, "accuracy, %", ring=2)), "ring-mark")) == 1


def test_line_chart_names_its_lines_at_their_ends_and_rings_a_round():
    curves = [Series("mine", [(1, 60.0), (2, 70.0)]), Series("theirs", [(1, 65.0)])]
    root = drawn(line_chart(curves, 50.0, 760, 300, "accuracy, %", form=".1f", ring=2))
    ends = [part.text for name in ("series-end", "reference-end") for part in with_class(root, name) if part.text]
    assert ends == ["mine 70.0", "theirs 65.0", "zero-shot 50.0"]
    (ring,) = with_class(root, "ring-mark")
    last = with_class(root, "dot")[1]
    assert (ring.get("cx"), ring.get("cy")) == (last.get("cx"), last.get("cy"))
    (leader,) = with_class(root, "leader")  # from the curve that ends early
    assert float(leader.get("x1")) < float(leader.get("x2"))


def test_line_chart_keeps_end_labels_apart():
    root = drawn(line_chart([Series("", [(1, 60.0), (2, 70.01)])], 70.0, 760, 300, "accuracy, %"))
    heights = [float(with_class(root, name)[0].get("y")) for name in ("series-end", "reference-end")]
    assert heights[1] - heights[0] == pytest.approx(13)


def test_line_chart_of_one_round_is_a_dot_in_the_middle():
    root = drawn(line_chart([Series("", [(1, 60.0)])], None, 760, 300, "accuracy, %"))
    assert [float(dot.get("cx")) for dot in with_class(root, "dot")] == [376]
    assert not with_class(root, "series")
    assert not with_class(root, "reference")


def test_line_chart_of_many_rounds_bounds_its_tooltips():
    root = drawn(line_chart([Series("", [(index, float(index)) for index in range(1, 1001)])], None, 760, 300, "loss"))
    assert len(titles(root)) == 200
    assert not with_class(root, "dot")


def test_line_chart_of_several_curves_colours_names_and_hides_each():
    curves = [Series("a", [(0, 50.0), (1, 60.0)], "run-0"), Series("b", [], "run-1"), Series("c", [(1, 55.0)], "run-2")]
    root = drawn(line_chart(curves, None, 760, 300, "accuracy, %", unit=" %"))
    assert titles(root) == ["Round 0: a 50.00 %", "Round 1: a 60.00 %, c 55.00 %"]
    # One without points is not drawn, and the next keeps its colour.
    assert [group.get("class") for group in root.iter("g")] == ["c0 run-0", "c2 run-2"]
    assert [node.text for node in with_class(root, "series-end")] == ["a 60.00", "c 55.00"]
    assert "run-2" in with_class(root, "series-end")[1].get("class")


def test_line_chart_over_named_places_names_each_once():
    root = drawn(
        line_chart([Series("a", [(0, 1.0), (2, 3.0)])], None, 760, 300, "%", "setting", places=["2", "4", "8 <b>"])
    )
    assert titles(root)[-1] == "8 <b>: 3.00"
    named = [
        (node.find("title").text, float(node.get("x"))) for node in root.iter("text") if node.find("title") is not None
    ]
    assert named == [("2", 54), ("8 <b>", 698)]
    assert [float(dot.get("cx")) for dot in with_class(root, "dot")] == [54, 698]


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([10.0, 40.0], [10.0, 40.0]),
        ([20.0, 20.0], [15.0, 25.0]),
        ([20.0, 10.0, 20.0], [16.667, 6.667, 26.667]),  # all three touch, so they keep their mean
    ],
)
def test_labels_are_pushed_apart_as_little_as_will_do(heights, expected):
    moved = apart(heights, 10)
    assert sorted(moved) == pytest.approx(sorted(expected), abs=1e-3)
    assert sum(moved) == pytest.approx(sum(heights))
    assert all(later - earlier >= 10 - 1e-9 for earlier, later in zip(sorted(moved), sorted(moved)[1:], strict=False))


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


def test_bars_that_differ_too_much_grow_by_powers_of_ten():
    assert [is_logarithmic(figures) for figures in ([1, 50], [1, 51], [0, 5], [0.0])] == [False, True, False, False]
    root = drawn(bar_chart([("", [Bar("a", 10.0, 0), Bar("b", 1000.0, 1), Bar("c", 0.0, 2)])], 400, "{:.0f}".format))
    lengths = [float(bar.get("width")) for bar in with_class(root, "solid")]
    # From 10**0.5 to 10**3: ten is 0.5 of 2.5 powers.
    assert lengths[0] / lengths[1] == pytest.approx(0.2, abs=1e-3)
    assert lengths[2] == 0


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


def test_bubble_areas_are_proportional_to_counts():
    counts = np.array([[100, 25], [0, 4]])
    root = drawn(partition_charts.partition_chart(counts, ["cat", "dog"]))
    radius = {
        node.find("title").text: float(node.get("r"))
        for node in with_class(root, "bubble")
        if node.find("title") is not None
    }
    assert set(radius) == {"Client 0, cat: 100", "Client 0, dog: 25", "Client 1, dog: 4"}
    largest = radius["Client 0, cat: 100"]
    assert (radius["Client 0, dog: 25"] / largest) ** 2 == pytest.approx(0.25, abs=1e-3)
    assert (radius["Client 1, dog: 4"] / largest) ** 2 == pytest.approx(0.04, abs=1e-3)


def test_bars_above_the_bubbles_are_proportional_to_the_samples_of_a_client():
    root = drawn(partition_charts.partition_chart(np.array([[30, 10], [0, 10], [0, 0]]), ["cat", "dog"]))
    heights = [float(bar.get("height")) for bar in with_class(root, "bar")]
    assert heights == [28, 7, 0]


@pytest.mark.parametrize(("clients", "classes", "heat"), [(40, 40, False), (41, 2, True), (2, 41, True)])
def test_many_clients_or_classes_become_a_heat_map(clients, classes, heat):
    root = drawn(
        partition_charts.partition_chart(
            np.ones((clients, classes), dtype=np.int64), [f"class {index}" for index in range(classes)]
        )
    )
    assert bool(with_class(root, "heat")) is heat
    assert bool(with_class(root, "bubble")) is not heat


def test_a_legend_names_no_bound_twice():
    """Of at most 7 samples the levels reach to 0.4, 1.75, 3.9 and 7: the first two hold one sample."""
    root = drawn(partition_charts.partition_chart(np.full((41, 2), 7), ["cat", "dog"]))
    assert [node.text for node in root.iter() if (node.text or "").startswith("≤")] == ["≤ 1", "≤ 3", "≤ 7"]


def test_heat_levels_follow_the_square_root():
    # 8 * sqrt(1/4) = 4; any holding at all is at least level 1.
    assert [partition_charts.heat_level(count, 100) for count in (0, 1, 25, 26, 100)] == [0, 1, 4, 5, 8]


def test_heat_map_draws_each_holding_once():
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 3, (100, 60))
    root = drawn(partition_charts.partition_chart(counts, [f"class {index}" for index in range(60)]))
    boxes = sum(node.get("d").count("z") for node in with_class(root, "heat") if node.tag == "path")
    assert boxes == np.count_nonzero(counts)


def test_heat_map_names_what_a_client_holds_most_of():
    counts = np.zeros((50, 3), dtype=np.int64)
    counts[7] = [1, 0, 5]
    root = drawn(partition_charts.partition_chart(counts, ["cat", "dog", "<b>"]))
    assert "Client 7, most of: <b> 5, cat 1" in titles(root)
    assert "Client 8: no samples" in titles(root)


def test_huge_partitions_are_pooled_and_lose_nothing():
    assert [partition_charts.group_size(count) for count in (1, 200, 201, 1000)] == [1, 1, 2, 5]
    counts = np.arange(10).reshape(5, 2)
    assert partition_charts.pool(counts, 2, 0).tolist() == [[2, 4], [10, 12], [8, 9]]
    svg = partition_charts.partition_chart(
        np.ones((1000, 1000), dtype=np.int64), [f"class {index}" for index in range(1000)]
    )
    boxes = sum(node.get("d").count("z") for node in with_class(drawn(svg), "heat") if node.tag == "path")
    assert boxes == 200 * 200


def test_partition_of_nothing_is_still_drawn():
    root = drawn(partition_charts.partition_chart(np.zeros((2, 2), dtype=np.int64), ["cat", "dog"]))
    assert not with_class(root, "bubble")


@pytest.mark.parametrize(
    ("recall", "reference", "shared", "kind", "width"),
    [(80.0, 60.0, 60, "gain", 20), (55.0, 60.0, 55, "loss", 5)],
)
def test_recall_bar_parts_add_up(recall, reference, shared, kind, width):
    root = drawn(class_charts.recall_bar(recall, reference))
    assert float(with_class(root, "shared")[0].get("width")) == shared
    (change,) = with_class(root, kind)
    assert (float(change.get("x")), float(change.get("width"))) == (shared, width)
    assert float(with_class(root, "mark")[0].get("x1")) == reference


def test_recall_bar_without_reference_shows_no_change():
    root = drawn(class_charts.recall_bar(40.0, None))
    assert float(with_class(root, "shared")[0].get("width")) == 40
    assert not with_class(root, "gain") + with_class(root, "loss") + with_class(root, "mark")


def test_confusion_chart_shades_by_share_of_the_true_class():
    root = drawn(class_charts.confusion_chart(np.array([[3, 1], [0, 8]]), ["cat", "dog"]))
    shades = {
        node.find("title").text: float(node.get("fill-opacity"))
        for node in root.iter("rect")
        if node.find("title") is not None
    }
    # Mistakes by the square root: one in four is shown at a half.
    assert shades == {
        "cat predicted correctly: 3 of 4 (75.0 %)": 0.75,
        "cat predicted as dog: 1 of 4 (25.0 %)": 0.5,
        "dog predicted correctly: 8 of 8 (100.0 %)": 1.0,
    }
    assert [node.text for node in with_class(root, "share")] == ["75", "25", "100"]


def test_confusion_chart_bears_a_class_without_test_images():
    root = drawn(class_charts.confusion_chart(np.array([[0, 0], [1, 1]]), ["cat", "dog"]))
    assert len(with_class(root, "share")) == 2


def test_confused_pairs_are_the_commonest_mistakes():
    confusion = np.array([[5, 3, 0], [1, 9, 4], [0, 0, 7]])
    assert class_charts.confused_pairs(confusion, 2) == [(1, 2, 4, 14), (0, 1, 3, 8)]
    assert class_charts.confused_pairs(confusion, 15) == [(1, 2, 4, 14), (0, 1, 3, 8), (1, 0, 1, 14)]
    assert class_charts.confused_pairs(np.eye(3, dtype=np.int64), 15) == []


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
