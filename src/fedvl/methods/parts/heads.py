"""Class weights that a finished run found, from which training starts in place of the class texts.

Methods whose scores are linear in the vectors, such as ridge, gda and linear, have such weights. A
method that trains a linear head starts at them. One that keeps the class texts fixed and trains
something beside them takes them as a tensor of its own, which no client changes.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.methods.base import Method, Task
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors

HEAD = "head"  # C x (d + 1), the biases as its last column
NEAR = 1e-3  # of the largest score: how far scores of a linear head are from linear ones, at most


class Head(NamedTuple):
    """Scores x W^T + b of unit vectors x."""

    weight: Tensor  # C x d
    bias: Tensor  # C


def head_of(method: Method, tensors: Tensors) -> Head | None:
    """Return the weights of a method's scores of unit vectors; None if these are not linear."""
    width = method.task.text_embeddings.shape[1]
    units = torch.eye(width).to(method.task.text_embeddings)
    others = normalize(torch.cos(torch.arange(4 * width, dtype=torch.float64).square()).view(4, width), dim=1)
    with torch.no_grad():
        bias = method.predict(tensors, {"features": torch.zeros_like(units[:1])})[0]
        weight = (method.predict(tensors, {"features": units}) - bias).T
        found = method.predict(tensors, {"features": others.to(units)})
    expected = others.to(weight) @ weight.T + bias
    if (found - expected).abs().max() > NEAR * found.abs().max():
        return None
    return Head(weight.contiguous(), bias)


def linear_start(task: Task, weight: Tensor, scale: float) -> Tensors:
    """Return the first tensors of a linear head with this factor: these weights, or a run's."""
    if task.head is None:
        return {"weight": weight, "bias": weight.new_zeros(len(weight))}
    found = task.head()
    return {"weight": found.weight.to(weight) / scale, "bias": found.bias.to(weight)}


def head_roles(task: Task) -> dict[str, Role]:
    """Return the role of the weights that stand for the class texts, if a run has given some."""
    return {HEAD: Shared(trained=False)} if task.head is not None else {}


def head_start(task: Task) -> Tensors:
    """Return the weights that stand for the class texts, if a run has given some."""
    if task.head is None:
        return {}
    found = task.head()
    return {HEAD: torch.cat([found.weight, found.bias[:, None]], 1).to(task.text_features)}


def class_scores(method: Method, tensors: Tensors, features: Tensor) -> Tensor:
    """Return the scores of a run's weights, or the scaled cosines to the class texts."""
    if HEAD in tensors:
        return features @ tensors[HEAD][:, :-1].T + tensors[HEAD][:, -1]
    return method.scale * (features @ method.task.text_features.T)
