"""Regression from sums with Gaussian noise: which sums are released, and what follows from them.

Either G and H, or the class sums H alone, which take less noise; the covariance of public images
then stands for G. The choice depends on public numbers only. Class sizes are not released: classes
are taken as equally frequent. The number of samples n is part of the mechanism, with a weight that
takes 3 % more noise.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fedvl.methods.base import SumNoise
from fedvl.methods.parts.moments import moments_of, unpacked
from fedvl.methods.parts.regression import LIKELY, Fit
from fedvl.methods.roles import Statistic
from fedvl.tensors import Tensors

Plan = Literal["G and H", "class sums"]

COUNT = 0.25  # what a sample adds to the released count
ENOUGH = 0.25  # images for each unit of noise in an entry of G, as a share of d^1.5


def plan_of(noise: SumNoise, width: int) -> Plan:
    """Choose what is released: noise on G, of norm s sqrt(d), must not hide eigenvalues n / d."""
    unit = noise.multiplier * (noise.clip or 1.0)
    return "G and H" if noise.images >= ENOUGH * unit * width**1.5 else "class sums"


def noised_roles(noise: SumNoise, width: int, classes: int) -> dict[str, Statistic]:
    """Return what a client sends, of unit vectors."""
    gram = {"gram": Statistic((width * (width + 1) // 2,), norm=1.0, noised=True)}
    return {
        **(gram if plan_of(noise, width) == "G and H" else {}),
        "cross": Statistic((width, classes), norm=1.0, noised=True),
        "count": Statistic((1,), norm=COUNT, noised=True),
    }


def noised_moments_of(noise: SumNoise, rows: Tensor, weights: Tensor) -> Tensors:
    """Return the sums of samples, before the noise."""
    found = moments_of(rows, weights)
    found["count"] = COUNT * found.pop("counts").sum().reshape(1)
    return {name: found[name] for name in noised_roles(noise, *found["cross"].shape)}


def noised_fit(
    noise: SumNoise, sums: Tensors, initial: Tensor, public: Callable[[], Tensor], regularisation: float | None
) -> Fit:
    """Return W = (Gc + a 1)^-1 (Hc + a W_0) and b = 1 / C - W^T mean, with a = s sqrt(d).

    s is the deviation of the noise. AdaSSP (Wang, 2018) has this a for noise on G and H;
    eigenvalues of a noised G below 0 are set to 0. ``public`` are rows of public images.
    """
    width, classes = sums["cross"].shape
    deviation = noise.deviation(role.norm or 0.0 for role in noised_roles(noise, width, classes).values())
    count = (sums["count"] / COUNT).clamp(min=max(deviation / COUNT, 1.0))
    mean = sums["cross"].sum(1) / count
    cross = sums["cross"] - sums["cross"].mean(1, keepdim=True)  # H - mean k^T of equal classes
    if "gram" in sums:
        gram = unpacked(sums["gram"], width) - count * torch.outer(mean, mean)
    else:
        gram = count * torch.cov(public().T, correction=0).to(cross)
    initial = initial - initial.mean(1, keepdim=True)
    a = regularisation or max(deviation * math.sqrt(width), LIKELY)
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    weight = vectors @ ((vectors.T @ (cross + a * initial)) / (values + a)[:, None])
    found = Fit(weight, 1 / classes - mean @ weight, a, 1.0, 1.0)
    if "gram" not in sums:  # W is near P (mu_c - mean) / C, P a public precision: softmax(C scores) as in a GDA
        return found._replace(variance=found.scale / classes)
    excess = deviation**2 * (classes - 1) * (1 / (values + a)).sum()  # of W^T H, by noise that both have
    along = ((weight * cross).sum() - excess).clamp(min=0)
    across = (values[:, None] * (vectors.T @ weight).square()).sum()
    stretch = float((along / across.clamp(min=1e-12)).clamp(min=1e-3))  # a shrinks W: labels are nearest to stretch * W
    residual = count * (1 - 1 / classes) - stretch * along
    variance = float(residual / (count * max(classes - 1, 1)))
    return found._replace(variance=min(max(variance, 1e-3), 1 / classes) / stretch)
