"""PromptProx (Guo et al., 2023): PromptFL with a proximal term, against drift on skewed clients.

Public code (FedOTP, FedPGP) reads the context from ``state_dict()``, which detaches it: the term
has no gradient there, and PromptProx is PromptFL. Here it has one. The papers give no mu; 0.5 is
FedOTP's default.
"""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch
from fedvl.methods.parts.losses import squared_distance
from fedvl.methods.promptfl import PromptFL, PromptOptions
from fedvl.tensors import Tensors


class PromptProxOptions(PromptOptions):
    mu: float = Field(0.5, ge=0)
    """Weight of the proximal term."""


class PromptProx(PromptFL):
    options: PromptProxOptions

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        """Return the loss + mu/2 |context - received|^2 (FedProx, eq. 2)."""
        return super().loss(tensors, batch) + self.options.mu / 2 * squared_distance(tensors, batch.received)
