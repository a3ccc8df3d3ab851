"""Gaussian discriminant analysis in one exchange of sums, with the class texts beside it.

Wang et al. (ICLR 2024) fit classes of one covariance to the vectors of CLIP and add the zero-shot
scores. Means and covariance follow from G = sum x x^T, H = sum x y^T and k = sum y, so that clients
send these once, and the result is the same for every partition.

The paper chooses the weight of the texts on validation images. Here both kinds of scores are first
brought to the scale of shares, from the sums, and the texts weigh d / (d + n) by default: much
while n samples do not determine a covariance of d features, little afterwards. Under --privacy
class means are drawn to the texts by as much as there is noise.
"""

from functools import cached_property

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Method, Options, Samples
from fedvl.methods.parts.moments import Moments, indicators, moment_roles, moments_of, unit_rows
from fedvl.methods.parts.noised_moments import Release, noised_gaussian
from fedvl.methods.parts.regression import Regression
from fedvl.methods.roles import Role
from fedvl.tensors import Tensors

RIGID = 1e9  # a penalty that leaves of a regression its prior, the class texts


class GDAOptions(Options):
    shrinkage: float = Field(1.0, gt=0)
    """Weight r of the mean variance in the covariance; under --privacy, of the noise."""
    alpha: float | None = Field(None, ge=0)
    """Weight of the class texts; by default d / (d + n) for n samples of d features. Under
    --privacy a factor on their weight, which follows from the noise."""


class GDA(Method):
    options: GDAOptions
    exchanges = 1

    def roles(self) -> dict[str, Role]:
        width, classes = self.task.text_embeddings.shape[1], len(self.task.class_names)
        return {**(self.release.roles if self.release else moment_roles(width, classes))}

    @cached_property
    def release(self) -> Release | None:
        """What is released with noise, under --privacy."""
        noise, width = self.task.noise, self.task.text_embeddings.shape[1]
        return Release.of(noise, width, len(self.task.class_names)) if noise else None

    def notes(self) -> list[str]:
        told = "Solved in one exchange of sums with every client; federation.rounds does not apply."
        return [f"{told} {self.release.note}" if self.release else told]

    def start(self, generator: torch.Generator) -> Tensors:
        weight = torch.zeros_like(self.task.text_embeddings.T, dtype=torch.float64)
        if self.options.alpha != 0:
            weight = self.scale * self.task.text_features.double().T
        return {"weight": weight, "bias": weight.new_zeros(weight.shape[1])}

    def statistics(self, shared: Tensors, samples: Samples) -> Tensors:
        rows = unit_rows(samples.inputs["features"])
        labels = indicators(samples.labels, len(self.task.class_names))
        return self.release.sums_of(rows, labels) if self.release else moments_of(rows, labels)

    def solve(self, shared: Tensors, sums: Tensors) -> Tensors:
        alpha = self.options.alpha
        if self.release:
            noised = self.release.read(sums, lambda: unit_rows(self.task.public()))
            texts = self.task.text_features.to(noised.mean).T
            weight, bias = noised_gaussian(noised, texts, self.options.shrinkage, 1.0 if alpha is None else alpha)
            return {"weight": weight, "bias": bias}
        moments = Moments.of(sums)
        weight, bias = self.gaussian(moments)
        width = len(weight)
        if alpha is None:
            alpha = float(width / (width + moments.count))
        if alpha > 0:
            rigid = Regression.of(moments, self.task.text_features.to(weight).T).solution(RIGID)
            weight = weight + alpha * rigid.scale * rigid.weight
        return {"weight": weight, "bias": bias}

    def gaussian(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return W = P mu and b_c = -mu_c^T P mu_c / 2, on the scale of shares."""
        means, width = moments.class_means, len(moments.gram)
        identity = torch.eye(width).to(means)
        penalty = self.penalty(moments)  # tr(S) r
        weight = torch.linalg.solve(
            moments.within + penalty * identity, width * means
        )  # P = d ((n - C) S + tr(S) r)^-1
        bias = -(means * weight).sum(0) / 2
        # P belongs to no density of the samples. Ridge with the same penalty has shares; the factor on W is the one
        # that brings its scores nearest to those.
        ridge = Regression.of(moments, torch.zeros_like(weight)).solution(float(penalty))
        centred = weight - weight.mean(1, keepdim=True)
        length = (centred * (moments.centred_gram @ centred)).sum().clamp(min=1e-12)
        factor = ridge.scale * (centred * (moments.centred_gram @ ridge.weight)).sum() / length
        return factor * weight, factor * bias

    def penalty(self, moments: Moments) -> Tensor:
        """Return r tr(S); with no two samples of a class S is about the mean of all."""
        freedom = (moments.counts - 1).clamp(min=0).sum()  # n - C
        among = freedom < 1
        spread = torch.where(among, moments.centred_gram.trace(), moments.within.trace())
        return (self.options.shrinkage * spread / torch.where(among, moments.count - 1, freedom).clamp(min=1)).clamp(
            min=1e-9
        )

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return unit_rows(inputs["features"]) @ tensors["weight"] + tensors["bias"]
