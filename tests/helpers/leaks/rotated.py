"""The features in a random order and rotated, as a sent tensor."""

import torch
from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.roles import Role, Sent
from fedvl.tensors import Tensors
from helpers.quiet import Quiet, features


def disguised(name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
    rotation, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(7)))
    found: Tensor = features(samples)[torch.randperm(len(samples))] @ rotation
    return found


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"noise": Sent(disguised, (None, 64))}
