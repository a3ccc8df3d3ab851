"""A temperature that was put into scores is found again; calibration errors against values by hand."""

import numpy as np
import pytest
import torch
from scipy.special import softmax

from fedvl.evaluation.calibration import (
    LEAST_SHARES,
    calibration_error,
    calibration_interval,
    fit_held_out,
    fit_temperature,
    share_bins,
    sure_answers,
)


@pytest.mark.parametrize("temperature", [0.005, 0.02, 1.0, 40.0])
def test_the_temperature_of_made_up_shares_is_found(temperature: float) -> None:
    scores = torch.randn(200, 9, generator=torch.Generator().manual_seed(0)) * temperature * 3
    assert fit_temperature(scores, torch.softmax(scores / temperature, -1)) == pytest.approx(temperature, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_labels_that_shares_gave_give_their_temperature_again(temperature: float) -> None:
    """Labels are drawn by true shares; the shares that are told are those of scores divided by too little or much."""
    generator = np.random.default_rng(1)
    scores = generator.normal(size=(20_000, 5)) * 2
    true = softmax(scores, axis=1)
    labels = (true.cumsum(1) > generator.random((len(true), 1))).argmax(1)
    found = fit_held_out(labels, softmax(scores * temperature, axis=1))
    assert found == pytest.approx(temperature, rel=0.04)


def test_a_share_of_zero_has_a_finite_temperature() -> None:
    assert 0 < fit_held_out(np.array([1, 0]), np.array([[1.0, 0.0], [1.0, 0.0]])) < 1e4


def test_bins_of_shares_and_sure_answers_by_hand() -> None:
    shares = np.array([0.95, 0.99, 0.5, 0.52, 0.79])
    right = np.array([True, False, True, False, True])
    bins = share_bins(shares, right)
    assert [each.share for each in bins] == pytest.approx([51, 79, 97])
    assert [(each.right, each.images) for each in bins] == [(50, 2), (100, 1), (50, 2)]
    told = {each.least: (each.unsure, each.images, each.accuracy) for each in sure_answers(shares, right, 0.995)}
    assert tuple(told) == (*LEAST_SHARES, 0.995)
    assert told[0.5] == (0, 5, 60.0)
    assert told[0.6] == pytest.approx((40, 3, 200 / 3))
    assert told[0.8] == pytest.approx((60, 2, 50))
    assert told[0.995] == (100, 0, None)
    assert tuple(each.least for each in sure_answers(shares, right, 0.8)) == LEAST_SHARES


def test_the_calibration_error_is_the_mean_gap_of_the_bins() -> None:
    shares = np.array([0.95, 0.99, 0.5, 0.52, 1.0])
    right = np.array([True, False, True, False, True])
    # Bins of 1/15: {0.95, 0.99, 1.0} has accuracy 2/3 and share 0.98, {0.5, 0.52} accuracy 1/2 and share 0.51.
    assert calibration_error(shares, right) == pytest.approx(100 * (3 * (0.98 - 2 / 3) + 2 * 0.01) / 5)
    assert calibration_error(np.array([1.0, 1.0]), np.array([True, True])) == 0


def test_there_are_fifteen_bins() -> None:
    shares, right = np.array([0.61, 0.69]), np.array([True, False])
    # 0.61 x 15 = 9.15 and 0.69 x 15 = 10.35: two bins, whose gaps are 0.39 and 0.69. In ten bins they would share one,
    # where the accuracy of 0.5 is near the mean share of 0.65.
    assert calibration_error(shares, right) == pytest.approx(100 * (0.39 + 0.69) / 2)
    # 0.601 x 15 = 9.015 and 0.66 x 15 = 9.9: one bin; sixteen or twenty would part them
    assert calibration_error(np.array([0.601, 0.66]), right) == pytest.approx(100 * abs(1 - 0.601 - 0.66) / 2)


def test_shares_that_are_true_have_a_small_error_and_an_interval_around_it() -> None:
    generator = np.random.default_rng(0)
    shares = generator.uniform(0.2, 1, 20_000)
    right = generator.random(20_000) < shares
    assert calibration_error(shares, right) < 1.5
    doubtful = generator.random(20_000) < shares - 0.2  # too sure by 20 points
    low, high = calibration_interval(shares, doubtful)
    assert low < calibration_error(shares, doubtful) < high
    assert 18 < low < high < 22
