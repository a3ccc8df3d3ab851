"""The lower bound of epsilon from one run with canaries (Steinke, Nasr and Jagielski, 2023).

"Privacy auditing with one (1) training run": each of m canaries is included by a fair coin. The
auditor guesses some of the coins from the output and abstains from the rest. If the mechanism is
(epsilon, delta)-private, it seldom guesses many right.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvl.evaluation.statistics import Numbers

CONFIDENCE = 0.95
GUESSED_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the canaries, for which coins are guessed; the best counts, at a price
MAX_EPSILON = 50.0  # epsilon beyond which no bound is sought


class Bound(NamedTuple):
    """A lower bound of epsilon, and the guesses that it follows from."""

    epsilon: float
    canaries: int
    guesses: int
    right: int


def guesses_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return how likely so many guesses are right at most, if the mechanism is private.

    By theorem 5.2 of the paper, f(v) + 2 m delta max_i (f(v - i) - f(v)) / i, where f(v) is the
    chance that v or more guesses are right if each is with e^epsilon / (e^epsilon + 1).
    """
    from scipy.special import bdtrc

    chance = 1 / (1 + math.exp(-epsilon))
    above = np.concatenate([[1.0], bdtrc(np.arange(right), guesses, chance)])
    steps = np.arange(1, right + 1)
    slack = float(((above[right - steps] - above[right]) / steps).max()) if right else 0.0
    return min(float(above[right]) + 2 * canaries * delta * slack, 1.0)


def epsilon_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return the largest epsilon that so many right guesses refute; 0 if none."""
    allowed = 1 - confidence
    if guesses_p_value(canaries, guesses, right, 0.0, delta) >= allowed:
        return 0.0
    low, high = 0.0, MAX_EPSILON
    for _ in range(40):
        middle = (low + high) / 2
        if guesses_p_value(canaries, guesses, right, middle, delta) < allowed:
            low = middle
        else:
            high = middle
    return low


def audit_guesses(scores: Numbers, included: NDArray[np.bool_], delta: float, confidence: float = CONFIDENCE) -> Bound:
    """Return the best bound of several numbers of guesses, each at a higher confidence in return.

    The canaries of the largest scores are taken as included, those of the smallest as left out.
    """
    count, order = len(scores), np.argsort(-scores, kind="stable")
    each = 1 - (1 - confidence) / len(GUESSED_SHARES)
    best = Bound(0.0, count, 0, 0)
    for share in GUESSED_SHARES:
        half = max(1, round(share * count / 2)) if count > 1 else 0
        right = int(included[order[:half]].sum() + (~included[order[count - half :]]).sum())
        found = Bound(epsilon_bound(count, 2 * half, right, delta, each), count, 2 * half, right)
        best = max(best, found, key=lambda bound: (bound.epsilon, bound.guesses))
    return best
