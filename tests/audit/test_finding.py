"""The measures of attacks, against values by hand."""

import numpy as np
import pytest
from pydantic import TypeAdapter

from fedvl.audit.finding import (
    BELOW,
    OPEN,
    SERVER,
    SHOWN,
    Finding,
    auc,
    bootstrap,
    correlation,
    hits_at,
    mean_of,
    mean_of_few,
    of_100,
    of_correlation,
    share_of,
)


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


@pytest.mark.parametrize(
    ("interval", "verdict", "says"),
    [
        ((0.51, 0.9), SHOWN, "Shown: the interval lies above the chance level."),
        ((0.51, 0.54), SHOWN, "Shown: the interval lies above the chance level."),
        # detectable: 0.5 + (0.63 - 0.37) / (2 x 1.96) x (1.96 + 0.84)
        (
            (0.37, 0.63),
            OPEN,
            "Not shown, could be up to 0.63: with 3 clients, this attack shows a leak of 0.69 in 8 of 10",
        ),
        ((0.5, 0.55), OPEN, "Not shown, could be up to 0.55"),
        ((0.46, 0.549), BELOW, "Shown to be below 0.55 for this attack."),
        ((0.1, 0.4), BELOW, "Shown to be below 0.55 for this attack."),
    ],
)
def test_there_are_three_verdicts(interval, verdict, says):
    found = Finding("membership", SERVER, "", 0.5, interval, 0.5, "", counted="3 clients")
    assert found.verdict == verdict
    assert found.leaks is (verdict == SHOWN)
    assert found.conclusion.startswith(says)
    assert TypeAdapter(Finding).dump_python(found)["verdict"] == verdict


def test_the_goal_is_a_margin_above_the_chance_level_by_kind_of_measure():
    for unit, goal in (("", 0.55), ("r", 0.6), (" dB", 1.5)):
        assert Finding("membership", SERVER, "", 0.5, (0.4, 0.6), 0.5, "", unit).goal == pytest.approx(goal)


def test_a_mean_over_few_clients_has_students_interval():
    # mean 0.3, deviation 0.2, t of two degrees of freedom 4.303: 0.3 +- 4.303 x 0.2 / sqrt(3)
    value, (low, high) = mean_of_few(np.array([0.1, 0.3, 0.5]))
    assert (value, low, high) == pytest.approx((0.3, -0.1968, 0.7968), abs=1e-3)
    assert mean_of_few(np.array([0.9]))[1] == (-1.0, 1.0)  # one client says nothing of others
    low, high = mean_of_few(np.ones(10))[1]
    assert low < 1.0 == high  # no interval has no width
    assert share_of(10, 10)[1] == pytest.approx((0.7225, 1.0), abs=1e-4)  # Wilson: 10 / (10 + 1.96^2)


def test_a_share_of_100_is_rounded_as_its_value_is():
    assert f"{0.975:.2f}" == "0.97"  # as a binary fraction it is below
    assert [of_100(share) for share in (0.975, 0.0, 1.0, 0.126)] == ["97", "0", "100", "13"]


def test_a_correlation_over_clients_has_fishers_interval():
    # atanh(0.5) = 0.5493, +- 1.96 / sqrt(9)
    assert of_correlation(0.5, 12) == pytest.approx((-0.1039, 0.8339), abs=1e-3)
    assert of_correlation(0.9, 3) == (-1.0, 1.0)
