"""Distances between two sets of features, and gradient reversal."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fedvl.methods.parts.losses import masked_mean

KERNELS, FACTOR = 5, 2.0


def kernel_discrepancy(left: Tensor, right: Tensor, left_mask: Tensor) -> Tensor:
    """Return MK-MMD (Long et al., 2015) with 5 Gaussian kernels exp(-d^2 / b).

    b is 1/4, 1/2, 1, 2 and 4 times the mean squared distance between two different rows of both
    sets. Summed over kernels: mean k(left, left) + mean k(right, right) - 2 mean k(left, right).
    """
    rows = torch.cat([left, right])
    left_mask, right_mask = left_mask.to(left.dtype), torch.ones_like(right[:, 0])
    mask = torch.cat([left_mask, right_mask])
    distances = (rows[:, None] - rows[None]).pow(2).sum(-1)
    pairs = mask[:, None] * mask[None]
    count = mask.sum()
    mean = ((distances * pairs).sum() / (count * (count - 1)).clamp(min=1)).detach().clamp(min=1e-12)
    widths = [mean * FACTOR ** (power - KERNELS // 2) for power in range(KERNELS)]
    kernel = torch.stack([torch.exp(-distances / width) for width in widths]).sum(0)
    # Each row of the left counts 1/n, each of the right -1/m: the three means are one quadratic form.
    sign = torch.cat([left_mask / left_mask.sum().clamp(min=1), -right_mask / len(right)])
    return sign @ kernel @ sign


def reverse_gradient(x: Tensor, strength: Tensor) -> Tensor:
    """Return x with a gradient of -strength (Ganin and Lempitsky, 2015)."""
    still = x.detach()
    return still - strength * (x - still)


def domain_loss(left_scores: Tensor, right_scores: Tensor, left_mask: Tensor) -> Tensor:
    """Return the logistic loss of left (score < 0) against right (> 0), equally weighted."""
    return (masked_mean(softplus(left_scores), left_mask) + softplus(-right_scores).mean()) / 2
