"""Epsilon of Gaussian mechanisms on Poisson samples, and the noise that keeps it below a ceiling.

A step takes each unit (a client or an image) with probability ``rate``, independently, adds up what
it gives, of norm at most C, and adds Gaussian noise of deviation ``sigma`` C. Two datasets are
neighbours if one has a unit more. ``dp_accounting`` does the sums, and is imported when needed.
"""

import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from fedvl.errors import FedVLError
from fedvl.version import install_command

# Of privacy losses in a PLD: they are rounded up, so that coarser is faster and says a larger epsilon, never a smaller.
INTERVAL = 1e-3
CLOSE = 1e-3  # how far, as a share, a noise multiplier may be above the smallest one that will do

Account = Literal["pld", "rdp"]


class Step(NamedTuple):
    """One step of a kind: who is in it, by chance, and how much noise there is."""

    rate: float
    sigma: float


def epsilon_of(steps: Mapping[Step, int], delta: float, by: Account = "pld") -> float:
    """Return the epsilon of so many steps of each kind, one after another."""
    if any(step.sigma == 0 for step, count in steps.items() if count):
        return math.inf
    return _epsilon(tuple(sorted((step, count) for step, count in steps.items() if count)), delta, by)


@cache
def sigma_for(epsilon: float, rate: float, steps: int, delta: float) -> float:
    """Return the least noise multiplier of so many steps whose epsilon is at most this."""
    return least_sigma(epsilon, delta, lambda sigma: {Step(rate, sigma): steps})


def least_sigma(
    epsilon: float, delta: float, plan: Callable[[float], Mapping[Step, int]], by: Account = "pld"
) -> float:
    """Return the least noise multiplier, within a thousandth, whose plan spends at most epsilon."""
    if not plan(1.0):
        return 0.0
    # Begin where it is enough even without sampling (Bun and Steinke, 2016, proposition 1.3) and go down by halves: an
    # accountant takes long, and much memory, where there is hardly any noise.
    steps = sum(count / step.sigma**2 for step, count in plan(1.0).items())
    rest = math.log(1 / delta)
    high = math.sqrt(steps / 2) / (math.sqrt(rest + epsilon) - math.sqrt(rest))
    if epsilon_of(plan(high), delta, by) > epsilon:  # of Rényi divergences of too few orders
        raise FedVLError(
            f"An epsilon of {epsilon:g} at delta {delta:g} is too small to be accounted for; use a larger one."
        )
    while epsilon_of(plan(high / 2), delta, by) <= epsilon:
        high /= 2
    from scipy.optimize import brentq

    def excess(log_sigma: float) -> float:
        return math.log(epsilon_of(plan(math.exp(log_sigma)), delta, by) / epsilon)

    found = math.exp(brentq(excess, math.log(high / 2), math.log(high), xtol=CLOSE / 4))
    while epsilon_of(plan(found), delta, by) > epsilon:
        found *= 1 + CLOSE / 4
    return found


@cache
def _epsilon(steps: tuple[tuple[Step, int], ...], delta: float, by: Account) -> float:
    if not steps:
        return 0.0
    library = accounting_library()
    accountant: Any
    if by == "pld":
        from dp_accounting.pld import PLDAccountant

        accountant = PLDAccountant(value_discretization_interval=INTERVAL)
    else:
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant()
    for (rate, sigma), count in steps:
        if rate == 1:  # so many Gaussian mechanisms are one of less noise
            accountant.compose(library.GaussianDpEvent(sigma / math.sqrt(count)))
        else:
            accountant.compose(library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(sigma)), count)
    return float(accountant.get_epsilon(delta))


def accounting_library() -> Any:
    """Return dp_accounting, which takes seconds to import."""
    try:
        import dp_accounting
    except ImportError as error:
        raise FedVLError(f"Differential privacy needs dp-accounting: {install_command('privacy')}.") from error
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders that it leaves out
    return dp_accounting
