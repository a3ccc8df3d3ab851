"""A method that gives nothing away: it trains a tensor without looking at images. Leaks are planted in it."""

from typing import Any

import torch
from torch import Tensor

from fedvl.methods.base import Batch, Method
from fedvl.tensors import Tensors


class Quiet(Method):
    """All clients move the same tensor by the same step, and report the same loss."""

    scope = "batch"

    def start(self, generator: torch.Generator) -> Tensors:
        shape = self.task.text_embeddings.shape
        return {"weight": 0.1 * torch.randn(shape, generator=generator)}

    def loss(self, tensors: Tensors, batch: Batch) -> Tensor:
        return (tensors["weight"] - 1).square().mean()

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return inputs["features"] @ self.task.text_features.T


def features(samples: Any) -> Tensor:
    found: Tensor = samples.inputs["features"]
    return found


def head(tensor: Tensor, count: int) -> Tensor:
    """The first rows, filled up with zeros."""
    found = tensor.new_zeros(count, *tensor.shape[1:])
    found[: min(count, len(tensor))] = tensor[:count]
    return found
