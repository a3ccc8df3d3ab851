"""Scores as shares: a temperature fitted on held-out images, and how far shares are wrong."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.evaluation.contents import ShareBin, SureAnswers
from fedvl.evaluation.statistics import Interval, bootstrap_figures

MAX_CALIBRATION_IMAGES = 2000
BINS = 15  # of shares, equally wide (Guo et al., 2017)
LOG_TEMPERATURES = math.log(1e-3), math.log(1e3)  # of the temperature's logarithm
SMALLEST_SHARE = 1e-30  # a share that rounding made 0
LEAST_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # below which an answer may be left to a person
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


def fit_held_out(labels: NDArray[np.int64], shares: NDArray[np.float64]) -> float:
    """Return the temperature for held-out images with labels, from their shares without one."""
    logs = torch.from_numpy(shares).clamp_min(SMALLEST_SHARE).log()
    return fit_temperature(logs, torch.nn.functional.one_hot(torch.from_numpy(labels), shares.shape[1]))


def share_bins(shares: NDArray[np.float64], right: NDArray[np.bool_]) -> list[ShareBin]:
    """Return the bins of the calibration error that have images, for a reliability diagram."""
    bins = np.minimum((shares * BINS).astype(np.int64), BINS - 1)
    return [
        ShareBin(share=100 * float(shares[own].mean()), right=100 * float(right[own].mean()), images=int(own.sum()))
        for own in (bins == number for number in range(BINS))
        if own.any()
    ]


def sure_answers(shares: NDArray[np.float64], right: NDArray[np.bool_], least: float | None) -> list[SureAnswers]:
    """Return how many answers are unsure below some shares, and how many others are right."""
    found = []
    for bound in sorted({*LEAST_SHARES, *([] if least is None else [least])}):
        sure = shares >= bound
        accuracy = 100 * float(right[sure].mean()) if sure.any() else None
        unsure = 100 * float((~sure).mean())
        found.append(SureAnswers(least=bound, unsure=unsure, images=int(sure.sum()), accuracy=accuracy))
    return found


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
