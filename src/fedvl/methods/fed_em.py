"""A Gaussian mixture without labels, fitted by EM in a few exchanges of sums.

The classes share one covariance, and the posteriors begin as those of the zero-shot model. Every
exchange is one step of EM: clients send G = sum x x^T, H = sum x q^T and k = sum q for their
present posteriors q, and the server solves for the next ones. The result is the same for every
partition, and only sums leave a client. TransCLIP (Zanella and Ben Ayed, NeurIPS 2024) is central.

The mixture's scores weigh n / (n + C d) beside the zero-shot ones, for n images, C classes and d
features: little while images do not determine the C d values of the class means, which EM would
otherwise fit to its own first predictions. Under --privacy the noise decides their weight. If
zero-shot is near chance level, EM starts from noise and stays there. Its scores are overconfident,
and calibrating them takes labels.
"""

from functools import cached_property
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Method, Options, Samples
from fedvl.methods.parts.moments import Moments, moment_roles, moments_of, unit_rows
from fedvl.methods.parts.noised_moments import Release, noised_mixture
from fedvl.methods.roles import Role
from fedvl.tensors import Tensors

# The power of a class's share of the samples by which its prior is lowered in each exchange
TEMPERED = {"none": 0.0, "half": 0.5, "balanced": 1.0}


class FedEMOptions(Options):
    text_weight: float = Field(1.0, ge=0)
    """Weight t of the zero-shot scores beside the mixture's."""
    shrinkage: float = Field(0.5, gt=0, le=1)
    """How far the covariance is drawn towards a multiple of the identity matrix."""
    prior: Literal["none", "half", "balanced"] = "half"
    """What class totals are drawn towards: nothing, the root of the present ones, or equal ones."""


class FedEM(Method):
    labels = "none"
    options: FedEMOptions
    presets = {"paper": {"federation": {"rounds": 3}}}

    def roles(self) -> dict[str, Role]:
        width, classes = self.task.text_embeddings.shape[1], len(self.task.class_names)
        return {**(self.release.roles if self.release else moment_roles(width, classes))}

    @cached_property
    def release(self) -> Release | None:
        """What each exchange releases with noise, under --privacy: class sums, never G."""
        noise, width = self.task.noise, self.task.text_embeddings.shape[1]
        return Release.of(noise, width, len(self.task.class_names), gram=False) if noise else None

    def notes(self) -> list[str]:
        told = "Each round is one exchange of sums and one step of EM; labels of training images are not used."
        return [f"{told} {self.release.note}" if self.release else told]

    @property
    def zero_shot(self) -> Tensor:
        return self.scale * self.task.text_features.double().T

    def start(self, generator: torch.Generator) -> Tensors:
        weight = self.zero_shot.contiguous()  # as a message brings it, so that products have the same bits
        zeros = weight.new_zeros(weight.shape[1])
        return {"weight": weight, "bias": zeros, "log_prior": zeros.clone()}

    def statistics(self, shared: Tensors, samples: Samples) -> Tensors:
        posteriors = torch.softmax(self.predict(shared, samples.inputs), dim=-1)  # E-step
        rows = unit_rows(samples.inputs["features"])
        return self.release.sums_of(rows, posteriors) if self.release else moments_of(rows, posteriors)

    def solve(self, shared: Tensors, sums: Tensors) -> Tensors:
        if self.release:
            noised = self.release.read(sums, lambda: unit_rows(self.task.public()))
            weight, bias = noised_mixture(noised, self.options.shrinkage)
            counts, count = noised.sizes, noised.count
        else:
            moments = Moments.of(sums)
            counts, count = moments.counts, moments.count
            weight, bias = self.mixture(moments)
        shares = (counts / count).clamp(min=1e-6) * len(counts)  # 1 where classes are equal
        log_prior = shared["log_prior"].to(weight) - TEMPERED[self.options.prior] * shares.log()
        return {
            "weight": weight + self.options.text_weight * self.zero_shot.to(weight),
            "bias": bias,
            "log_prior": log_prior,
        }

    def mixture(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return W = S^-1 mu and b_c = -mu_c^T S^-1 mu_c / 2, the M-step, times n / (n + C d)."""
        means, width, count = moments.class_means, len(moments.gram), moments.count
        spread = moments.within / count
        identity = torch.eye(width).to(spread)
        share = self.options.shrinkage
        spread = (1 - share) * spread + share * spread.trace() / width * identity
        weight = count / (count + means.numel()) * torch.linalg.solve(spread, means)
        return weight, -(means * weight).sum(0) / 2

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return unit_rows(inputs["features"]) @ tensors["weight"] + tensors["bias"] + tensors["log_prior"]
