"""What an attack finds: a figure with its interval and guess level, and a sentence about it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvl.seeding import numpy_generator

SERVER, CLIENT, USER = "the server", "another client", "a user who queries"
VIEWS = (SERVER, CLIENT, USER)
Numbers = NDArray[np.float64]
Interval = tuple[float, float]
RESAMPLES = 500
LIKELY = 0.95  # coverage of the intervals


@dataclass(frozen=True)
class Finding:
    """One measured figure; larger always means that more leaks."""

    name: str  # as in --fail-above
    view: str
    measure: str
    value: float
    interval: Interval
    guess: float  # what somebody reaches who sees nothing
    sentence: str
    unit: str = ""

    @property
    def leaks(self) -> bool:
        """Whether guessing does not explain the figure."""
        return self.interval[0] > self.guess

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "interval": list(self.interval), "leaks": self.leaks}


@dataclass(frozen=True)
class Unmeasured:
    """An attack that was not made from one view, with the reason."""

    name: str
    view: str
    sentence: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Outcome = Finding | Unmeasured


def bootstrap(measure: Callable[[np.random.Generator], float]) -> Interval:
    """Return the interval of a measure that draws its clients or images anew each time."""
    generator = numpy_generator(0, "bootstrap")
    low, high = np.quantile([measure(generator) for _ in range(RESAMPLES)], [(1 - LIKELY) / 2, (1 + LIKELY) / 2])
    return float(low), float(high)


def mean_of(values: Numbers) -> tuple[float, Interval]:
    """Return the mean over clients or images, and its interval."""
    return float(values.mean()), bootstrap(lambda generator: float(generator.choice(values, len(values)).mean()))


def correlation(left: Numbers, right: Numbers) -> float:
    """Return Pearson's r; 0 where one side is constant and so says nothing."""
    left, right = left - left.mean(), right - right.mean()
    size = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float(left @ right) / size if size > 1e-12 else 0.0


def of_100(share: float) -> str:
    """Return a share as so many of 100, rounded as its figure is."""
    return f"{100 * float(f'{share:.2f}'):.0f}"


def auc(inside: Numbers, outside: Numbers, weights: Numbers) -> float:
    """Return the chance that a record from inside scores above a weighted one from outside."""
    order = np.argsort(outside)
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    left, right = (np.searchsorted(outside[order], inside, side=side) for side in ("left", "right"))
    return float((below[left] + below[right]).mean() / (2 * below[-1]))


def hits_at(inside: Numbers, outside: Numbers, weights: Numbers, false_alarms: float) -> float:
    """Return the share of records found at a threshold that few outside pass (TPR at an FPR)."""
    order = np.argsort(-outside)
    passed = np.cumsum(weights[order]) / weights.sum()
    threshold = outside[order][np.searchsorted(passed, false_alarms)]
    return float((inside > threshold).mean())
