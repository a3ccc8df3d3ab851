"""Gradient steps on stacked tensors (clients first), in place.

The arithmetic is that of ``torch.optim``, whose import alone takes longer than most runs.
"""

import math
from collections.abc import Mapping

import torch

from fedvl.config import TrainingConfig
from fedvl.tensors import Tensors


def learning_rate(training: TrainingConfig, round_index: int, rounds: int, epoch: int = 0) -> float:
    """The rate of a round and of an epoch in it (both counted from 0)."""
    if training.schedule == "cosine":
        return training.learning_rate * 0.5 * (1 + math.cos(math.pi * round_index / max(rounds, 1)))
    if training.schedule == "cosine-restarts":
        since = round_index % training.restart_rounds * training.local_epochs + epoch
        return (
            training.learning_rate
            * 0.5
            * (1 + math.cos(math.pi * since / (training.restart_rounds * training.local_epochs)))
        )
    if training.schedule == "step":
        return training.learning_rate * training.step_factor**round_index
    return training.learning_rate


class Optimiser:
    """Fresh for each client and round, so that nothing of one client's steps reaches another's."""

    def __init__(
        self,
        training: TrainingConfig,
        rate: float | torch.Tensor,
        tensors: Tensors,
        factors: Mapping[str, float] | None = None,
        once: bool = False,
    ) -> None:
        self.training = training
        self.rate = rate  # one for all clients, or one for each; it may be set anew before a step
        self.tensors = tensors
        self.factors = factors or {}  # on the rate, by tensor
        self.once = once  # whether there is one step only, for which no momentum need be kept
        self.steps = 0
        self.momentum: Tensors = {}
        self.mean: Tensors = {}
        self.square: Tensors = {}

    def step(self, gradients: Tensors, active: int) -> None:
        """Move the first ``active`` clients; the others have no more batches."""
        self.steps += 1
        move = self._sgd if self.training.optimiser == "sgd" else self._adam
        for name, gradient in gradients.items():
            move(name, self.tensors[name][:active], gradient, active)

    def _sgd(self, name: str, tensor: torch.Tensor, gradient: torch.Tensor, active: int) -> None:
        decay = self.training.weight_decay
        if self.training.momentum and self.once:
            if decay:
                gradient = gradient.add(tensor, alpha=decay)
        elif self.training.momentum:
            if name in self.momentum:
                gradient = self.momentum[name][:active].mul_(self.training.momentum).add_(gradient)
            else:
                gradient = self.momentum[name] = gradient.clone(memory_format=torch.contiguous_format)
            if decay:
                gradient.add_(tensor, alpha=decay)
        elif decay:
            tensor.mul_(1 - self._rate_of(name, tensor) * decay)
        rate = self._rate_of(name, tensor)
        if isinstance(rate, float):
            tensor.add_(gradient, alpha=-rate)
        else:
            tensor.addcmul_(gradient, rate, value=-1)

    def _adam(self, name: str, tensor: torch.Tensor, gradient: torch.Tensor, active: int) -> None:
        decay = self.training.weight_decay
        gradient = gradient.contiguous()  # read four times below: in another layout each would be slow
        if decay and self.training.optimiser == "adamw":
            tensor.mul_(1 - self._rate_of(name, tensor) * decay)
        elif decay:
            gradient = gradient.add(tensor, alpha=decay)
        first, second = self.training.betas
        if name not in self.mean:
            self.mean[name], self.square[name] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        mean = self.mean[name][:active].lerp_(gradient, 1 - first)
        square = self.square[name][:active].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        # Both corrections of the bias go into numbers, which spares a pass over the tensors.
        correction = (1 - second**self.steps) ** 0.5
        denominator = square.sqrt().add_(self.training.epsilon * correction)
        rate, factor = self._rate_of(name, tensor), -correction / (1 - first**self.steps)
        if isinstance(rate, float):
            tensor.addcdiv_(mean, denominator, value=rate * factor)
        else:
            tensor.addcdiv_(mean * rate, denominator, value=factor)

    def _rate_of(self, name: str, tensor: torch.Tensor) -> float | torch.Tensor:
        """Return the rate of a tensor, shaped to be multiplied with it."""
        factor = self.factors.get(name, 1.0)
        if isinstance(self.rate, float):
            return self.rate * factor
        return self.rate[: len(tensor)].view(-1, *(1 for _ in tensor.shape[1:])) * factor
