"""Tokens, prompts, pooler and classifier of the methods on a frozen fused encoder.

Clients train pooler and classifier, averaged by samples as in Fed-PRIME's code: its slides call the
classifier "updatable", and one global model needs one. The pooler starts as the encoder's.
"""

from copy import deepcopy
from typing import ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import LayerNorm
from torch.nn.functional import gelu, layer_norm

from fedvl.config import Settings
from fedvl.methods.base import Method, Options
from fedvl.models.vilt import FusedEncoder
from fedvl.tensors import Tensors

ABSENT_IMAGE = 1.0  # value of a missing image's pixels after normalisation (missing-aware prompts)
HEAD_DEVIATION = 0.02  # standard deviation of the initial classifier, as in BERT
SETTING: dict[str, Settings] = {  # of the comparison of Fed-PRIME with its baselines
    "data": {"dataset": "emoji-mini", "partition": "iid", "clients": 20, "missing": "both:0.7"},
    "model": {"name": "fedvl-tiny-vilt"},
    "training": {"learning_rate": 0.05, "momentum": 0.0, "batch_size": 8},
    "evaluation": {"protocol": "missing", "batch_size": 256},
}
RELEASED_STEPS = {"training": {**SETTING["training"], "batch_size": 64}, "federation": {"rounds": 250}}


class FusedOptions(Options):
    prompt_rate: float = Field(1.0, gt=0)
    """Factor on the learning rate of prompts; choose it on validation images."""


class EmbeddedSamples(NamedTuple):
    """Embedded samples, the input of the first layer."""

    tokens: Tensor  # text, then image: n x T x width
    mask: Tensor  # n x T: False for padding


def embed(encoder: FusedEncoder, inputs: Tensors) -> EmbeddedSamples:
    has_image = inputs["present"][:, 1, None, None, None]
    pixels = torch.where(has_image, encoder.normalise(inputs["pixels"]), ABSENT_IMAGE)
    tokens = torch.cat([encoder.embed_text(inputs["tokens"]), encoder.embed_image(pixels)], 1)
    return EmbeddedSamples(tokens, torch.cat([encoder.text_mask(inputs["tokens"]), encoder.image_mask(pixels)], 1))


def with_epsilon(encoder: FusedEncoder, epsilon: float) -> FusedEncoder:
    """Return the encoder with another epsilon in its blocks' norms; the weights are shared."""
    parts = [*encoder.parameters(), encoder.tokenizer]
    other = deepcopy(encoder, {id(part): part for part in parts})
    for module in (*other.transformer.modules(), other.ln_final):
        if isinstance(module, LayerNorm):
            module.eps = epsilon
    return other


def classifier_start(encoder: FusedEncoder, classes: int, generator: torch.Generator) -> Tensors:
    """Return pooler and classifier: layer of twice the width, LayerNorm, GELU, layer of classes."""
    width = encoder.width
    return {
        "pooler.weight": encoder.pooler.weight.detach().clone(),
        "pooler.bias": encoder.pooler.bias.detach().clone(),
        "hidden.weight": HEAD_DEVIATION * torch.randn(2 * width, width, generator=generator),
        "hidden.bias": torch.zeros(2 * width),
        "norm.weight": torch.ones(2 * width),
        "norm.bias": torch.zeros(2 * width),
        "classes.weight": HEAD_DEVIATION * torch.randn(classes, 2 * width, generator=generator),
        "classes.bias": torch.zeros(classes),
    }


def read_prompts(
    encoder: FusedEncoder, tensors: Tensors, seen: EmbeddedSamples, prompts: Tensor, position: int
) -> Tensor:
    """Return the pooled state (n x width) of a position after ``prompts`` (layers x n x P x width).

    The last layer computes that position alone.
    """
    rows = torch.full((len(seen.tokens),), position, device=seen.tokens.device)
    hidden = encoder.transformer(seen.tokens, key_mask=seen.mask, rows=rows, prepended=prompts)
    state = encoder.ln_final(hidden)[:, 0]
    return torch.tanh(state @ tensors["pooler.weight"].T + tensors["pooler.bias"])


def classify(tensors: Tensors, state: Tensor) -> Tensor:
    hidden = state @ tensors["hidden.weight"].T + tensors["hidden.bias"]
    hidden = gelu(layer_norm(hidden, hidden.shape[-1:], tensors["norm.weight"], tensors["norm.bias"]))
    return hidden @ tensors["classes.weight"].T + tensors["classes.bias"]


class FusedMethod(Method):
    """Base of the methods that put prompts into a fused encoder; ``represent`` says how."""

    inputs = ("tokens", "pixels", "present")
    scope = "row"
    through_encoder = True
    presets: ClassVar[dict[str, Settings]] = {"paper": SETTING}

    def start(self, generator: torch.Generator) -> Tensors:
        return self.placed(classifier_start(self.task.fused, len(self.task.class_names), generator))

    def placed(self, tensors: Tensors) -> Tensors:
        """Move tensors to the device; they are drawn on the CPU, so that a GPU has the same."""
        return {name: tensor.to(self.task.fused.text_positions) for name, tensor in tensors.items()}

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        return classify(tensors, self.represent(tensors, inputs))
