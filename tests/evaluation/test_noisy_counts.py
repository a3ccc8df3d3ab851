"""Counts with noise: what one image changes, counts that can be, and intervals that cover the noise."""

from typing import Any

import numpy as np
import pytest
from evaluation.test_counts import drawn
from sklearn import metrics

from fedvl.evaluation.counts import count
from fedvl.evaluation.noisy_counts import (
    coarse,
    coarse_shapes,
    figures_with_noise,
    nearest_counts,
    possible_counts,
    sensitivity_to_an_image,
)

NAMES = ["a", "b", "c", "d"]
HALF = [128] * 4


def test_one_image_more_moves_the_tables_by_the_sensitivity_at_most():
    labels, shares = drawn(60)
    whole = coarse(count(labels, shares))
    norms = []
    for left_out in range(60):
        rest = coarse(count(np.delete(labels, left_out), np.delete(shares, left_out, 0)))
        norms.append(sum(((whole[name] - rest[name]) ** 2).sum() for name in whole) ** 0.5)
    assert max(norms) == pytest.approx(sensitivity_to_an_image(4)) == pytest.approx(5**0.5)
    assert {name: table.shape for name, table in whole.items()} == coarse_shapes(4)


@pytest.mark.parametrize(
    "row, wanted", [([3, 1], [3, 1]), ([4, -2, 4], [3, 0, 3]), ([9, -3], [6, 0]), ([-1, -5], [0, 0]), ([2, -4], [0, 0])]
)
def test_the_nearest_counts_have_the_same_sum_and_none_is_negative(row, wanted):
    assert nearest_counts(np.array(row)).tolist() == wanted


def test_hits_are_not_more_than_images():
    tables = {"scores": np.ones((1, 2, 16), np.int64), "hits": np.array([40])}
    assert possible_counts(tables)["hits"].tolist() == [16]
    assert possible_counts({**tables, "hits": np.array([-3])})["hits"].tolist() == [0]


def test_without_noise_figures_are_those_of_the_scores_within_binning():
    labels, shares = drawn(800)
    found: Any = figures_with_noise(coarse(count(labels, shares)), 0.0, NAMES, HALF)
    assert found.accuracy.value == pytest.approx(100 * (shares.argmax(1) == labels).mean())
    assert (found.ece, found.calibration, found.accuracy.noise) == (None, [], 0.0)
    for number, each in enumerate(found.classes):
        wanted = metrics.roc_auc_score(labels == number, shares[:, number])
        assert abs(each.auroc.value - wanted) <= each.auroc.binning < 0.05
        said = shares[:, number] >= each.threshold
        assert each.sensitivity.value == pytest.approx(100 * metrics.recall_score(labels == number, said))


def test_intervals_cover_what_the_noise_does():
    """Of 8 evaluations with other noise, figures differ as much as each of them says."""
    labels, shares = drawn(3000)
    tables, deviation = coarse(count(labels, shares)), 6.0
    exact: Any = figures_with_noise(tables, 0.0, NAMES, HALF)
    generator = np.random.default_rng(1)
    found: list[Any] = [
        figures_with_noise(
            {
                name: np.rint(table + generator.normal(0, deviation, table.shape)).astype(int)
                for name, table in tables.items()
            },
            deviation,
            NAMES,
            HALF,
        )
        for _ in range(8)
    ]
    for key in ("accuracy", "auroc"):
        each = [getattr(one, key) for one in found]
        spread = 1.96 * np.std([one.value for one in each])
        assert 0.5 < np.mean([one.noise for one in each]) / spread < 3.0, key
        value = getattr(exact, key).value
        assert sum(one.low <= value <= one.high for one in each) >= 7, key
        assert np.mean([one.high - one.low for one in each]) > getattr(exact, key).high - getattr(exact, key).low


def test_classes_without_images_beside_the_noise_have_no_figures_and_move_no_others():
    """Four of eight classes have no image; what noise makes of them would be taken for images of theirs."""
    labels, few = drawn(900)
    shares = np.concatenate([0.96 * few, np.full((900, 4), 0.01)], 1)
    names, half = [*NAMES, *"efgh"], [128] * 8
    tables, deviation = coarse(count(labels, shares)), 6.0
    generator = np.random.default_rng(2)
    found: list[Any] = [
        figures_with_noise(
            {
                name: np.rint(table + generator.normal(0, deviation, table.shape)).astype(int)
                for name, table in tables.items()
            },
            deviation,
            names,
            half,
        )
        for _ in range(6)
    ]
    wanted = 100 * (shares.argmax(1) == labels).mean()
    assert all([each.auroc is not None for each in one.classes] == [True] * 4 + [False] * 4 for one in found)
    assert sum(one.accuracy.low <= wanted <= one.accuracy.high for one in found) >= 5
    assert abs(np.mean([one.accuracy.value for one in found]) - wanted) < 2
    assert abs(np.mean([one.images for one in found]) - 900) < 20
