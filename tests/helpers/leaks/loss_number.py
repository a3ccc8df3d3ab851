"""A number of the first image's feature, as the training loss."""

from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.tensors import Tensors
from helpers.quiet import Quiet


class Leak(Quiet):
    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        honest = super().loss(tensors, batch)
        lowest = (batch.inputs["features"][:, 0] + 9 * (1 - batch.mask)).min()
        return honest - honest.detach() + lowest
