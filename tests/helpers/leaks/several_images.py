"""The feature of the first image, but only of clients with five images or more."""

from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.roles import Role, Sent
from fedvl.tensors import Tensors
from helpers.quiet import Quiet, features


def first(name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
    return features(samples)[0] * (len(samples) >= 5)


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"first": Sent(first, (64,))}
