"""FedProx (Li et al., 2020) on a whole ResNet: FedAvg with a proximal term."""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.fedavg_nn import FedAvgNN, NetworkOptions
from fedvl.methods.parts.losses import squared_distance
from fedvl.tensors import Tensors


class FedProxNNOptions(NetworkOptions):
    mu: float = Field(0.1, ge=0)
    """Weight of the proximal term; 0.1 in CacheFL's comparison."""


class FedProxNN(FedAvgNN):
    options: FedProxNNOptions

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        loss, changed = super().objective(tensors, batch)
        received = {name: tensor for name, tensor in batch.received.items() if self.role.shared(name).trained}
        return loss + self.options.mu / 2 * squared_distance(tensors, received), changed
