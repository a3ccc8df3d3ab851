"""FedAdam (Reddi et al., 2021): FedAvg of a linear classifier with Adam on the server."""

from pydantic import Field
from torch import Tensor

from fedvl.config import Share
from fedvl.methods.base import Options
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.methods.parts.server_optimiser import ServerOptimiser
from fedvl.tensors import Tensors


class AdaptiveOptions(Options):
    server_rate: float = Field(0.01, gt=0)
    """Learning rate of the server, eta."""
    server_betas: tuple[Share, Share] = (0.9, 0.99)
    """Decay of the mean move and of its square, beta_1 and beta_2."""
    tau: float = Field(1e-3, gt=0)
    """Degree of adaptivity: added to the root of the mean square."""


class Adaptive(ServerOptimiser):
    options: AdaptiveOptions

    def initial(self) -> dict[str, float]:
        return {"m": 0.0, "v": self.options.tau**2}

    def optimise(self, move: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Return eta m / (sqrt(v) + tau), with m <- beta_1 m + (1 - beta_1) move (algorithm 2)."""
        m = state["m"].lerp(move, 1 - self.options.server_betas[0])
        v = self.second_moment(state["v"], move.square())
        return self.options.server_rate * m / (v.sqrt() + self.options.tau), {"m": m, "v": v}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v <- beta_2 v + (1 - beta_2) move^2."""
        return v.lerp(square, 1 - self.options.server_betas[1])


class FedAdamOptions(AdaptiveOptions, LinearOptions):
    """Options of FedAdam."""


class FedAdam(Adaptive, Linear, same_loss_as=Linear):
    options: FedAdamOptions
