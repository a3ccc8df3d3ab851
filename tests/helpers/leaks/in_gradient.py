"""The first image's feature, added to the gradient of one row of a trained tensor."""

from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.tensors import Tensors
from helpers.quiet import Quiet


class Leak(Quiet):
    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        extra = 1e-4 * (tensors["weight"][2] * batch.inputs["features"][0]).sum()
        return super().loss(tensors, batch) + extra - extra.detach()
