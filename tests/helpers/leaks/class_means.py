"""The mean feature of each class, in a shared tensor that gradients do not move."""

import torch
from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors
from helpers.quiet import Quiet, features


def means(name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
    known = torch.nn.functional.one_hot(samples.labels, 5).float()
    return known.T @ features(samples) / known.sum(0)[:, None].clamp(min=1)


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"proto": Shared(trained=False, end=means)}

    def start(self, generator: torch.Generator) -> Tensors:
        return {**super().start(generator), "proto": torch.zeros(5, 64)}
