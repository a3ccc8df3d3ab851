"""SigLIP and SigLIP2 of a fixed resolution (Zhai et al. 2023; Tschannen et al. 2025).

Unlike CLIP, an image is pooled by an attention head instead of a class token; a text is padded to
all positions, every token sees every other, the padding too, and the last position is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvl.models.attention import attend, multiply
from fedvl.models.clip import ClipShape, DualEncoder, ViTShape
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import TextTokenizer
from fedvl.models.transformer import Attention, Change, Mlp, StackShape, Transformer, cast


@dataclass(frozen=True)
class PooledShape(ViTShape):
    """Sizes of a ViT whose patches are pooled by attention."""

    def tower(self, dim: int) -> nn.Module:
        return PooledVisionTransformer(self)


class PoolingHead(nn.Module):
    """Attention of one learned query to all patches, and an MLP."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(shape.width))
        self.attn = Attention(shape.width, shape.heads)
        self.ln = nn.LayerNorm(shape.width, shape.epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, patches: bool) -> Tensor:
        """Return the pooled feature, and with `patches` what attention to each alone would give."""
        width = x.shape[-1]
        weight, bias = cast(self.attn, self.attn.in_proj_weight, self.attn.in_proj_bias)
        projected = multiply(self.probe.expand(len(x), 1, -1), weight[:width], bias[:width])
        parts = projected, *multiply(x, weight[width:], bias[width:]).chunk(2, -1)
        query, key, value = (part.reshape(*part.shape[:2], self.attn.heads, -1).transpose(1, 2) for part in parts)
        mixed = attend(query, key, value)
        if patches:
            mixed = torch.cat([mixed, value], 2)
        pooled = self.attn.out_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = pooled + self.mlp(self.ln(pooled))
        return out


class PooledVisionTransformer(nn.Module):
    def __init__(self, shape: PooledShape) -> None:
        super().__init__()
        width = shape.stack.width
        self.conv1 = nn.Conv2d(3, width, shape.patch, shape.patch)
        self.positional_embedding = nn.Parameter(torch.empty(shape.grid**2, width))
        self.transformer = Transformer(shape.stack)
        self.ln_post = nn.LayerNorm(width, shape.stack.epsilon)
        self.head = PoolingHead(shape.stack)

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the tokens, n x M x width, with positions."""
        tokens: Tensor = self.conv1(pixels).flatten(2).transpose(1, 2) + self.positional_embedding
        return tokens

    def forward(
        self,
        pixels: Tensor,
        prompts: Tensor | None,
        patches: bool,
        tokens: Tensor | None = None,
        changes: Sequence[Change] = (),
    ) -> Tensor:
        """Return n x d features, or n x (1 + M) x d with `patches`, the pooled one first."""
        x = self.embed(pixels)
        if tokens is not None:
            x = torch.cat([x, tokens.expand(x.shape[0], -1, -1)], 1)
        features: Tensor = self.head(self.ln_post(self.transformer(x, appended=prompts, changes=changes)), patches)
        return features if patches else features[:, 0]


class Siglip(DualEncoder):
    """SigLIP: a pair's probability is sigmoid(`logit_scale` cosine + `logit_bias`).

    Over classes a bias changes nothing, so that methods need the scale alone.
    """

    starts = 0

    def __init__(self, name: str, shape: ClipShape, preprocessing: Preprocessing, tokenizer: TextTokenizer) -> None:
        super().__init__(name, shape, preprocessing, tokenizer)
        self.ln_final = nn.LayerNorm(shape.text.width, shape.text.epsilon)
        self.text_projection = nn.Linear(shape.text.width, shape.dim)
        self.logit_bias = nn.Parameter(torch.empty(()))

    def encode_text(self, tokens: Tensor, context: Tensor | None = None, *, changes: Sequence[Change] = ()) -> Tensor:
        taken = tokens.shape[1] + (0 if context is None else context.shape[-2])
        padding = max(0, self.context_length - taken)
        x = self.place(F.pad(tokens, (0, padding), value=self.tokenizer.pad), context)
        last = torch.full((len(x),), self.context_length - 1, device=x.device)
        features: Tensor = self.text_projection(self.ln_final(self.transformer(x, rows=last, changes=changes))[:, 0])
        return features
