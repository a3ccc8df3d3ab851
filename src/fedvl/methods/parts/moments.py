"""Second moments of features and labels: sums over samples, and what follows from them.

G = sum x x^T, H = sum x y^T and k = sum y, over samples x with a row y of class weights. G is
symmetric and sent as its upper triangle, with sqrt(2) times what is off the diagonal, so that the
norm of what is sent is the Frobenius norm of G. A unit vector adds a norm of 1 to each.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedvl.methods.roles import Statistic
from fedvl.tensors import Tensors


def packed(gram: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix as a vector of the same norm."""
    row, column = torch.triu_indices(*gram.shape, device=gram.device)
    values = gram[row, column]
    return torch.where(row == column, values, math.sqrt(2) * values)


def unpacked(vector: Tensor, width: int) -> Tensor:
    """Return the symmetric matrix of an upper triangle."""
    row, column = torch.triu_indices(width, width, device=vector.device)
    upper = vector.new_zeros(width, width)
    upper[row, column] = torch.where(row == column, vector / 2, vector / math.sqrt(2))
    return upper + upper.T


def unit_rows(features: Tensor) -> Tensor:
    """Return features as unit vectors in float64, whose norm no rounding takes above 1."""
    return normalize(features.double(), dim=-1)


def indicators(labels: Tensor, classes: int) -> Tensor:
    """Return one-hot rows in float64; a row of zeros for a sample without a label (-1)."""
    return one_hot(labels + 1, classes + 1)[:, 1:].double()


def moment_roles(width: int, classes: int) -> dict[str, Statistic]:
    """Return what a client sends, of unit vectors."""
    return {
        "gram": Statistic((width * (width + 1) // 2,), norm=1.0),
        "cross": Statistic((width, classes), norm=1.0),
        "counts": Statistic((classes,), norm=1.0),
    }


def moments_of(rows: Tensor, weights: Tensor) -> Tensors:
    """Return the sums of samples with these class weights; one without any weight is left out."""
    used = rows.double() * weights.sum(1, keepdim=True).sqrt()
    return {"gram": packed(used.T @ used), "cross": rows.double().T @ weights, "counts": weights.sum(0)}


@dataclass(frozen=True)
class Moments:
    """The sums of all clients."""

    gram: Tensor  # G, d x d
    cross: Tensor  # H, d x C
    counts: Tensor  # k, C

    @classmethod
    def of(cls, sums: Tensors) -> "Moments":
        return cls(unpacked(sums["gram"], len(sums["cross"])), sums["cross"], sums["counts"])

    @cached_property
    def count(self) -> Tensor:
        """The number of samples, n."""
        return self.counts.sum()

    @cached_property
    def mean(self) -> Tensor:
        return self.cross.sum(1) / self.count

    @cached_property
    def centred_gram(self) -> Tensor:
        """G - n mean mean^T."""
        return self.gram - self.count * torch.outer(self.mean, self.mean)

    @cached_property
    def centred_cross(self) -> Tensor:
        """H - mean k^T."""
        return self.cross - torch.outer(self.mean, self.counts)

    @cached_property
    def class_means(self) -> Tensor:
        """H_c / k_c, d x C; the mean of all where a class has no sample."""
        there = self.counts > 0
        return torch.where(there, self.cross / self.counts.clamp(min=1e-12), self.mean[:, None])

    @cached_property
    def within(self) -> Tensor:
        """The sum of squares about class means, G - sum of k_c mu_c mu_c^T."""
        return self.gram - (self.class_means * self.counts) @ self.class_means.T
