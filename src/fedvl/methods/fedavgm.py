"""FedAvgM (Hsu et al., 2019): FedAvg of a linear classifier with momentum on the server."""

from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Options
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.methods.parts.server_optimiser import ServerOptimiser
from fedvl.tensors import Tensors


class MomentumOptions(Options):
    server_rate: float = Field(1.0, gt=0)
    """Factor on the server's step."""
    server_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of the server, beta."""


class Momentum(ServerOptimiser):
    options: MomentumOptions

    def initial(self) -> dict[str, float]:
        return {"v": 0.0}

    def optimise(self, move: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Return v <- beta v + move, and its step (section 4.3)."""
        v = self.options.server_momentum * state["v"] + move
        return self.options.server_rate * v, {"v": v}


class FedAvgMOptions(MomentumOptions, LinearOptions):
    """Options of FedAvgM."""


class FedAvgM(Momentum, Linear, same_loss_as=Linear):
    options: FedAvgMOptions
