"""FedAvg-P (Fed-PRIME's baseline): averaged missing-aware prompts (Lee et al., 2023).

The modalities of a sample select the prompts before its tokens, new ones in each of the first
layers of a frozen encoder. The public code starts with zeros and a prompt of ones per kind: equal
prompts stay equal, as do their gradients, so 2 of 16 are left (``initial = "ones"``).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedvl.methods.base import Options, Task
from fedvl.methods.parts.fused import RELEASED_STEPS, SETTING, SPREAD, FusedMethod, embed, read
from fedvl.tensors import Tensors

KINDS = ("complete", "text-only", "image-only")


class MissingAwareOptions(Options):
    tokens: int = Field(16, ge=1)  # prompts of each kind per layer
    layers: int = Field(6, ge=1)  # first layers, which have prompts; all if the model has fewer
    initial: Literal["normal", "ones"] = "normal"  # random, or as in the public code


class FedAvgP(FusedMethod):
    options: MissingAwareOptions
    presets = {"paper": SETTING, "released": {**SETTING, **RELEASED_STEPS, "method": {"initial": "ones"}}}

    def __init__(self, options: MissingAwareOptions, task: Task) -> None:
        super().__init__(options, task)
        self.shape = min(options.layers, task.fused.layers), options.tokens, task.fused.width

    def start(self, generator: torch.Generator) -> Tensors:
        tensors = super().start(generator)
        return tensors | self.placed({f"prompts.{kind}": self.draw(i, generator) for i, kind in enumerate(KINDS)})

    def draw(self, kind: int, generator: torch.Generator) -> Tensor:
        if self.options.initial == "normal":
            return SPREAD * torch.randn(self.shape, generator=generator)
        ones = torch.zeros(self.shape)
        ones[:, kind % self.shape[1]] = 1.0
        return ones

    def represent(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        has_text, has_image = inputs["present"].unbind(1)
        kind = torch.where(has_text, torch.where(has_image, 0, 1), 2)
        of_kinds = torch.stack([tensors[f"prompts.{name}"] for name in KINDS], 1)  # layers x kinds x P x width
        prompts = of_kinds[:, kind]
        layers, tokens, _ = self.shape
        return read(self.task.fused, tensors, embed(self.task.fused, inputs), prompts, layers * tokens)
