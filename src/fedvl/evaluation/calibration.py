"""A temperature that makes scores shares: fitted on training images, never on the test."""

import math

import torch
from torch import Tensor

MOST_IMAGES = 2000
RANGE = math.log(1e-3), math.log(1e3)  # of the temperature's logarithm
GOLDEN = (math.sqrt(5) - 1) / 2


def fit_temperature(scores: Tensor, targets: Tensor) -> float:
    """Return T for which softmax(scores / T) is nearest to the targets, rows of shares.

    The cross-entropy has one minimum in 1 / T, which is searched for by golden sections.
    """
    scores, targets = scores.double(), targets.double()

    def cost(logarithm: float) -> float:
        return -float((targets * torch.log_softmax(scores / math.exp(logarithm), dim=-1)).sum(-1).mean())

    low, high = RANGE
    while high - low > 1e-4:
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if cost(left) < cost(right) else (left, high)
    return math.exp((low + high) / 2)
