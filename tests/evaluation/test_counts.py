"""Counts of an evaluation: sums over sites, and cells that are withheld from what leaves alone."""

from typing import Any

import numpy as np
import pytest

from fedvl.evaluation import counts as module
from fedvl.evaluation.counts import (
    BINS,
    GROUPS,
    MERGED,
    PARTS,
    add_counts,
    bin_edges,
    count,
    count_pair,
    given,
    merge_bins,
    misstated_pair,
    withheld,
    withheld_pair,
)


def drawn(images=400, classes=4, seed=0, skill=2.0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, images)
    scores = generator.normal(0, 1.5, (images, classes)) + skill * np.eye(classes)[labels]
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return labels, shares


def test_every_image_is_counted_once_in_each_table():
    labels, shares = drawn()
    found = count(labels, shares)
    assert found.images.tolist() == np.bincount(labels).tolist()
    assert found.scores.sum((1, 2)).tolist() == [400] * 4
    assert found.confusion.sum() == found.calibration.sum() == 400
    assert found.calibration[1].sum() == np.trace(found.confusion) == (shares.argmax(1) == labels).sum()


def test_an_image_is_in_the_bin_of_its_share():
    labels, shares = np.array([0]), np.array([[0.7, 0.3]])
    found = count(labels, shares)
    first = int(found.scores[0, 1].argmax())
    assert bin_edges()[first] <= 0.7 < bin_edges()[first + 1]
    assert found.calibration[1].argmax() == int(0.7 * GROUPS * PARTS)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_at_the_end_is_in_the_last_bin(share):
    found = count(np.array([0]), np.array([[share, 1 - share]]))
    assert found.scores[0, 1, BINS - 1 if share else 0] == 1


def test_counts_of_sites_add_up_to_those_of_all_images():
    labels, shares = drawn()
    parts = [count(labels[rows], shares[rows]) for rows in np.array_split(np.arange(400), 3)]
    for left, right in zip(add_counts(parts), count(labels, shares), strict=True):
        assert np.array_equal(left, right)


def test_tables_that_merge_different_bins_are_added_where_both_have_an_edge():
    first = np.array([[MERGED, 3, MERGED, 4]])
    second = np.array([[1, MERGED, 1, 1]])
    assert module.add_merged([first, second]).tolist() == [[MERGED, MERGED, MERGED, 10]]
    third = np.array([[1, 5, 1, 1]])
    assert module.add_merged([first, third]).tolist() == [[MERGED, 9, MERGED, 6]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("images", [30, 100, 1000])
def test_no_cell_that_leaves_alone_is_small(seed, images):
    labels, shares = drawn(images, seed=seed)
    found = withheld(labels, shares, 5)
    for table in found:
        assert not ((table > 0) & (table < 5)).any()
    for number, row in enumerate(found.confusion):
        errors = found.images[number] - row[number]
        assert row[number] == MERGED or not 0 < errors < 5


def test_images_of_a_rare_class_are_in_no_table():
    labels, shares = np.array([0] * 50 + [1] * 4 + [2] * 50), np.full((104, 3), 1 / 3)
    found = withheld(labels, shares, 5)
    assert found.images.tolist() == [50, 0, 50]
    assert np.maximum(found.calibration, 0).sum() == 100


def test_a_few_errors_cannot_be_found_by_subtraction():
    """47 of 50 right: neither the hits, nor the total of right answers, nor the scores give the 3 errors."""
    labels = np.array([0] * 50 + [1] * 50)
    right = np.r_[np.ones(47), np.zeros(3), np.ones(30), np.zeros(20)].astype(bool)
    shares = np.where(right, 0.9, 0.2)
    shares = np.stack([np.where(labels == 0, shares, 1 - shares), np.where(labels == 0, 1 - shares, shares)], 1)
    found = withheld(labels, shares, 5)
    assert found.confusion[0, 0] == MERGED
    assert found.confusion[1, 1] == 30
    assert not np.maximum(found.calibration, 0).any()
    for table in found.scores:
        for _, _, counts in given(table):
            assert not ((counts > 0) & (counts < 5)).any()
    cells = np.maximum(found.scores[0, 1], 0)
    assert 3 not in np.cumsum(cells)
    assert 47 not in np.cumsum(cells)


def test_merged_bins_keep_their_total():
    table = np.random.default_rng(0).integers(0, 4, (2, 60))
    total = table.sum(1)
    merge_bins(table, 5)
    assert np.maximum(table, 0).sum(1).tolist() == total.tolist()
    assert (table[:, -1] != MERGED).all()


def tables(found):
    return {name: table.copy() for name, table in found._asdict().items()}


@pytest.mark.parametrize("least", [1, 5])
def test_tables_of_one_set_of_images_are_accepted(least):
    labels, shares = drawn()
    assert module.misstated(tables(count(labels, shares)), 4) is None
    assert module.misstated(tables(withheld(labels, shares, least)), 4) is None


def lie(name, place, value):
    def change(found):
        found[name][place] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found.pop("scores"), "other shapes"),
        (lie("confusion", (0, 1), -2), "negative or too large"),
        (lie("calibration", (1, 0), 2**31 + 1), "negative or too large"),
        (lie("scores", (0, 0, BINS - 1), MERGED), "the last bin"),
        (lie("calibration", (0, GROUPS * PARTS - 1), MERGED), "the last bin"),
        (lie("scores", (0, 0, 0), MERGED), "differ between rows"),
        (lie("scores", (0, 0, 0), 300), "not of the same images in each class"),
        (lie("confusion", (0, 1), 300), "its confusion matrix"),
        (lie("confusion", 0, MERGED), ""),
        (lie("calibration", (1, 0), 300), "its calibration counts"),
    ],
)
def test_tables_that_are_not_of_one_set_of_images_are_refused(change, reason):
    found = tables(count(*drawn()))
    change(found)
    assert reason in (module.misstated(found, 4) or "")
    assert bool(reason) == (module.misstated(found, 4) is not None)


# --- two models


def answers(labels, right):
    """Shares of two classes that are right or wrong about these images."""
    sure = np.where(labels == 0, 0.9, 0.1)
    first = np.where(right, sure, 1 - sure)
    return np.stack([first, 1 - first], 1)


def pair_of(both: int, first: int, second: int, neither: int) -> tuple[Any, Any, Any]:
    """Labels of two classes, and the shares of two models, so that each class has these counts."""
    cells = [(True, True)] * both + [(True, False)] * first + [(False, True)] * second + [(False, False)] * neither
    labels = np.repeat([0, 1], len(cells))
    of_first, of_second = (np.array([cell[model] for cell in cells] * 2) for model in (0, 1))
    return labels, answers(labels, of_first), answers(labels, of_second)


def test_images_are_counted_by_which_of_two_models_has_them_right():
    assert count_pair(*pair_of(4, 3, 2, 1)).tolist() == [8, 6, 4, 2]
    assert count_pair(*pair_of(0, 1, 0, 0)).tolist() == [0, 2, 0, 0]


def test_counts_of_two_models_are_withheld_if_one_is_small():
    assert withheld_pair(*pair_of(10, 5, 5, 5), least=10).tolist() == [20, 10, 10, 10]
    assert withheld_pair(*pair_of(10, 5, 0, 5), least=5).tolist() == [20, 10, 0, 10], "nothing is not a few"
    assert withheld_pair(*pair_of(10, 4, 10, 10), least=9).tolist() == [MERGED] * 4


def test_counts_of_two_models_are_withheld_if_they_would_tell_hits_that_are():
    """Each class has 3 errors of the first model, fewer than 5: the sum of all right answers would tell them."""
    labels, first, second = pair_of(10, 7, 3, 0)
    assert count_pair(labels, first, second).tolist() == [20, 14, 6, 0]
    assert withheld_pair(labels, first, second, 5).tolist() == [MERGED] * 4
    assert withheld_pair(labels, second, first, 5).tolist() == [MERGED] * 4
    assert withheld_pair(labels, first, second, 3).tolist() == [20, 14, 6, 0]


def test_images_of_rare_classes_are_in_no_count_of_two_models():
    labels, first, second = pair_of(10, 5, 5, 5)
    rare = np.append(labels, 0)[25:]  # one image of class 0
    assert withheld_pair(rare, first[:26], second[:26], 5).sum() == 25


@pytest.mark.parametrize(
    "table, problem",
    [
        ([8, 6, 4, 2], None),
        ([MERGED] * 4, None),
        ([8, 6, 6], "another shape"),
        ([9, 5, 4, 1], "other images"),
        ([16, -2, 4, 2], "other images"),
        ([MERGED, 6, 4, 2], "other images"),
        ([7, 6, 5, 2], "other right answers"),
    ],
)
def test_a_table_of_two_models_fits_the_counts_of_the_first(table, problem):
    labels, first, _ = pair_of(4, 3, 2, 1)
    found = misstated_pair(np.array(table), count(labels, first))
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)
