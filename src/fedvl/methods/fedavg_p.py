"""FedAvg-P (Fed-PRIME's baseline): averaged missing-aware prompts (Lee et al., 2023).

The modalities of a sample select the prompts before its tokens, new ones in each of the first
layers of a frozen encoder. The public code starts with zeros and a prompt of ones per kind: equal
prompts stay equal, as do their gradients, so 2 of 16 are left (``initial = "ones"``). At a prompt
of zeros the gradient is divided by the root of LayerNorm's epsilon: 1e-6 in that code, 1e-12 in
Hugging Face's ViLT, with which it would be 1,000 times as large; ``ones`` uses 1e-6.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Task
from fedvl.methods.parts.fused import (
    HEAD_DEVIATION,
    RELEASED_STEPS,
    SETTING,
    FusedMethod,
    FusedOptions,
    embed,
    read_prompts,
    with_epsilon,
)
from fedvl.methods.roles import Role, Shared
from fedvl.tensors import Tensors

RELEASED_EPSILON = 1e-6  # of the LayerNorms of the public code's ViLT
KINDS = ("complete", "text-only", "image-only")


class MissingAwareOptions(FusedOptions):
    tokens: int = Field(16, ge=1)
    """Prompts of each kind per layer."""
    layers: int = Field(6, ge=1)
    """Number of first layers that have prompts, at most the model's."""
    initial: Literal["normal", "ones"] = "normal"
    """Initial prompts: random, or ones as in the released code."""


class FedAvgP(FusedMethod):
    options: MissingAwareOptions
    presets = {"paper": SETTING, "released": {**SETTING, **RELEASED_STEPS, "method": {"initial": "ones"}}}

    def __init__(self, options: MissingAwareOptions, task: Task) -> None:
        super().__init__(options, task)
        ones = options.initial == "ones"
        self.encoder = with_epsilon(task.fused, RELEASED_EPSILON) if ones else task.fused
        self.shape = min(options.layers, task.fused.layers), options.tokens, task.fused.width

    def roles(self) -> dict[str, Role]:
        return {"prompts.*": Shared(rate=self.options.prompt_rate)}

    def start(self, generator: torch.Generator) -> Tensors:
        tensors = super().start(generator)
        return tensors | self.placed({f"prompts.{kind}": self.draw(i, generator) for i, kind in enumerate(KINDS)})

    def draw(self, kind: int, generator: torch.Generator) -> Tensor:
        if self.options.initial == "normal":
            return HEAD_DEVIATION * torch.randn(self.shape, generator=generator)
        ones = torch.zeros(self.shape)
        ones[:, kind % self.shape[1]] = 1.0
        return ones

    def represent(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        has_text, has_image = inputs["present"].unbind(1)
        kind = torch.where(has_text, torch.where(has_image, 0, 1), 2)
        of_kinds = torch.stack([tensors[f"prompts.{name}"] for name in KINDS], 1)  # layers x kinds x P x width
        prompts = of_kinds[:, kind]
        layers, tokens, _ = self.shape
        return read_prompts(self.encoder, tensors, embed(self.encoder, inputs), prompts, layers * tokens)
