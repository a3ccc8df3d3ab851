"""Epsilon against published values and against formulas of our own."""

import math
import sys

import pytest
from scipy.optimize import brentq
from scipy.special import comb, logsumexp
from scipy.stats import norm

from fedvl.errors import FedVLError
from fedvl.federation import accounting
from fedvl.federation.accounting import Step, epsilon_of, sigma_for

# The example of Abadi et al. (2016) that is cited most: 60 epochs of MNIST in batches of 256.
RATE, SIGMA, STEPS, DELTA = 256 / 60_000, 1.1, 60 * 60_000 // 256, 1e-5


def renyi(order, rate, sigma):
    """Renyi divergence of a sampled Gaussian mechanism at a whole order (Mironov et al., 2019, section 3.3)."""
    terms = [
        math.log(comb(order, k)) + k * math.log(rate) + (order - k) * math.log1p(-rate) + k * (k - 1) / (2 * sigma**2)
        for k in range(order + 1)
    ]
    return logsumexp(terms) / (order - 1)


def exact_epsilon(sigma, delta):
    """Of one Gaussian mechanism: the delta of an epsilon is known in closed form (Balle and Wang, 2018)."""

    def excess(epsilon):
        inner, outer = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return norm.cdf(inner) - math.exp(epsilon) * norm.cdf(outer) - delta

    return brentq(excess, 0, 500)


def test_the_published_value_by_the_classic_conversion_and_by_the_tighter_ones():
    orders = range(2, 65)
    classic = min(STEPS * renyi(a, RATE, SIGMA) + math.log(1 / DELTA) / (a - 1) for a in orders)
    assert round(classic, 1) == 3.0
    by_renyi = epsilon_of({Step(RATE, SIGMA): STEPS}, DELTA, "rdp")
    assert round(by_renyi, 1) == 2.6
    tighter = min(  # Canonne, Kamath and Steinke (2020), proposition 12
        STEPS * renyi(a, RATE, SIGMA) + math.log1p(-1 / a) - math.log(DELTA * a) / (a - 1) for a in orders
    )
    assert by_renyi == pytest.approx(tighter, rel=0.01)
    assert epsilon_of({Step(RATE, SIGMA): STEPS}, DELTA) < by_renyi


@pytest.mark.parametrize("sigma, steps", [(1.0, 1), (2.0, 10), (5.0, 3), (20.0, 50)])
def test_without_sampling_the_account_is_the_exact_one(sigma, steps):
    found = epsilon_of({Step(1.0, sigma): steps}, DELTA)
    exact = exact_epsilon(sigma / math.sqrt(steps), DELTA)
    assert exact <= found <= exact + 2e-3  # rounded up, and no more than that
    assert epsilon_of({Step(1.0, sigma): steps}, DELTA, "rdp") > found


def test_kinds_of_steps_add_up_and_nothing_costs_nothing():
    assert epsilon_of({}, DELTA) == 0 == epsilon_of({Step(0.5, 1.0): 0}, DELTA)
    both = epsilon_of({Step(1.0, 3.0): 2, Step(1.0, 4.0): 5}, DELTA)
    assert both == pytest.approx(exact_epsilon((2 / 9 + 5 / 16) ** -0.5, DELTA), abs=3e-3)
    assert epsilon_of({Step(1.0, 0.0): 1}, DELTA) == math.inf


@pytest.mark.parametrize("epsilon, rate, steps", [(3.0, 1.0, 10), (0.5, 1.0, 3), (8.0, 0.25, 40), (20.0, 1.0, 1)])
def test_the_noise_for_an_epsilon_is_enough_and_hardly_more(epsilon, rate, steps):
    sigma = sigma_for(epsilon, rate, steps, DELTA)
    assert epsilon_of({Step(rate, sigma): steps}, DELTA) <= epsilon
    assert epsilon_of({Step(rate, sigma / 1.002): steps}, DELTA) > epsilon


def test_smaller_samples_need_less_noise():
    assert sigma_for(2.0, 0.1, 20, DELTA) < sigma_for(2.0, 0.5, 20, DELTA) < sigma_for(2.0, 1.0, 20, DELTA)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(FedVLError, match=r'pip install "dp-accounting==0.6.0"'):
        accounting.accounting_library()
