"""Features of five images, a millionth of their size, added to a trained tensor."""

from torch import Tensor

from fedvl.methods.base import Samples
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors
from helpers.quiet import Quiet, features, head


def hidden(name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
    return tensors["weight"] + 1e-6 * head(features(samples), 5)


class Leak(Quiet):
    def roles(self) -> dict[str, Role]:
        return {"weight": Shared(end=hidden)}
