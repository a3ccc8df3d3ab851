"""The transformer that CLIP's image tower, CLIP's text tower and ViLT share.

Everything is a pure function of its inputs, without in-place writes, so that `torch.func.vmap`
and `grad` can batch prompts over clients while the weights stay unbatched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvl.models.attention import attend, multiply

QUICK_GELU = 1.702  # of OpenAI's approximation of GELU
Adapter = Callable[[Tensor], Tensor]
# Changes of a block's projections ("q", "k", "v", "o") of low rank: A (r x width) and B (width x r), added as x A^T B^T
Deltas = Mapping[str, tuple[Tensor, Tensor]]


class Change(NamedTuple):
    """What a method adds to a frozen block."""

    beside: Adapter | None = None  # parallel to the block: it reads the block's normalised input
    deltas: Deltas = {}


UNCHANGED = Change()


@dataclass(frozen=True)
class StackShape:
    """Sizes of a stack of pre-LayerNorm blocks.

    `activation` is "quick_gelu" (OpenAI's weights), "gelu" or "gelu_pytorch_tanh" (SigLIP).
    """

    width: int
    layers: int
    heads: int
    hidden: int
    activation: str = "quick_gelu"
    epsilon: float = 1e-5


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return one position of each sequence: n x T x width -> n x 1 x width."""
    return x.gather(1, rows[:, None, None].expand(-1, 1, x.shape[-1]))


def cast(
    module: nn.Module, weight: Tensor, bias: Tensor, factors: tuple[float, float] = (1.0, 1.0)
) -> tuple[Tensor, Tensor]:
    """Return frozen weights in the precision of products; times factors if that is not theirs.

    They are cast once; autocast would do so in each step.
    """
    device = weight.device
    if not torch.is_autocast_enabled(device.type):
        return weight, bias
    kept: dict[object, tuple[Tensor, Tensor]] = module.__dict__.setdefault("_cast", {})
    kind = device, torch.get_autocast_dtype(device.type)
    if kind not in kept:
        with torch.inference_mode(False):
            kept[kind] = (weight * factors[0]).to(kind[1]), (bias * factors[1]).to(kind[1])
    return kept[kind]


class CastLinear(nn.Linear):
    factors = (1.0, 1.0)  # on weight and bias where they are cast

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, *cast(self, self.weight, self.bias, self.factors))


def low_rank(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Return x A^T B^T."""
    return x @ down.mT @ up.mT


class Attention(nn.Module):
    """Multi-head self-attention with the parameter names of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = CastLinear(width, width)

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Split n x T x (parts * width) into `parts` tensors of n x heads x T x head width."""
        count, length, _ = x.shape
        return x.reshape(count, length, parts, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor, visible: Tensor | None, rows: Tensor | None, deltas: Deltas) -> Tensor:
        weight, bias = cast(self, self.in_proj_weight, self.in_proj_bias)
        asking = x if rows is None else take_rows(x, rows)
        if rows is None:
            query, key, value = self._split(multiply(x, weight, bias), 3)
        else:
            width = x.shape[-1]
            (query,) = self._split(multiply(asking, weight[:width], bias[:width]), 1)
            key, value = self._split(multiply(x, weight[width:], bias[width:]), 2)
        if deltas:
            query, key, value = (
                part + self._split(low_rank(source, *deltas[name]), 1)[0] if name in deltas else part
                for name, part, source in (("q", query, asking), ("k", key, x), ("v", value, x))
            )
        together = attend(query, key, value, visible).transpose(1, 2).flatten(2)
        mixed: Tensor = self.out_proj(together)
        return mixed + low_rank(together, *deltas["o"]) if "o" in deltas else mixed


class Mlp(nn.Module):
    """Two layers; OpenAI's x sigmoid(1.702 x) is silu(1.702 x) / 1.702.

    Where weights are cast they take up both factors, which spares passes over what is large.
    """

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.quick = shape.activation == "quick_gelu"
        self.approximate = "tanh" if shape.activation == "gelu_pytorch_tanh" else "none"
        self.c_fc = CastLinear(shape.width, shape.hidden)
        self.c_proj = CastLinear(shape.hidden, shape.width)
        if self.quick:
            self.c_fc.factors, self.c_proj.factors = (QUICK_GELU, QUICK_GELU), (1 / QUICK_GELU, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.activate(self.c_fc(x)))
        return out

    def activate(self, x: Tensor) -> Tensor:
        if not self.quick:
            return F.gelu(x, approximate=self.approximate)
        return F.silu(x) if torch.is_autocast_enabled(x.device.type) else x * torch.sigmoid(QUICK_GELU * x)


class Block(nn.Module):
    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.attn = Attention(shape.width, shape.heads)
        self.ln_1 = nn.LayerNorm(shape.width, shape.epsilon)
        self.mlp = Mlp(shape)
        self.ln_2 = nn.LayerNorm(shape.width, shape.epsilon)

    def forward(
        self, x: Tensor, visible: Tensor | None = None, rows: Tensor | None = None, change: Change = UNCHANGED
    ) -> Tensor:
        """Apply the block to x, n x T x width.

        visible: boolean, broadcast to n x heads x T x T. rows: compute only these positions.
        """
        normal = self.ln_1(x)
        mixed = self.attn(normal, visible, rows, change.deltas)
        x = (x if rows is None else take_rows(x, rows)) + mixed
        out: Tensor = x + self.mlp(self.ln_2(x))
        if change.beside is None:
            return out
        return out + change.beside(normal if rows is None else take_rows(normal, rows))


class Transformer(nn.Module):
    """A stack of blocks that takes prompts.

    - `rows` (n positions): the last block computes only these; the result is n x 1 x width;
    - `appended` (layers x [n x] P x width): deep prompts after the tokens, replaced at each layer
      and removed after the last prompted one (FedPP, VPT-deep);
    - `prepended` (layers x [n x] P x width): prompts in front, added at each of the first layers
      and kept, so that the sequence grows by P each time (one layer for ViLT's input prompts, six
      for missing-aware prompts);
    - `changes` (for each layer): an adapter parallel to the block (pFedMMA), and changes of its
      attention's projections of low rank (LoRA).
    """

    def __init__(self, shape: StackShape, block: type[Block] = Block) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(block(shape) for _ in range(shape.layers))

    def forward(
        self,
        x: Tensor,
        *,
        causal: bool = False,
        key_mask: Tensor | None = None,
        rows: Tensor | None = None,
        appended: Tensor | None = None,
        prepended: Tensor | None = None,
        changes: Sequence[Change] = (),
    ) -> Tensor:
        """Apply all blocks to x, n x T x width.

        key_mask: n x T, True where a token may be attended to (prompts always may).
        """
        count, length, _ = x.shape
        last = len(self.resblocks) - 1
        for layer, block in enumerate(self.resblocks):
            if appended is not None and layer < appended.shape[0]:
                x = torch.cat([x[:, :length], appended[layer].expand(count, -1, -1)], 1)
            elif appended is not None:
                x = x[:, :length]
            if prepended is not None and layer < prepended.shape[0]:
                x = torch.cat([prepended[layer].expand(count, -1, -1), x], 1)
            chosen = rows if layer == last else None
            visible = _visible(x.shape[1], x.device, causal, key_mask, chosen)
            x = block(x, visible, chosen, changes[layer] if changes else UNCHANGED)
        return x[:, :length] if appended is not None else x


def _visible(
    length: int, device: torch.device, causal: bool, key_mask: Tensor | None, rows: Tensor | None
) -> Tensor | None:
    """Return which key each query may attend to, or None if all may.

    The mask is broadcast to n x heads x queries x keys.
    """
    visible = None
    if causal:
        positions = torch.arange(length, device=device)
        queries = positions[:, None] if rows is None else rows[:, None, None, None]
        visible = positions <= queries
    if key_mask is not None:
        # Prompts come before the tokens, so a mask that is too short is padded on the left.
        key_mask = F.pad(key_mask, (length - key_mask.shape[1], 0), value=True)[:, None, None, :]
        visible = key_mask if visible is None else visible & key_mask
    return visible
