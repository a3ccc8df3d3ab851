"""FedProx-P (Fed-PRIME's baseline): FedAvg-P with a proximal term on all that is trained.

The released FedProx-P is Fed-PRIME's model with a proximal weight of 0, which no script changes.
Here it is the baseline of its name; 0.01 is the weight that the code gives FedMSplit-P.
"""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.fedavg_p import FedAvgP, MissingAwareOptions
from fedvl.methods.parts.losses import squared_distance
from fedvl.tensors import Tensors


class PulledOptions(MissingAwareOptions):
    mu: float = Field(0.01, ge=0)
    """Weight of the proximal term."""


class FedProxP(FedAvgP):
    options: PulledOptions

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return the loss + mu/2 |trained - received|^2 (FedProx, eq. 2)."""
        return super().loss(tensors, batch) + self.options.mu / 2 * squared_distance(tensors, batch.received)
