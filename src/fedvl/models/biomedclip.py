"""BiomedCLIP (Zhang et al. 2023): a BERT as text tower beside a plain ViT, in open_clip's files.

BERT's blocks normalise after each sum. Every token sees every other but the padding, and the first
token, [CLS], is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvl.models.clip import ClipShape, DualEncoder, VisionTransformer, ViTShape
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import TextTokenizer
from fedvl.models.transformer import UNCHANGED, Block, Change, take_rows


@dataclass(frozen=True)
class PlainShape(ViTShape):
    """Sizes of a ViT as timm's: a bias in the patches, and no LayerNorm before the blocks."""

    def tower(self, dim: int) -> nn.Module:
        return PlainVisionTransformer(self, dim)


class PlainVisionTransformer(VisionTransformer):
    ln_pre: nn.Module  # type: ignore[assignment]

    def __init__(self, shape: ViTShape, dim: int) -> None:
        super().__init__(shape, dim)
        self.conv1 = nn.Conv2d(3, shape.stack.width, shape.patch, shape.patch)
        self.ln_pre = nn.Identity()


@dataclass(frozen=True)
class BertClipShape(ClipShape):
    hidden: int  # of the projection of texts


class PostNormBlock(Block):
    """A block of BERT."""

    def forward(
        self, x: Tensor, visible: Tensor | None = None, rows: Tensor | None = None, change: Change = UNCHANGED
    ) -> Tensor:
        mixed = self.attn(x, visible, rows, change.deltas)
        own = x if rows is None else take_rows(x, rows)
        x = self.ln_1(own + mixed)
        out: Tensor = self.ln_2(x + self.mlp(x))
        return out if change.beside is None else out + change.beside(own)


class BertClip(DualEncoder):
    block = PostNormBlock

    def __init__(self, name: str, shape: BertClipShape, preprocessing: Preprocessing, tokenizer: TextTokenizer) -> None:
        super().__init__(name, shape, preprocessing, tokenizer)
        self.ln_embedded = nn.LayerNorm(shape.text.width, shape.text.epsilon)
        self.text_hidden = nn.Parameter(torch.empty(shape.text.width, shape.hidden))
        self.text_projection = nn.Parameter(torch.empty(shape.hidden, shape.dim))

    def encode_text(self, tokens: Tensor, context: Tensor | None = None, *, changes: Sequence[Change] = ()) -> Tensor:
        x = self.ln_embedded(self.place(tokens, context))
        # a mask that is too short is padded on the left with what is seen, as [CLS] and a context are
        first = torch.zeros(len(x), dtype=torch.long, device=x.device)
        x = self.transformer(x, key_mask=tokens != self.tokenizer.pad, rows=first, changes=changes)
        features: Tensor = F.gelu(x[:, 0] @ self.text_hidden) @ self.text_projection
        return features
