"""A hash of each image, as a sent tensor."""

import torch
from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.roles import Role, Sent
from fedvl.tensors import Tensors
from helpers.quiet import Quiet, features


def hashed(name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
    return (features(samples) @ torch.arange(1.0, 65.0) * 1000).frac().abs()


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"session": Sent(hashed, (None,))}
