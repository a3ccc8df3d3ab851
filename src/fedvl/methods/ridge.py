"""Ridge regression in one exchange of sums: the same for every partition, and removable.

Every client sends G = sum x x^T, H = sum x y^T and k = sum y of its images, once. The server adds
them up and solves in float64, around the class texts or 0. Fed3R (Fani et al., 2024) and AFL (He et
al., 2025) are of this kind; the text prior and its evidence are added here.

With --protocol personal each client then solves around the shared W with its own sums, which stay
with it: W_i = (G_i + a)^-1 (H_i + a s W).
"""

import math
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedvl.methods.base import Method, Options, Samples
from fedvl.methods.parts.moments import Moments, indicators, moment_roles, moments_of, unit_rows
from fedvl.methods.parts.noised_moments import Release, noised_fit
from fedvl.methods.parts.regression import Regression
from fedvl.methods.roles import Private, Role
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors


class RidgeOptions(Options):
    prior: Literal["text", "zeros"] = "text"
    """What the weights are drawn towards: a likely multiple of the class texts, or zeros."""
    regularisation: Literal["evidence", "gcv"] | PositiveFloat = "evidence"
    """Factor of the penalty: the likeliest, the best by cross-validation (GCV), or a value."""
    dimensions: int = Field(0, ge=0, le=65536)
    """Random features beside the vectors, for classes that are not linear in them."""
    bandwidth: float = Field(1.0, gt=0)
    """Width of the Gaussian kernel that random features stand for."""


class Ridge(Method):
    options: RidgeOptions
    exchanges = 1

    def roles(self) -> dict[str, Role]:
        sums = self.release.roles if self.release else moment_roles(self.width, len(self.task.class_names))
        return {**sums, **({"own": Private(end=self.around)} if self.task.protocol == "personal" else {})}

    @cached_property
    def release(self) -> Release | None:
        """What is released with noise, under --privacy."""
        noise = self.task.noise
        return Release.of(noise, self.width, len(self.task.class_names), sizes=False) if noise else None

    @property
    def width(self) -> int:
        return self.task.text_embeddings.shape[1] + self.options.dimensions

    def notes(self) -> list[str]:
        told = "Solved in one exchange of sums with every client; federation.rounds does not apply."
        if self.task.protocol == "personal":
            told += " Each client then solved around it with its own sums, which stayed with it."
        return [f"{told} {self.release.note}" if self.release else told]

    def lift(self, features: Tensor) -> Tensor:
        """Return unit vectors: of the features, and cos(w x + u) beside them."""
        rows = unit_rows(features)
        count = self.options.dimensions
        if not count:
            return rows
        generator = torch_generator(self.task.seed, "random features")
        waves = torch.randn(rows.shape[1], count, generator=generator, dtype=torch.float64)
        phases = 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
        further = torch.cos(rows @ waves.to(rows) / self.options.bandwidth + phases.to(rows))
        return unit_rows(torch.cat([rows, further * math.sqrt(2 / count)], 1))

    def initial(self) -> Tensor:
        """Return W_0: the texts as columns, or 0."""
        texts = self.task.text_embeddings.double()
        start = texts.new_zeros(self.width, len(texts))
        if self.options.prior == "text":
            start[: texts.shape[1]] = self.task.text_features.double().T
        return start

    def start(self, generator: torch.Generator) -> Tensors:
        weight = self.initial()
        return {"weight": weight, "bias": weight.new_zeros(weight.shape[1]), "scale": weight.new_tensor(self.scale)}

    def statistics(self, shared: Tensors, samples: Samples) -> Tensors:
        labels = indicators(samples.labels, len(self.task.class_names))
        rows = self.lift(samples.inputs["features"])
        return self.release.sums_of(rows, labels) if self.release else moments_of(rows, labels)

    def solve(self, shared: Tensors, sums: Tensors) -> Tensors:
        # W = (G + a 1)^-1 (H + a s W_0), b = k / n - W^T mean, G and H centred
        initial, by = self.initial().to(sums["cross"]), self.options.regularisation
        if self.release:
            noised = self.release.read(sums, lambda: self.lift(self.task.public()))
            found = noised_fit(noised, initial, None if isinstance(by, str) else by)
        else:
            found = Regression.of(Moments.of(sums), initial).best(by)
        return {"weight": found.weight, "bias": found.bias, "scale": initial.new_tensor(found.scale)}

    def around(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return a client's own solution around the shared one, the bias as its last row."""
        sums = moments_of(self.lift(samples.inputs["features"]), indicators(samples.labels, len(self.task.class_names)))
        found = Regression.of(Moments.of(sums), tensors["weight"]).best(self.options.regularisation)
        return found.scale * torch.cat([found.weight, found.bias[None]])

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        rows = self.lift(inputs["features"])
        if "own" in tensors:
            return rows @ tensors["own"][:-1] + tensors["own"][-1]
        return tensors["scale"] * (rows @ tensors["weight"] + tensors["bias"])
