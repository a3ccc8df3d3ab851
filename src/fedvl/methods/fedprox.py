"""FedProx (Li et al., 2020): a linear classifier with a proximal term against client drift."""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.methods.parts.losses import squared_distance
from fedvl.tensors import Tensors


class FedProxOptions(LinearOptions):
    mu: float = Field(0.1, ge=0)
    """Weight of the proximal term; 0.1 in CacheFL's comparison."""


class FedProx(Linear):
    options: FedProxOptions

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        return super().loss(tensors, batch) + self.options.mu / 2 * squared_distance(tensors, batch.received)
