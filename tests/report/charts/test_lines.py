"""Line charts over rounds: where points, names, references and tooltips are."""

import pytest
from helpers.drawings import drawn, titles, with_class

from fedvl.report.charts.lines import Series, line_chart


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


def test_a_band_is_between_its_bounds_and_behind_the_curves():
    # Ticks of [60, 80] from y = 260 to y = 24, x as above; the band widens the range of the axis.
    curves = [
        Series("a", [(1, 70.0), (2, 70.0)], band=[(1, 60.0, 80.0), (2, 65.0, 75.0)]),
        Series("b", [(1, 70.0), (2, 70.0)]),
    ]
    root = drawn(line_chart(curves, None, 760, 300, "accuracy, %"))
    (band,) = with_class(root, "band")
    points = [tuple(map(float, point.split())) for point in band.get("d").strip("MZ").split("L")]
    assert [y for _, y in points] == [24, 83, 201, 260]  # high to the right, low back to the left
    assert points[0][0] == points[3][0] == 54
    assert band.get("class") == "band c0"
    order = [each.get("class", "") for each in root.iter()]
    assert order.index("band c0") < order.index("series")


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
