"""Charts by class: recall against zero-shot, and the confusion matrix."""

import numpy as np
import pytest
from helpers.drawings import drawn, with_class

from fedvl.report.charts.classes import confused_pairs, confusion_chart, recall_bar


@pytest.mark.parametrize(
    ("recall", "reference", "shared", "kind", "width"),
    [(80.0, 60.0, 60, "gain", 20), (55.0, 60.0, 55, "loss", 5)],
)
def test_recall_bar_parts_add_up(recall, reference, shared, kind, width):
    root = drawn(recall_bar(recall, reference))
    assert float(with_class(root, "shared")[0].get("width")) == shared
    (change,) = with_class(root, kind)
    assert (float(change.get("x")), float(change.get("width"))) == (shared, width)
    assert float(with_class(root, "mark")[0].get("x1")) == reference


def test_recall_bar_without_reference_shows_no_change():
    root = drawn(recall_bar(40.0, None))
    assert float(with_class(root, "shared")[0].get("width")) == 40
    assert not with_class(root, "gain") + with_class(root, "loss") + with_class(root, "mark")


def test_confusion_chart_shades_by_share_of_the_true_class():
    root = drawn(confusion_chart(np.array([[3, 1], [0, 8]]), ["cat", "dog"]))
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
    root = drawn(confusion_chart(np.array([[0, 0], [1, 1]]), ["cat", "dog"]))
    assert len(with_class(root, "share")) == 2


def test_confused_pairs_are_the_commonest_mistakes():
    confusion = np.array([[5, 3, 0], [1, 9, 4], [0, 0, 7]])
    assert confused_pairs(confusion, 2) == [(1, 2, 4, 14), (0, 1, 3, 8)]
    assert confused_pairs(confusion, 15) == [(1, 2, 4, 14), (0, 1, 3, 8), (1, 0, 1, 14)]
    assert confused_pairs(np.eye(3, dtype=np.int64), 15) == []


def test_a_matrix_of_ten_classes_fits_a_phone():
    names = [f"a class with a long name {number}" for number in range(10)]
    for width, cell in ((848, 43), (356, (356 - 6 - 14) / 10)):
        root = drawn(confusion_chart(np.eye(10, dtype=np.int64), names, width=width))
        assert float(root.get("width") or 0) <= width
        sides = {float(each.get("width") or 0) for each in root.iter() if each.get("class") == "right"}
        assert len(sides) == 1
        assert sides.pop() <= cell
