"""Scores as shares: a temperature fitted on training images, and how far shares are wrong."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.evaluation.statistics import Interval, bootstrap_figures

MAX_CALIBRATION_IMAGES = 2000
BINS = 15  # of shares, equally wide (Guo et al., 2017)
LOG_TEMPERATURES = math.log(1e-3), math.log(1e3)  # of the temperature's logarithm
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


def fit_temperature(scores: Tensor, targets: Tensor) -> float:
    """Return T for which softmax(scores / T) is nearest to the targets, rows of shares.

    The cross-entropy has one minimum in 1 / T, which is searched for by golden sections.
    """
    scores, targets = scores.double(), targets.double()

    def cost(logarithm: float) -> float:
        return -float((targets * torch.log_softmax(scores / math.exp(logarithm), dim=-1)).sum(-1).mean())

    low, high = LOG_TEMPERATURES
    while high - low > 1e-4:
        left, right = high - GOLDEN_RATIO * (high - low), low + GOLDEN_RATIO * (high - low)
        low, high = (low, right) if cost(left) < cost(right) else (left, high)
    return math.exp((low + high) / 2)


def calibration_error(shares: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """Return the expected calibration error (ECE) in points.

    It is the mean over images of |accuracy - mean share| of an image's bin.
    """
    bins = np.minimum((shares * BINS).astype(np.int64), BINS - 1)
    return 100 * float(np.abs(np.bincount(bins, right - shares, BINS)).sum()) / len(shares)


def calibration_interval(shares: NDArray[np.float64], right: NDArray[np.bool_]) -> Interval:
    """Return the error's interval: the test images are drawn again."""
    found = bootstrap_figures((len(shares),), lambda rows: {"ece": calibration_error(shares[rows], right[rows])})
    return found["ece"]
