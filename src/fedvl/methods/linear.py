"""FedAvg of a linear classifier on frozen features (McMahan et al., 2017): the supervised baseline.

The classifier starts at the class texts, so that round 0 is the zero-shot model.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Batch, Method, Options, closed_form
from fedvl.methods.parts.heads import linear_start
from fedvl.methods.parts.losses import on_class_list
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors


class LinearOptions(Options):
    initial: Literal["text", "zeros"] = "text"
    """Initial weights: the class texts, or zeros."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores; the model's logit scale if absent."""


class Linear(Method):
    options: LinearOptions
    scope = "row"
    starts_from_head = True
    presets = {"paper": {"training": {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "batch_size": 50}}}

    def roles(self) -> dict[str, Role]:
        return {"weight": Shared(features=True)}

    def start(self, generator: torch.Generator) -> Tensors:
        zeros = self.options.initial == "zeros"
        weight = torch.zeros_like(self.task.text_embeddings) if zeros else self.task.text_features.clone()
        return linear_start(self.task, weight, self.scale)

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return self.scale * (inputs["features"] @ tensors["weight"].T) + tensors["bias"]


@closed_form(Linear)
def softmax_gradients(method: Linear, tensors: Tensors, batch: Batch) -> tuple[Tensors, Tensor, Tensors]:
    """Return gradients and losses in closed form: d loss / d scores = (p - y) / n."""
    features, labels = batch.inputs["features"], batch.labels.clamp(min=0)[..., None]
    scores = method.scale * torch.bmm(features, tensors["weight"].mT) + tensors["bias"][:, None]
    likelihood = torch.softmax(on_class_list(scores, batch), dim=-1)
    share = (batch.mask / batch.mask.sum(-1, keepdim=True).clamp(min=1))[..., None]
    found = likelihood.gather(-1, labels).clamp(min=torch.finfo(likelihood.dtype).tiny)  # a loss stays finite
    losses = -(found.log() * share).sum((1, 2))
    error = likelihood.mul_(share).scatter_add_(-1, labels, -share)
    return {"weight": torch.bmm((method.scale * error).mT, features), "bias": error.sum(1)}, losses, {}
