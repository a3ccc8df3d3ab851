"""The bound of one-run auditing: the paper's formula, its coverage, and what it finds."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fedvl.audit.one_run import audit_guesses, epsilon_bound, guesses_p_value


def published(m, r, v, eps, delta):
    """The p-value as the paper's appendix computes it, in another way."""
    q = 1 / (1 + math.exp(-eps))
    beta = binom.sf(v - 1, r, q)
    alpha = total = 0.0
    for i in range(1, v + 1):
        total += binom.pmf(v - i, r, q)
        alpha = max(alpha, total / i)
    return min(beta + alpha * delta * 2 * m, 1.0)


@pytest.mark.parametrize(
    "arguments", [(100, 50, 45, 1.0, 1e-5), (1000, 200, 150, 0.5, 1e-3), (64, 64, 64, 3.0, 1e-5), (10, 4, 0, 0.0, 1e-2)]
)
def test_the_p_value_is_the_papers(arguments):
    assert guesses_p_value(*arguments) == pytest.approx(published(*arguments), rel=1e-9)


def test_all_guesses_right_without_delta_is_a_power():
    # 0.05 = (e^eps / (1 + e^eps))^100, so e^eps = q / (1 - q) with q = 0.05^(1/100)
    q = 0.05**0.01
    assert epsilon_bound(100, 100, 100, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert epsilon_bound(100, 100, 50, 0.0) == 0.0
    assert epsilon_bound(100, 100, 100, 1e-4) < epsilon_bound(100, 100, 100, 0.0)


def gaussian_epsilon(sigma, delta):
    """The exact epsilon of a Gaussian mechanism of sensitivity 1 (Balle and Wang, 2018)."""

    def excess(eps):
        return (
            norm.cdf(1 / (2 * sigma) - eps * sigma) - math.exp(eps) * norm.cdf(-1 / (2 * sigma) - eps * sigma) - delta
        )

    return float(brentq(excess, 0, 100))


def run_once(generator, sigma, canaries=400) -> tuple[Any, Any]:
    """A sum with noise: each canary has a direction of its own, so that its number is its coin and noise."""
    included = generator.random(canaries) < 0.5
    return included + sigma * generator.standard_normal(canaries), included


@pytest.mark.parametrize("sigma", [3.0, 1.0, 0.5])
def test_the_bound_of_a_private_mechanism_is_hardly_ever_above_its_epsilon(sigma):
    delta, generator = 1e-5, np.random.default_rng(0)
    true = gaussian_epsilon(sigma, delta)
    bounds = [audit_guesses(*run_once(generator, sigma), delta).epsilon for _ in range(200)]
    assert np.mean(np.array(bounds) > true) <= 0.05
    assert sigma > 1 or np.median(bounds) > 0.1 * true  # and it says something


def test_noise_a_tenth_of_what_is_claimed_is_found():
    delta, generator = 1e-5, np.random.default_rng(1)
    claimed = gaussian_epsilon(1.5, delta)
    bounds = [audit_guesses(*run_once(generator, 0.15), delta).epsilon for _ in range(20)]
    assert all(bound > claimed for bound in bounds[:1])
    assert np.mean(np.array(bounds) > claimed) == 1.0


def test_an_auditor_that_sees_nothing_bounds_nothing():
    generator = np.random.default_rng(2)
    bounds = [audit_guesses(generator.random(300), generator.random(300) < 0.5, 1e-5).epsilon for _ in range(100)]
    assert np.mean(np.array(bounds) > 0) <= 0.05


@pytest.mark.parametrize("guesses", [8, 16, 32, 64])
def test_coins_of_an_eighth_a_quarter_half_or_all_canaries_are_guessed(guesses):
    """Canaries are taken as included from one end and as left out from the other; so many of both are as guessed."""
    included = np.arange(64) < 32
    included[guesses // 2 : 64 - guesses // 2] ^= True
    found = audit_guesses(-np.arange(64.0), included, 0.0, confidence=0.8)
    bounds = {count: epsilon_bound(64, count, min(count, guesses), 0.0, 1 - 0.2 / 4) for count in (8, 16, 32, 64)}
    assert found.epsilon == bounds[guesses] == max(bounds.values())
    assert (found.canaries, found.guesses, found.right) == (64, guesses, guesses)
