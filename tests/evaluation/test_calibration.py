"""A temperature that was put into scores is found again; calibration errors against values by hand."""

import numpy as np
import pytest
import torch

from fedvl.evaluation.calibration import calibration_error, calibration_interval, fit_temperature


@pytest.mark.parametrize("temperature", [0.005, 0.02, 1.0, 40.0])
def test_the_temperature_of_made_up_shares_is_found(temperature: float) -> None:
    scores = torch.randn(200, 9, generator=torch.Generator().manual_seed(0)) * temperature * 3
    assert fit_temperature(scores, torch.softmax(scores / temperature, -1)) == pytest.approx(temperature, rel=1e-3)


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
