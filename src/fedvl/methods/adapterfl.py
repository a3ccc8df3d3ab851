"""AdapterFL (CacheFL's baseline): CLIP-Adapter's bottleneck (Gao et al., 2023) on features."""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.methods.base import Method, Options
from fedvl.methods.parts.adapters import bottleneck, bottleneck_start
from fedvl.methods.parts.heads import class_scores, head_roles, head_start
from fedvl.methods.roles import Role
from fedvl.tensors import Tensors


class AdapterOptions(Options):
    ratio: float = Field(0.2, ge=0, le=1)
    """Share of the adapted features in the mix with the original ones."""
    reduction: int = Field(4, ge=1)
    """Factor by which the hidden layer is narrower than the features."""
    scale: float | None = Field(None, gt=0)
    """Factor on the scores; the model's logit scale if absent."""


class AdapterFL(Method):
    options: AdapterOptions
    scope = "row"
    starts_from_head = True
    presets = {
        "paper": {
            "data": {"shots": 16, "minimum": 0},
            "training": {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 5e-4, "batch_size": 32},
            "federation": {"rounds": 20},
        }
    }

    def roles(self) -> dict[str, Role]:
        return head_roles(self.task)

    def start(self, generator: torch.Generator) -> Tensors:
        text = self.task.text_features
        adapter = bottleneck_start(text.shape[1], self.options.reduction, generator)
        return {**{name: tensor.to(text) for name, tensor in adapter.items()}, **head_start(self.task)}

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        """Score unit features: without biases, a longer embedding only scales the output."""
        ratio, features = self.options.ratio, inputs["features"]
        mixed = ratio * bottleneck(tensors, features) + (1 - ratio) * features
        return class_scores(self, tensors, normalize(mixed, dim=-1))
