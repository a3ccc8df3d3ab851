"""Prompt methods on an encoder and classes of one's choice: what tests of them share."""

from typing import Any

import torch

from fedvl.methods import load_method
from fedvl.methods.base import Batch, Method, Task
from fedvl.models.clip import DualEncoder
from fedvl.tensors import Tensors

PROMPTS = ["promptfl", "promptprox", "pfedprompt", "fedtpg"]
NAMES = ("cat", "dog", "ship")
SKEWED = {"clients": 5, "partition": "dirichlet:0.1", "shots": 16}  # data of a short personal run


def task_of(encoder: DualEncoder, names: tuple[str, ...] = NAMES) -> Task:
    generator = torch.Generator().manual_seed(3)
    return Task(tuple(names), torch.randn(len(names), encoder.dim, generator=generator), encoder, 2)


def method_on(name: str, encoder: DualEncoder, names: tuple[str, ...] = NAMES, **options: Any) -> Any:
    method_type = load_method(name)
    return method_type(method_type.options_type(**options), task_of(encoder, names))


def gradient(method: Method, tensors: Tensors, batch: Batch, name: str) -> torch.Tensor:
    def loss(tensor: torch.Tensor) -> torch.Tensor:
        return method.objective({**tensors, name: tensor}, batch)[0]

    return torch.func.grad(loss)(tensors[name])


def settings(rate: float, rounds: int = 5, **further: Any) -> dict[str, Any]:
    """Of a run on real images."""
    return {"training": {"learning_rate": rate}, "federation": {"rounds": rounds, "threads": 1}, **further}
