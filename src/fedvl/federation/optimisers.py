"""Gradient steps on stacked tensors (clients first), in place. The arithmetic is that of ``torch.optim``, whose import alone
costs more than most of our runs."""

import math

import torch

from fedvl.config import TrainingConfig
from fedvl.tensors import Tensors


def learning_rate(training: TrainingConfig, round_index: int, rounds: int) -> float:
    """The rate of a round (counted from 0)."""
    if training.schedule == "cosine":
        return training.learning_rate * 0.5 * (1 + math.cos(math.pi * round_index / max(rounds, 1)))
    if training.schedule == "step":
        return training.learning_rate * training.step_factor**round_index
    return training.learning_rate


class Optimiser:
    """Fresh for each client and round, so that nothing of one client's steps reaches another's."""

    def __init__(self, training: TrainingConfig, rate: float, tensors: Tensors) -> None:
        self.training = training
        self.rate = rate
        self.tensors = tensors
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
        if self.training.momentum:
            if name in self.momentum:
                gradient = self.momentum[name][:active].mul_(self.training.momentum).add_(gradient)
            else:
                gradient = self.momentum[name] = gradient.clone(memory_format=torch.contiguous_format)
            if decay:
                gradient.add_(tensor, alpha=decay)
        elif decay:
            tensor.mul_(1 - self.rate * decay)
        tensor.add_(gradient, alpha=-self.rate)

    def _adam(self, name: str, tensor: torch.Tensor, gradient: torch.Tensor, active: int) -> None:
        decay = self.training.weight_decay
        if decay and self.training.optimiser == "adamw":
            tensor.mul_(1 - self.rate * decay)
        elif decay:
            gradient = gradient.add(tensor, alpha=decay)
        first, second = self.training.betas
        if name not in self.mean:
            self.mean[name], self.square[name] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        mean = self.mean[name][:active].lerp_(gradient, 1 - first)
        square = self.square[name][:active].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        denominator = (square / (1 - second**self.steps)).sqrt_().add_(self.training.epsilon)
        tensor.addcdiv_(mean, denominator, value=-self.rate / (1 - first**self.steps))
