"""SCAFFOLD (Karimireddy et al., 2020): a linear classifier, its gradients corrected for drift."""

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Mean, Method, Options, Samples
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.methods.roles import Private, Role, Shared
from fedvl.tensors import Tensors


class VariateOptions(Options):
    server_rate: float = Field(1.0, gt=0)
    """Factor on the server's step, eta_g."""


class ControlVariates(Method):
    """Algorithm 1, option II: the server hands out its variate c, and each client keeps its c_i."""

    options: VariateOptions
    weighting = "clients"
    requires = {"optimiser": "sgd", "momentum": 0.0, "schedule": "constant"}
    presets = {"paper": {"training": {"learning_rate": 0.01, "momentum": 0.0, "batch_size": 50}}}

    def roles(self) -> dict[str, Role]:
        return {"c.*": Shared(trained=False, end=self.sent), "c_i.*": Private(end=self.kept), **super().roles()}

    def start(self, generator: torch.Generator) -> Tensors:
        shared = super().start(generator)
        return shared | {f"c.{name}": torch.zeros_like(t) for name, t in self.role.trained(shared).items()}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        shared = self.role.trained(super().start(generator))
        return super().join(samples, generator) | {f"c_i.{name}": torch.zeros_like(t) for name, t in shared.items()}

    def correct(self, gradients: Tensors, tensors: Tensors, received: Tensors) -> Tensors:
        """Return g - c_i + c (line 10)."""
        corrected = {name: g for name, g in gradients.items() if f"c.{name}" in received}
        return gradients | {name: g - tensors[f"c_i.{name}"] + tensors[f"c.{name}"] for name, g in corrected.items()}

    def kept(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return c_i - c + (x - y) / (K eta_l) (line 12)."""
        of, training = name.removeprefix("c_i."), self.task.training
        moved = training.steps(len(samples)) * training.learning_rate * self.role.shared(of).rate
        return tensors[name] - received[f"c.{of}"] + (received[of] - tensors[of]) / moved

    def sent(self, name: str, tensors: Tensors, received: Tensors, samples: Samples) -> Tensor:
        """Return c and the change of c_i (line 13)."""
        own = f"c_i.{name.removeprefix('c.')}"
        return received[name] + self.kept(own, tensors, received, samples) - tensors[own]

    def step(self, shared: Tensors, mean: Mean) -> Tensors:
        """Add eta_g times the mean move to x, and |S| / N times the mean change to c (line 17)."""
        rates = {name: mean.share if name.startswith("c.") else self.options.server_rate for name in mean}
        return {name: shared[name] + rates[name] * (tensor - shared[name]) for name, tensor in mean.items()}


class ScaffoldOptions(VariateOptions, LinearOptions):
    """Options of SCAFFOLD."""


class Scaffold(ControlVariates, Linear, same_loss_as=Linear):
    options: ScaffoldOptions
