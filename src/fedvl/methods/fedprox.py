"""FedProx (Li et al., 2020): the linear classifier with a pull towards the server's, against drift on skewed clients."""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch, Task
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.methods.parts.losses import squared_distance
from fedvl.tensors import Tensors


class FedProxOptions(LinearOptions):
    mu: float = Field(0.1, ge=0)  # strength of the pull (CacheFL's comparison uses 0.1)


class FedProx(Linear):
    options_type = FedProxOptions
    gradients = None  # type: ignore[assignment]  # the objective has a term more than the linear classifier's

    def __init__(self, options: FedProxOptions, task: Task) -> None:
        super().__init__(options, task)
        self.mu = options.mu

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        loss, _ = super().objective(tensors, batch)
        return loss + self.mu / 2 * squared_distance(tensors, batch.received), {}
