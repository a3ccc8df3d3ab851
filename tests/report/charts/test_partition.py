"""Partitions as bubbles or as a heat map: areas, levels and pooled clients."""

import numpy as np
import pytest
from helpers.drawings import drawn, titles, with_class

from fedvl.report.charts.partition import group_size, heat_level, partition_chart, pool


def test_bubble_areas_are_proportional_to_counts():
    counts = np.array([[100, 25], [0, 4]])
    root = drawn(partition_chart(counts, ["cat", "dog"]))
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
    root = drawn(partition_chart(np.array([[30, 10], [0, 10], [0, 0]]), ["cat", "dog"]))
    heights = [float(bar.get("height")) for bar in with_class(root, "bar")]
    assert heights == [28, 7, 0]


@pytest.mark.parametrize(("clients", "classes", "heat"), [(40, 40, False), (41, 2, True), (2, 41, True)])
def test_many_clients_or_classes_become_a_heat_map(clients, classes, heat):
    root = drawn(
        partition_chart(np.ones((clients, classes), dtype=np.int64), [f"class {index}" for index in range(classes)])
    )
    assert bool(with_class(root, "heat")) is heat
    assert bool(with_class(root, "bubble")) is not heat


def test_a_legend_names_no_bound_twice():
    """Of at most 7 samples the levels reach to 0.4, 1.75, 3.9 and 7: the first two hold one sample."""
    root = drawn(partition_chart(np.full((41, 2), 7), ["cat", "dog"]))
    assert [node.text for node in root.iter() if (node.text or "").startswith("≤")] == ["≤ 1", "≤ 3", "≤ 7"]


def test_heat_levels_follow_the_square_root():
    # 8 * sqrt(1/4) = 4; any holding at all is at least level 1.
    assert [heat_level(count, 100) for count in (0, 1, 25, 26, 100)] == [0, 1, 4, 5, 8]


def test_heat_map_draws_each_holding_once():
    draw = np.random.default_rng(0)
    counts = draw.integers(0, 3, (100, 60))
    root = drawn(partition_chart(counts, [f"class {index}" for index in range(60)]))
    boxes = sum(node.get("d").count("z") for node in with_class(root, "heat") if node.tag == "path")
    assert boxes == np.count_nonzero(counts)


def test_heat_map_names_what_a_client_holds_most_of():
    counts = np.zeros((50, 3), dtype=np.int64)
    counts[7] = [1, 0, 5]
    root = drawn(partition_chart(counts, ["cat", "dog", "<b>"]))
    assert "Client 7, most of: <b> 5, cat 1" in titles(root)
    assert "Client 8: no samples" in titles(root)


def test_huge_partitions_are_pooled_and_lose_nothing():
    assert [group_size(count) for count in (1, 200, 201, 1000)] == [1, 1, 2, 5]
    counts = np.arange(10).reshape(5, 2)
    assert pool(counts, 2, 0).tolist() == [[2, 4], [10, 12], [8, 9]]
    svg = partition_chart(np.ones((1000, 1000), dtype=np.int64), [f"class {index}" for index in range(1000)])
    boxes = sum(node.get("d").count("z") for node in with_class(drawn(svg), "heat") if node.tag == "path")
    assert boxes == 200 * 200


def test_partition_of_nothing_is_still_drawn():
    root = drawn(partition_chart(np.zeros((2, 2), dtype=np.int64), ["cat", "dog"]))
    assert not with_class(root, "bubble")
