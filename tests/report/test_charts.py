from xml.etree import ElementTree

import numpy as np
import pytest

from fedvl.report import charts


def drawn(svg):
    return ElementTree.fromstring(svg)


def with_class(root, name):
    return [node for node in root.iter() if name in (node.get("class") or "").split()]


def titles(root):
    return [node.text for node in root.iter("title")]


def test_line_chart_puts_points_and_reference_at_their_heights():
    # Ticks of [60, 80] are 60..80; the plot reaches from y = 24 (80 %) to y = 260 (60 %) in a chart 300 high.
    root = drawn(charts.line_chart([(1, 60.0), (2, 70.0), (3, 80.0)], 65.0, 760, 300, "accuracy, %", " %"))
    dots = with_class(root, "dot")
    assert [float(dot.get("cy")) for dot in dots] == [260, 142, 24]
    # Equal steps across, 8 pixels inside the axes at 46 and 706.
    assert [float(dot.get("cx")) for dot in dots] == [54, 376, 698]
    (reference,) = with_class(root, "reference")
    assert float(reference.get("y1")) == float(reference.get("y2")) == 201
    assert with_class(root, "series")[0].get("d") == "M54 260L376 142L698 24"


def test_line_chart_tells_each_round_in_a_tooltip():
    root = drawn(charts.line_chart([(4, 61.234), (5, 70.0)], 65.0, 760, 300, "accuracy, %", " %"))
    assert titles(root) == ["Round 4: 61.23 %, zero-shot 65.00 %", "Round 5: 70.00 %, zero-shot 65.00 %"]


def test_line_chart_keeps_end_labels_apart():
    root = drawn(charts.line_chart([(1, 60.0), (2, 70.01)], 70.0, 760, 300, "accuracy, %"))
    heights = [float(with_class(root, name)[0].get("y")) for name in ("series-end", "reference-end")]
    assert heights[1] - heights[0] == pytest.approx(13)


def test_line_chart_of_one_round_is_a_dot_in_the_middle():
    root = drawn(charts.line_chart([(1, 60.0)], None, 760, 300, "accuracy, %"))
    assert [float(dot.get("cx")) for dot in with_class(root, "dot")] == [376]
    assert not with_class(root, "series")
    assert not with_class(root, "reference")


def test_line_chart_of_many_rounds_bounds_its_tooltips():
    root = drawn(charts.line_chart([(index, float(index)) for index in range(1, 1001)], None, 760, 300, "loss"))
    assert len(titles(root)) == 200
    assert not with_class(root, "dot")


def test_bubble_areas_are_proportional_to_counts():
    counts = np.array([[100, 25], [0, 4]])
    root = drawn(charts.partition_chart(counts, ["cat", "dog"]))
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
    root = drawn(charts.partition_chart(np.array([[30, 10], [0, 10], [0, 0]]), ["cat", "dog"]))
    heights = [float(bar.get("height")) for bar in with_class(root, "bar")]
    assert heights == [28, 7, 0]


@pytest.mark.parametrize(("clients", "classes", "heat"), [(40, 40, False), (41, 2, True), (2, 41, True)])
def test_many_clients_or_classes_become_a_heat_map(clients, classes, heat):
    root = drawn(
        charts.partition_chart(
            np.ones((clients, classes), dtype=np.int64), [f"class {index}" for index in range(classes)]
        )
    )
    assert bool(with_class(root, "heat")) is heat
    assert bool(with_class(root, "bubble")) is not heat


def test_heat_levels_follow_the_square_root():
    # 8 * sqrt(1/4) = 4; any holding at all is at least level 1.
    assert [charts.heat_level(count, 100) for count in (0, 1, 25, 26, 100)] == [0, 1, 4, 5, 8]


def test_heat_map_draws_each_holding_once():
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 3, (100, 60))
    root = drawn(charts.partition_chart(counts, [f"class {index}" for index in range(60)]))
    boxes = sum(node.get("d").count("z") for node in with_class(root, "heat") if node.tag == "path")
    assert boxes == np.count_nonzero(counts)


def test_heat_map_names_what_a_client_holds_most_of():
    counts = np.zeros((50, 3), dtype=np.int64)
    counts[7] = [1, 0, 5]
    root = drawn(charts.partition_chart(counts, ["cat", "dog", "<b>"]))
    assert "Client 7, most of: <b> 5, cat 1" in titles(root)
    assert "Client 8: nothing" in titles(root)


def test_huge_partitions_are_pooled_and_lose_nothing():
    assert [charts.group_size(count) for count in (1, 200, 201, 1000)] == [1, 1, 2, 5]
    counts = np.arange(10).reshape(5, 2)
    assert charts.pool(counts, 2, 0).tolist() == [[2, 4], [10, 12], [8, 9]]
    svg = charts.partition_chart(np.ones((1000, 1000), dtype=np.int64), [f"class {index}" for index in range(1000)])
    boxes = sum(node.get("d").count("z") for node in with_class(drawn(svg), "heat") if node.tag == "path")
    assert boxes == 200 * 200


def test_partition_of_nothing_is_still_drawn():
    root = drawn(charts.partition_chart(np.zeros((2, 2), dtype=np.int64), ["cat", "dog"]))
    assert not with_class(root, "bubble")


@pytest.mark.parametrize(
    ("recall", "reference", "shared", "kind", "width"),
    [(80.0, 60.0, 60, "gain", 20), (55.0, 60.0, 55, "loss", 5)],
)
def test_recall_bar_parts_add_up(recall, reference, shared, kind, width):
    root = drawn(charts.recall_bar(recall, reference))
    assert float(with_class(root, "shared")[0].get("width")) == shared
    (change,) = with_class(root, kind)
    assert (float(change.get("x")), float(change.get("width"))) == (shared, width)
    assert float(with_class(root, "mark")[0].get("x1")) == reference


def test_recall_bar_without_reference_shows_no_change():
    root = drawn(charts.recall_bar(40.0, None))
    assert float(with_class(root, "shared")[0].get("width")) == 40
    assert not with_class(root, "gain") + with_class(root, "loss") + with_class(root, "mark")


def test_confusion_chart_shades_by_share_of_the_true_class():
    root = drawn(charts.confusion_chart(np.array([[3, 1], [0, 8]]), ["cat", "dog"]))
    shades = {
        node.find("title").text: float(node.get("fill-opacity"))
        for node in root.iter("rect")
        if node.find("title") is not None
    }
    # Mistakes by the square root: one in four is shown at a half.
    assert shades == {
        "cat recognised: 3 of 4 (75.0 %)": 0.75,
        "cat taken for dog: 1 of 4 (25.0 %)": 0.5,
        "dog recognised: 8 of 8 (100.0 %)": 1.0,
    }
    assert [node.text for node in with_class(root, "share")] == ["75", "25", "100"]


def test_confusion_chart_bears_a_class_without_test_images():
    root = drawn(charts.confusion_chart(np.array([[0, 0], [1, 1]]), ["cat", "dog"]))
    assert len(with_class(root, "share")) == 2


def test_confused_pairs_are_the_commonest_mistakes():
    confusion = np.array([[5, 3, 0], [1, 9, 4], [0, 0, 7]])
    assert charts.confused_pairs(confusion, 2) == [(1, 2, 4, 14), (0, 1, 3, 8)]
    assert charts.confused_pairs(confusion, 15) == [(1, 2, 4, 14), (0, 1, 3, 8), (1, 0, 1, 14)]
    assert charts.confused_pairs(np.eye(3, dtype=np.int64), 15) == []
