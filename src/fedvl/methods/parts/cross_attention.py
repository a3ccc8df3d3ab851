"""A block of cross-attention that prompts are generated with: FedTPG's, and FedMVP's.

Queries attend to texts, and a gated layer (GEGLU) adds to what they found. Layers are drawn as
PyTorch does: attention by Xavier's rule, others within 1/sqrt(inputs).
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from fedvl.methods.parts.adapters import linear_layer
from fedvl.tensors import Tensors

HEADS, WIDENING = 4, 4


def block_start(width: int, joint: int, generator: torch.Generator) -> Tensors:
    """Draw a block for queries of one width and texts of another."""
    tensors = {}
    for name, inputs in (("query", width), ("key", joint), ("value", joint)):
        bound = (6 / (inputs + 3 * width)) ** 0.5
        tensors[f"{name}.weight"] = torch.empty(width, inputs).uniform_(-bound, bound, generator=generator)
        tensors[f"{name}.bias"] = torch.zeros(width)
    tensors["mixed.weight"], tensors["mixed.bias"] = linear_layer(width, width, generator)[0], torch.zeros(width)
    wide = WIDENING * width
    tensors["wide.weight"], tensors["wide.bias"] = linear_layer(width, 2 * wide, generator)
    tensors["narrow.weight"], tensors["narrow.bias"] = linear_layer(wide, width, generator)
    for name, size in (("queries", width), ("names", joint), ("hidden", width)):
        tensors[f"norm.{name}.weight"], tensors[f"norm.{name}.bias"] = torch.ones(size), torch.zeros(size)
    return tensors


def block(tensors: Tensors, queries: Tensor, keys: Tensor, values: Tensor, present: Tensor | None = None) -> Tensor:
    """Return what normalised queries find among the texts that are present, widened and added."""
    attended = attention(tensors, normalised(tensors, "queries", queries), keys, values, present)
    value, gate = layer(tensors, "wide", normalised(tensors, "hidden", attended)).chunk(2, -1)
    return attended + layer(tensors, "narrow", value * gelu(gate))


def attention(tensors: Tensors, queries: Tensor, keys: Tensor, values: Tensor, present: Tensor | None = None) -> Tensor:
    """Attend from queries (... x n x width) to texts, with heads but no residual."""
    query, key, value = (
        layer(tensors, name, x).reshape(*x.shape[:-1], HEADS, -1).transpose(-3, -2)
        for name, x in (("query", queries), ("key", keys), ("value", values))
    )
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if present is not None:
        scores = scores.masked_fill(~present, float("-inf"))
    return layer(tensors, "mixed", (scores.softmax(-1) @ value).transpose(-3, -2).flatten(-2))


def normalised(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], tensors[f"norm.{name}.weight"], tensors[f"norm.{name}.bias"])


def layer(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
