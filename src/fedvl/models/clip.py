"""CLIP: an image tower (ViT or modified ResNet) and a text tower with one embedding space.

Parameters have OpenAI's names, so that OpenAI's and open_clip's files load unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedvl.errors import FedVLError
from fedvl.models.base import FrozenEncoder
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.resnet import ResNetShape
from fedvl.models.tokenizer import TextTokenizer
from fedvl.models.transformer import Block, Change, StackShape, Transformer


@dataclass(frozen=True)
class ViTShape:
    stack: StackShape
    patch: int
    grid: int

    @property
    def image_size(self) -> int:
        return self.patch * self.grid

    def tower(self, dim: int) -> nn.Module:
        return VisionTransformer(self, dim)


@dataclass(frozen=True)
class ClipShape:
    dim: int
    vision: ViTShape | ResNetShape
    text: StackShape
    vocabulary: int
    context_length: int


class VisionTransformer(nn.Module):
    def __init__(self, shape: ViTShape, dim: int) -> None:
        super().__init__()
        width, epsilon = shape.stack.width, shape.stack.epsilon
        self.conv1 = nn.Conv2d(3, width, shape.patch, shape.patch, bias=False)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty(shape.grid**2 + 1, width))
        self.ln_pre = nn.LayerNorm(width, epsilon)
        self.transformer = Transformer(shape.stack)
        self.ln_post = nn.LayerNorm(width, epsilon)
        self.proj = nn.Parameter(torch.empty(width, dim))

    def embed(self, pixels: Tensor) -> Tensor:
        """Return the tokens, n x (1 + M) x width, with positions: the class token first."""
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        return torch.cat([self.class_embedding.expand(x.shape[0], 1, -1), x], 1) + self.positional_embedding

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
        rows = None if patches else torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        x = self.transformer(self.ln_pre(x), rows=rows, appended=prompts, changes=changes)
        features: Tensor = self.ln_post(x) @ self.proj
        return features if patches else features[:, 0]


class DualEncoder(FrozenEncoder):
    """Encoder with separate image and text towers; gradients flow only to the prompts passed in.

    `vision_layers` is the number of layers that can take prompts: 0 for a ResNet tower. `patches`
    is M, the number of patch features. `starts` is the number of tokens before a text's words.
    """

    starts = 1
    block: type[Block] = Block  # of the text tower

    def __init__(self, name: str, shape: ClipShape, preprocessing: Preprocessing, tokenizer: TextTokenizer) -> None:
        super().__init__(name, shape, preprocessing, tokenizer)
        self.dim = shape.dim
        self.image_size = shape.vision.image_size
        self.text_width, self.text_layers = shape.text.width, shape.text.layers
        self.context_length = shape.context_length
        self.visual = shape.vision.tower(shape.dim)
        if isinstance(shape.vision, ViTShape):
            self.vision_width, self.vision_layers = shape.vision.stack.width, shape.vision.stack.layers
        else:
            self.vision_width, self.vision_layers = shape.vision.features, 0
        self.patches = shape.vision.grid**2
        # not initialised: on the meta device that would import a compiler, which takes seconds
        self.token_embedding = nn.Embedding(
            shape.vocabulary, shape.text.width, _weight=torch.empty(shape.vocabulary, shape.text.width)
        )
        self.positional_embedding = nn.Parameter(torch.empty(shape.context_length, shape.text.width))
        self.transformer = Transformer(shape.text, self.block)
        self.log_scale = nn.Parameter(torch.empty(()))

    @cached_property
    def logit_scale(self) -> float:
        """Factor of the cosine similarity before the softmax: 100 in OpenAI's weights.

        Read once: in a step it would make the GPU wait.
        """
        return float(self.log_scale.exp())

    def encode_image(
        self,
        pixels: Tensor,
        prompts: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        changes: Sequence[Change] = (),
    ) -> Tensor:
        """Return n x d features, not of unit length, of normalised pixels, n x 3 x H x W.

        prompts: layers x P x width (or layers x n x P x width), appended after the patch tokens,
        replaced at each layer and removed after the last prompted layer.
        tokens: P x width (or n x P x width), after the patches before the first norm, and kept.
        changes: what is added to the blocks, one for each.
        """
        self._check_prompts(prompts)
        if tokens is None and not changes:
            features: Tensor = self.visual(pixels, prompts, False)
        elif self.vision_layers:
            features = self.visual(pixels, prompts, False, tokens, changes)
        else:
            raise FedVLError(
                f"The image tower of {self.name} takes no prompts, adapters or low-rank changes; use a model with a ViT."
            )
        return features

    def encode_patches(self, pixels: Tensor, prompts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the pooled features, n x d, and the projected patch features, n x M x d."""
        self._check_prompts(prompts)
        features: Tensor = self.visual(pixels, prompts, True)
        return features[:, 0], features[:, 1:]

    def embed_patches(self, pixels: Tensor) -> Tensor:
        """Return a ViT's patch tokens, n x M x width, with positions, before the first norm."""
        tokens: Tensor = self.visual.embed(pixels)  # type: ignore[operator]
        return tokens[:, -self.patches :]

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return the n x L x width embeddings of n x L tokens, without positions."""
        embedded: Tensor = self.token_embedding(tokens)
        return embedded

    def encode_text(self, tokens: Tensor, context: Tensor | None = None, *, changes: Sequence[Change] = ()) -> Tensor:
        """Return n x d features, not of unit length, of n x L tokens.

        context: P x width (shared by all texts) or n x P x width, inserted before the words, after
        the start token if there is one, so that the words move up by P positions.
        changes: what is added to the blocks, one for each.
        """
        raise NotImplementedError

    def ends(self, tokens: Tensor) -> Tensor:
        """Return the position of each text's end token."""
        return (tokens == self.tokenizer.end).int().argmax(-1)

    def place(self, tokens: Tensor, context: Tensor | None) -> Tensor:
        """Return embedded tokens with a context before the words, and positions added."""
        x = self.embed_tokens(tokens)
        if context is not None:
            x = torch.cat([x[:, : self.starts], context.expand(x.shape[0], -1, -1), x[:, self.starts :]], 1)
        length = x.shape[1]
        if length > self.context_length:
            raise FedVLError(
                f"A text of {tokens.shape[1]} tokens and a context of {length - tokens.shape[1]} do not fit into the "
                f"{self.context_length} positions of {self.name}: use a shorter context or shorter class names."
            )
        return x + self.positional_embedding[:length]

    def _check_prompts(self, prompts: Tensor | None) -> None:
        if prompts is not None and prompts.shape[0] > self.vision_layers:
            raise FedVLError(
                f"{self.name} takes visual prompts at {self.vision_layers} layers at most, not at {prompts.shape[0]}: "
                "choose fewer layers, or a model with a ViT image tower."
            )


class Clip(DualEncoder):
    """CLIP: its text tower is causal, and read at the end token."""

    def __init__(self, name: str, shape: ClipShape, preprocessing: Preprocessing, tokenizer: TextTokenizer) -> None:
        super().__init__(name, shape, preprocessing, tokenizer)
        self.ln_final = nn.LayerNorm(shape.text.width, shape.text.epsilon)
        self.text_projection = nn.Parameter(torch.empty(shape.text.width, shape.dim))

    def encode_text(self, tokens: Tensor, context: Tensor | None = None, *, changes: Sequence[Change] = ()) -> Tensor:
        x, ends = self.place(tokens, context), self.ends(tokens)
        if context is not None:
            ends = ends + context.shape[-2]
        x = self.transformer(x, causal=True, rows=ends, changes=changes)
        features: Tensor = self.ln_final(x)[:, 0] @ self.text_projection
        return features
