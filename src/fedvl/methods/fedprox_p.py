"""FedProx-P: FedAvg-P with a pull of all that is trained towards what the server sent; a baseline of Fed-PRIME.

The released code's FedProx-P is Fed-PRIME's own model with a pull whose strength is 0 unless set, and no script sets it. Here
it is the baseline that its name says, with a pull; 0.01 is the strength that the code gives FedMSplit-P.
"""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.fedavg_p import FedAvgP, MissingAwareOptions
from fedvl.methods.parts.losses import squared_distance
from fedvl.tensors import Tensors


class PulledOptions(MissingAwareOptions):
    mu: float = Field(0.01, ge=0)  # strength of the pull


class FedProxP(FedAvgP):
    options: PulledOptions

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Loss + mu/2 |trained - received|^2 (FedProx, eq. 2)."""
        return super().loss(tensors, batch) + self.options.mu / 2 * squared_distance(tensors, batch.received)
