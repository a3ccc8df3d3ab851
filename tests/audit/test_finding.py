"""The measures of attacks, against values by hand."""

import numpy as np
import pytest

from fedvl.audit.finding import SERVER, Finding, auc, bootstrap, correlation, hits_at, mean_of, of_100


def test_auc_counts_pairs_and_half_of_ties_by_weight():
    inside, outside = np.array([3.0, 1.0]), np.array([2.0, 1.0, 0.0])
    # 3 beats all; 1 beats 0 and ties with 1: (3 + 1.5) of 6 pairs
    assert auc(inside, outside, np.ones(3)) == pytest.approx(4.5 / 6)
    # without the image at 2: (2 + 1.5) of 4
    assert auc(inside, outside, np.array([0.0, 1.0, 1.0])) == pytest.approx(3.5 / 4)


def test_the_threshold_lets_a_hundredth_of_the_outside_pass():
    outside = np.arange(200.0)
    assert hits_at(np.array([197.5, 198.5, 0.0, 199.5]), outside, np.ones(200), 0.01) == 0.5
    assert hits_at(outside, outside, np.ones(200), 0.01) == pytest.approx(0.005)


def test_correlation_is_pearsons_and_nothing_of_a_constant():
    left, right = np.array([1.0, 2.0, 4.0]), np.array([2.0, 1.0, 5.0])
    assert correlation(left, right) == pytest.approx(np.corrcoef(left, right)[0, 1])
    assert correlation(left, np.ones(3)) == 0.0


def test_intervals_hold_what_they_should():
    value, (low, high) = mean_of(np.array([0.0, 1.0] * 50))
    assert value == 0.5
    assert 0.38 < low < 0.45 < 0.55 < high < 0.62
    assert bootstrap(lambda generator: 3.0) == (3.0, 3.0)


def test_a_finding_leaks_if_its_whole_interval_is_above_the_guess():
    for interval, leaks in (((0.51, 0.9), True), ((0.5, 0.9), False), ((0.1, 0.4), False)):
        assert Finding("membership", SERVER, "", 0.7, interval, 0.5, "").leaks is leaks


def test_a_share_of_100_is_rounded_as_its_figure_is():
    assert f"{0.975:.2f}" == "0.97"  # as a binary fraction it is below
    assert [of_100(share) for share in (0.975, 0.0, 1.0, 0.126)] == ["97", "0", "100", "13"]
