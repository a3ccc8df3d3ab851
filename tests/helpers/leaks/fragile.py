"""The features of all images, by code that fails for clients of fewer than three."""

from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.roles import Role, Sent
from fedvl.tensors import Tensors
from helpers.quiet import Quiet, features


def enough(name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
    if len(samples) < 3:
        raise ValueError("too few images")
    return features(samples)


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"gist": Sent(enough, (None, 64))}
