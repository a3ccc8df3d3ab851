"""Sums with Gaussian noise: which are released, and what follows from them.

Either G and H, or the class sums H alone, which take less noise; the covariance of public images
then stands for G. Beside them the number of samples n is released, or the class sizes k, with a
weight that takes 3 % more noise. The choice depends on public numbers only. Where sizes are not
released, classes are taken as equally frequent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedvl.methods.base import SumNoise
from fedvl.methods.parts.moments import moments_of, unpacked
from fedvl.methods.parts.regression import LIKELY, Fit
from fedvl.methods.roles import Statistic
from fedvl.tensors import Tensors

COUNT = 0.25  # what a sample adds to the released count, or to the size of its class
ENOUGH = 0.25  # images for each unit of noise in an entry of G, as a share of d^1.5
CLEAR = 3.0  # images of a class on average for each unit of noise in its size


@dataclass(frozen=True)
class Release:
    """What is released of unit vectors and class weights; use :meth:`of`."""

    noise: SumNoise
    width: int
    classes: int
    gram: bool  # G, beside H
    sizes: bool  # k in place of n

    @classmethod
    def of(cls, noise: SumNoise, width: int, classes: int, *, gram: bool = True, sizes: bool = True) -> "Release":
        """Choose by public numbers what is released, of what the method can use.

        Noise on G, of norm s sqrt(d), must not hide eigenvalues n / d; noise on class sizes must be
        small beside n / C.
        """
        unit = noise.multiplier * (noise.clip or 1.0)
        with_gram = gram and noise.images >= ENOUGH * unit * width**1.5
        found = cls(noise, width, classes, with_gram, False)
        clear = noise.images >= CLEAR * classes * found.deviation / COUNT
        return cls(noise, width, classes, with_gram, sizes and clear)

    @property
    def roles(self) -> dict[str, Statistic]:
        """Return what a client sends."""
        gram = {"gram": Statistic((self.width * (self.width + 1) // 2,), norm=1.0, noised=True)}
        count = {"counts": (self.classes,)} if self.sizes else {"count": (1,)}
        return {
            **(gram if self.gram else {}),
            "cross": Statistic((self.width, self.classes), norm=1.0, noised=True),
            **{name: Statistic(shape, norm=COUNT, noised=True) for name, shape in count.items()},
        }

    @cached_property
    def deviation(self) -> float:
        """The deviation s of the noise on each sum over all clients."""
        return self.noise.deviation(role.norm or 0.0 for role in self.roles.values())

    @property
    def note(self) -> str:
        """Say what is released, and why."""
        sums = "G and H" if self.gram else "class sums"
        sizes = "the class sizes" if self.sizes else "the number of images"
        by = "G" if self.gram else "the covariance of public images"
        frequent = "" if self.sizes else "; classes are taken as equally frequent"
        return (
            f"Released with noise: {sums}, and {sizes}; chosen by public numbers ({self.noise.images} images, {self.width} "
            f"dimensions, the noise multiplier). Whitened by {by}{frequent}."
        )

    def sums_of(self, rows: Tensor, weights: Tensor) -> Tensors:
        """Return the sums of samples, before the noise."""
        found = moments_of(rows, weights)
        found["counts"] = COUNT * found["counts"]
        found["count"] = found["counts"].sum().reshape(1)
        return {name: found[name] for name in self.roles}

    def read(self, sums: Tensors, public: Callable[[], Tensor]) -> "Noised":
        """Return what follows from sums with noise; ``public`` are rows of public images."""
        cross = sums["cross"]
        released = sums["counts"].sum() if self.sizes else sums["count"]
        count = (released / COUNT).clamp(min=max(self.deviation / COUNT, 1.0))
        sizes = self._shrunk(sums["counts"] / COUNT, count) if self.sizes else None
        mean = cross.sum(1) / count
        if self.gram:
            gram = unpacked(sums["gram"], self.width) - count * torch.outer(mean, mean)
        else:
            gram = count * torch.cov(public().T, correction=0).to(cross)
        values, vectors = torch.linalg.eigh(gram)
        # without sizes H - mean k^T of equal classes
        centred = cross - (cross.mean(1, keepdim=True) if sizes is None else torch.outer(mean, sizes))
        return Noised(self.deviation, count, sizes, mean, centred, values.clamp(min=0), vectors, not self.gram)

    def _shrunk(self, sizes: Tensor, count: Tensor) -> Tensor:
        """Draw class sizes to their mean, by as much of their spread as noise explains."""
        apart = sizes - sizes.mean()
        explained = (self.deviation / COUNT) ** 2 * (self.classes - 1) / apart.square().sum().clamp(min=1e-12)
        return (count / self.classes + (1 - explained).clamp(min=0) * apart).clamp(min=1.0)


@dataclass(frozen=True)
class Noised:
    """Moments of all samples, as far as noise lets see them."""

    deviation: float  # s, of the noise on an entry
    count: Tensor  # n
    released_sizes: Tensor | None
    mean: Tensor
    cross: Tensor  # H - mean k^T
    values: Tensor  # eigenvalues of the centred G, none below 0
    vectors: Tensor
    public: bool  # whether they are of public images

    @property
    def sizes(self) -> Tensor:
        """Class sizes, k; equal ones where they were not released."""
        classes = self.cross.shape[1]
        equal = (self.count / classes).expand(classes)
        return equal if self.released_sizes is None else self.released_sizes

    @property
    def spread(self) -> float:
        """The norm of the noise on a class sum, s sqrt(d)."""
        return self.deviation * math.sqrt(len(self.mean))

    @property
    def penalty(self) -> float:
        """The a of AdaSSP (Wang, 2018)."""
        return max(self.spread, LIKELY)

    def solved(self, right: Tensor, values: Tensor) -> Tensor:
        """Return Q diag(1 / values) Q^T right."""
        return self.vectors @ ((self.vectors.T @ right) / values[:, None])

    def squares(self, weight: Tensor, values: Tensor) -> Tensor:
        """Return w^T Q diag(values) Q^T w of each class."""
        return (values[:, None] * (self.vectors.T @ weight).square()).sum(0)


def noised_fit(noised: Noised, initial: Tensor, regularisation: float | None) -> Fit:
    """Return W = (Gc + a 1)^-1 (Hc + a W_0) and b = 1 / C - W^T mean, with a = s sqrt(d)."""
    classes, cross, values = noised.cross.shape[1], noised.cross, noised.values
    initial = initial - initial.mean(1, keepdim=True)
    a = regularisation or noised.penalty
    weight = noised.solved(cross + a * initial, values + a)
    found = Fit(weight, 1 / classes - noised.mean @ weight, a, 1.0, 1.0)
    if noised.public:  # W is near P (mu_c - mean) / C, P a public precision: softmax(C scores) as in a GDA
        return found._replace(variance=found.scale / classes)
    excess = noised.deviation**2 * (classes - 1) * (1 / (values + a)).sum()  # of W^T H, by noise that both have
    along = ((weight * cross).sum() - excess).clamp(min=0)
    across = noised.squares(weight, values).sum()
    stretch = float((along / across.clamp(min=1e-12)).clamp(min=1e-3))  # a shrinks W: labels are nearest to stretch * W
    residual = noised.count * (1 - 1 / classes) - stretch * along
    variance = float(residual / (noised.count * max(classes - 1, 1)))
    return found._replace(variance=min(max(variance, 1e-3), 1 / classes) / stretch)


def noised_gaussian(noised: Noised, initial: Tensor, penalty: float, weight: float) -> tuple[Tensor, Tensor]:
    """Return W = P mu and b_c = -mu^T W - w_c^T S w_c / 2 of Gaussian classes, given noisy sums.

    Means are drawn to the texts by as much as there is noise, mu_c = (Hc + a W_0) / (k_c + a / C),
    and P is the inverse of S + a / n. S is the covariance of all samples, since to subtract that of
    noisy class means would leave less than there is within classes.
    """
    initial = initial - initial.mean(1, keepdim=True)
    a, count = penalty * noised.penalty, noised.count
    means = (noised.cross + weight * a * initial) / (noised.sizes + a / len(noised.sizes))
    found = count * noised.solved(means, noised.values + a)
    return found, -(noised.mean @ found) - noised.squares(found, noised.values) / count / 2


def noised_mixture(noised: Noised, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Return W = P (mu - mean) and its b_c of a mixture, given noisy sums of posteriors.

    The spread that noise explains is taken from W: where noise is all, 0 is left.
    """
    classes, values, count = noised.cross.shape[1], noised.values, noised.count
    means = noised.cross / (noised.sizes + noised.spread / classes)
    explained = noised.spread**2 * (classes - 1) / noised.cross.square().sum().clamp(min=1e-12)
    spread = (1 - shrinkage) * values + shrinkage * values.mean()
    found = count * (1 - explained).clamp(min=0) * noised.solved(means, spread + noised.spread)
    return found, -(noised.mean @ found) - noised.squares(found, spread) / count / 2
