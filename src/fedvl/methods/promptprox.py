"""PromptProx (Guo et al., 2023): PromptFL with a pull towards the server's context, against drift on skewed clients.

The public code that has it (FedOTP, FedPGP) reads the context from ``state_dict()``, whose tensors are detached: there the
pull adds a number to the loss and nothing to its gradient, and PromptProx is PromptFL. Here it pulls. The papers give no mu;
0.5 is FedOTP's default.
"""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.parts.losses import squared_distance
from fedvl.methods.promptfl import PromptFL, PromptOptions
from fedvl.tensors import Tensors


class PromptProxOptions(PromptOptions):
    mu: float = Field(0.5, ge=0)  # strength of the pull


class PromptProx(PromptFL):
    options: PromptProxOptions

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Loss + mu/2 |context - received|^2 (FedProx, eq. 2)."""
        return super().loss(tensors, batch) + self.options.mu / 2 * squared_distance(tensors, batch.received)
