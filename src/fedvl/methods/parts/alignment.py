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
    left_mask, right_mask = left_mask.to(left.dtype), torch.ones_like(right[:, 0])
    kernel = kernels(torch.cat([left, right]), torch.cat([left_mask, right_mask]))
    # Each row of the left counts 1/n, each of the right -1/m: the three means are one quadratic form.
    sign = torch.cat([left_mask / left_mask.sum().clamp(min=1), -right_mask / len(right)])
    return sign @ kernel @ sign


def class_discrepancy(
    left: Tensor,
    right: Tensor,
    left_classes: Tensor,
    right_classes: Tensor,
    left_mask: Tensor,
    counted: Tensor | None = None,
) -> Tensor:
    """Return LMMD (Zhu et al., 2021): the mean over classes of the left of MK-MMD within a class.

    Rows x classes say how far a row belongs to each class, such as one-hot labels or a softmax.
    ``counted`` is 0 for the classes to leave out.
    """
    left_mask = left_mask.to(left.dtype)
    kernel = kernels(torch.cat([left, right]), torch.cat([left_mask, torch.ones_like(right[:, 0])]))
    left_classes = left_classes * left_mask[:, None]
    present = (left_classes.sum(0) > 0).to(left.dtype)
    present = present if counted is None else present * counted
    shares = [classes / classes.sum(0).clamp(min=1e-12) for classes in (left_classes, right_classes)]
    signs = torch.cat([shares[0], -shares[1]]) * present  # a column for each class
    return (signs * (kernel @ signs)).sum() / present.sum().clamp(min=1)


def kernels(rows: Tensor, mask: Tensor) -> Tensor:
    """Return the summed kernels of all pairs of rows, as wide as real rows lie apart."""
    distances = (rows[:, None] - rows[None]).pow(2).sum(-1)
    pairs = mask[:, None] * mask[None]
    count = mask.sum()
    mean = ((distances * pairs).sum() / (count * (count - 1)).clamp(min=1)).detach().clamp(min=1e-12)
    widths = [mean * FACTOR ** (power - KERNELS // 2) for power in range(KERNELS)]
    return torch.stack([torch.exp(-distances / width) for width in widths]).sum(0)


def reverse_gradient(x: Tensor, strength: Tensor) -> Tensor:
    """Return x with a gradient of -strength (Ganin and Lempitsky, 2015)."""
    still = x.detach()
    return still - strength * (x - still)


def domain_loss(left_scores: Tensor, right_scores: Tensor, left_mask: Tensor) -> Tensor:
    """Return the logistic loss of left (score < 0) against right (> 0), equally weighted."""
    return (masked_mean(softplus(left_scores), left_mask) + softplus(-right_scores).mean()) / 2
