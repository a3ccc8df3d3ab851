"""FedDyn (Acar et al., 2021): a linear classifier with a dynamic regulariser at each client."""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Mean, Method, Options, Samples
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.methods.roles import Private, Role, Server
from fedvl.tensors import Tensors


class DynamicOptions(Options):
    alpha: float = Field(0.01, gt=0)
    """Weight of the regulariser."""


class DynamicRegulariser(Method):
    """Algorithm 1: a client keeps g, its gradient at its last optimum; the server keeps h."""

    options: DynamicOptions
    weighting = "clients"

    def roles(self) -> dict[str, Role]:
        return {"h.*": Server(), "g.*": Private(end=self.kept), **super().roles()}

    def start(self, generator: torch.Generator) -> Tensors:
        shared = super().start(generator)
        return shared | {f"h.{name}": torch.zeros_like(t) for name, t in self.role.trained(shared).items()}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        shared = self.role.trained(super().start(generator))
        return super().join(samples, generator) | {f"g.{name}": torch.zeros_like(t) for name, t in shared.items()}

    def correct(self, gradients: Tensors, tensors: Tensors, received: Tensors) -> Tensors:
        """Return the gradient of L - <g, x> + alpha / 2 |x - x_0|^2 (eq. 1)."""
        pulls = {name: self.options.alpha * (tensors[name] - received[name]) for name in gradients if name in received}
        return gradients | {name: gradients[name] - tensors[f"g.{name}"] + pull for name, pull in pulls.items()}

    def kept(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return g - alpha (x - x_0), where x_0 was received."""
        of = name.removeprefix("g.")
        return tensors[name] - self.options.alpha * (tensors[of] - received[of])

    def step(self, shared: Tensors, mean: Mean) -> Tensors:
        """Return h <- h - alpha |P| / m (mean - x), and x <- mean - h / alpha."""
        stepped, alpha = dict(super().step(shared, mean)), self.options.alpha
        for name in self.role.trained(mean):
            h = shared[f"h.{name}"] - alpha * mean.share * (mean[name] - shared[name])
            stepped |= {f"h.{name}": h, name: mean[name] - h / alpha}
        return stepped


class FedDynOptions(DynamicOptions, LinearOptions):
    """Options of FedDyn."""


class FedDyn(DynamicRegulariser, Linear, same_loss_as=Linear):
    options: FedDynOptions
