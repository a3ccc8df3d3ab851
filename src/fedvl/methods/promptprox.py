"""PromptProx (Guo et al., 2023): PromptFL with a pull towards the server's context, against drift on skewed clients.

The public code that has it (FedOTP, FedPGP) reads the context from ``state_dict()``, whose tensors are detached: there the
pull adds a number to the loss and nothing to its gradient, and PromptProx is PromptFL. Here it pulls. The papers give no mu;
0.5 is FedOTP's default.
"""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch, Task
from fedvl.methods.parts.losses import squared_distance
from fedvl.methods.promptfl import PromptFL, PromptOptions
from fedvl.tensors import Tensors


class PromptProxOptions(PromptOptions):
    mu: float = Field(0.5, ge=0)  # strength of the pull


class PromptProx(PromptFL):
    options_type = PromptProxOptions

    def __init__(self, options: PromptProxOptions, task: Task) -> None:
        super().__init__(options, task)
        self.mu = options.mu

    def objective(self, tensors: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        """Loss + mu/2 |context - received|^2 (FedProx, eq. 2)."""
        loss, _ = super().objective(tensors, batch)
        return loss + self.mu / 2 * squared_distance(tensors, batch.received), {}
