"""Classes with many, medium and few training images, against values computed by hand."""

import numpy as np
import pytest

from fedvl.evaluation.long_tail import BOUNDS, THIRDS, accuracy_by_group, groups


def test_the_usual_bounds_count_100_and_20_as_medium():
    found, by = groups(np.array([500, 101, 100, 20, 19, 1]))
    assert [own.tolist() for own in found] == [[0, 1], [2, 3], [4, 5]]
    assert by == BOUNDS


def test_thirds_where_a_group_would_be_empty():
    found, by = groups(np.array([3, 60, 50, 40, 30, 5, 20]))  # none has more than 100
    assert [own.tolist() for own in found] == [[1, 2, 3], [4, 6], [0, 5]]
    assert by == THIRDS


def test_accuracy_is_of_the_test_images_of_a_group():
    confusion = np.array([[8, 2, 0, 0], [5, 3, 2, 0], [1, 0, 1, 2], [0, 0, 0, 0]])
    found = accuracy_by_group(np.array([200, 150, 50, 10]), confusion, np.diag([10, 10, 4, 0]))
    many, medium, few = found.groups
    assert (many.test_images, many.training_images, many.classes) == (20, 350, [0, 1])
    assert many.accuracy == pytest.approx(100 * 11 / 20)
    assert medium.accuracy == pytest.approx(25.0)
    assert few.accuracy is None  # no test image
    assert [row.zero_shot_accuracy for row in (many, medium)] == [100.0, 100.0]
