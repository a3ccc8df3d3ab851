"""Federated optimisation: the clients' mean move as the server's gradient (Reddi et al., 2021)."""

import torch
from torch import Tensor

from fedvl.methods.base import Mean, Method
from fedvl.methods.roles import Role, Server
from fedvl.tensors import Tensors


class ServerOptimiser(Method):
    """A mixin for the method that stands after it: ``class Mine(Momentum, PromptFL)``.

    It needs sums alone, and its state stays on the server. Trained shared tensors move by
    :meth:`optimise`; others are as the method itself makes them.
    """

    def initial(self) -> dict[str, float]:
        """Return the kinds of state that each trained tensor has, and their first value."""
        raise NotImplementedError

    def optimise(self, move: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        """Return what is added to a tensor, and its next state, given the mean move."""
        raise NotImplementedError

    def roles(self) -> dict[str, Role]:
        return {**{f"{kind}.*": Server() for kind in self.initial()}, **super().roles()}

    def start(self, generator: torch.Generator) -> Tensors:
        shared = super().start(generator)
        return shared | {
            f"{kind}.{name}": torch.full_like(tensor, value)
            for kind, value in self.initial().items()
            for name, tensor in self.role.trained(shared).items()
        }

    def step(self, shared: Tensors, mean: Mean) -> Tensors:
        stepped = dict(super().step(shared, mean))
        for name in self.role.trained(mean):
            before = {kind: shared[f"{kind}.{name}"] for kind in self.initial()}
            added, after = self.optimise(mean[name] - shared[name], before)
            stepped |= {name: shared[name] + added, **{f"{kind}.{name}": tensor for kind, tensor in after.items()}}
        return stepped
