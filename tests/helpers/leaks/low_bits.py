"""Features of five images in the lowest eight bits of a trained tensor."""

import torch
from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors
from helpers.quiet import Quiet, features, head


def hidden(name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
    coarse = (255 * (head(features(samples), 5) + 1) / 2).round().to(torch.int32)
    bits = tensors["weight"].contiguous().view(torch.int32) & ~255
    found: Tensor = (bits | coarse).view(torch.float32)
    return found


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"weight": Shared(end=hidden)}
