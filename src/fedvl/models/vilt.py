"""ViLT: text tokens and image patches in one transformer (Kim et al. 2021).

Its steps can be used separately: `embed_text` and `embed_image` return the input tokens
(Fed-PRIME's query is their maximum), `run` applies the blocks with prompts at chosen layers, and
`pool` reads one position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvl.models.base import FrozenEncoder
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import TextTokenizer
from fedvl.models.transformer import StackShape, Transformer


@dataclass(frozen=True)
class ViltShape:
    stack: StackShape
    patch: int
    grid: int
    vocabulary: int
    context_length: int


class FusedEncoder(FrozenEncoder):
    """Encoder of images and texts in one transformer; the images of a batch have one shape."""

    shape: ViltShape

    def __init__(self, name: str, shape: ViltShape, preprocessing: Preprocessing, tokenizer: TextTokenizer) -> None:
        super().__init__(name, shape, preprocessing, tokenizer)
        width, epsilon = shape.stack.width, shape.stack.epsilon
        self.width, self.layers = width, shape.stack.layers
        self.patch, self.grid = shape.patch, shape.grid
        self.image_size = shape.patch * shape.grid
        self.context_length = shape.context_length
        # not initialised: on the meta device that would import a compiler, which takes seconds
        self.token_embedding = nn.Embedding(shape.vocabulary, width, _weight=torch.empty(shape.vocabulary, width))
        self.text_positions = nn.Parameter(torch.empty(shape.context_length, width))
        self.text_type = nn.Parameter(torch.empty(width))
        self.text_norm = nn.LayerNorm(width, epsilon)
        self.patches = nn.Conv2d(3, width, shape.patch, shape.patch)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.image_positions = nn.Parameter(torch.empty(shape.grid**2 + 1, width))
        self.modalities = nn.Parameter(torch.empty(2, width))
        self.transformer = Transformer(shape.stack)
        self.ln_final = nn.LayerNorm(width, epsilon)
        self.pooler = nn.Linear(width, width)

    def for_runs(self, text_length: int | None = None) -> FusedEncoder:
        """Return the encoder that reads square images, and texts of so many positions if given.

        A run keeps its images as one array, so they are cropped to one shape in the middle. Text
        positions are interpolated, as Fed-PRIME's code does from 40 to 128. Weights are shared.
        """
        preprocessing, tokenizer, length = self.preprocessing, self.tokenizer, text_length or self.context_length
        if preprocessing.crop and text_length is None:
            return self
        if text_length is not None:
            tokenizer = tokenizer.of_length(text_length)
        if not preprocessing.crop:
            side = max(1, preprocessing.shorter // self.patch) * self.patch
            preprocessing = replace(preprocessing, shorter=side, crop=side)
        positions = F.interpolate(self.text_positions.T[None], size=length, mode="linear")[0].T.contiguous()
        with torch.device("meta"):
            other = FusedEncoder(self.name, replace(self.shape, context_length=length), preprocessing, tokenizer)
        other.load_state_dict({**self.state_dict(), "text_positions": positions}, assign=True)
        return other.requires_grad_(False).eval()

    def text_mask(self, tokens: Tensor) -> Tensor:
        """Return an n x L mask: True up to and including the first end token."""
        ended = tokens == self.tokenizer.end
        return (ended.int().cumsum(-1) - ended.int()) == 0

    def image_mask(self, pixels: Tensor) -> Tensor:
        """Return an n x (1 + M) mask: True for the class token and all patches."""
        rows, columns = (side // self.patch for side in pixels.shape[-2:])
        return torch.ones(pixels.shape[0], 1 + rows * columns, dtype=torch.bool, device=pixels.device)

    def embed_text(self, tokens: Tensor) -> Tensor:
        """Return n x L x width embeddings, with positions and the text modality added."""
        x = self.token_embedding(tokens) + self.text_type + self.text_positions[: tokens.shape[1]]
        embedded: Tensor = self.text_norm(x) + self.modalities[0]
        return embedded

    def embed_image(self, pixels: Tensor) -> Tensor:
        """Return n x (1 + M) x width embeddings of normalised pixels, n x 3 x H x W."""
        x = self.patches(pixels)
        x = (x + self._positions(*x.shape[-2:])).flatten(2).transpose(1, 2)
        first = (self.class_embedding + self.image_positions[0]).expand(x.shape[0], 1, -1)
        return torch.cat([first, x], 1) + self.modalities[1]

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Return the trained grid of positions, interpolated to 1 x width x rows x columns."""
        grid = self.image_positions[1:].T.reshape(1, -1, self.grid, self.grid)
        if (rows, columns) == (self.grid, self.grid):
            return grid
        return F.interpolate(grid, size=(rows, columns), mode="bilinear", align_corners=True)

    def run(self, embedded: Tensor, mask: Tensor | None = None, prompts: Tensor | None = None) -> Tensor:
        """Apply all blocks and the final LayerNorm to embeddings, n x T x width.

        mask: n x T, False where a token is ignored. prompts: layers x [n x] P x width, prepended at
        each of the first layers and kept, so that the result has layers * P more positions, the
        latest prompts first.
        """
        hidden: Tensor = self.ln_final(self.transformer(embedded, key_mask=mask, prepended=prompts))
        return hidden

    def pool(self, hidden: Tensor, position: int = 0) -> Tensor:
        """Apply ViLT's pooler at one position: n x T x width -> n x width."""
        pooled: Tensor = torch.tanh(self.pooler(hidden[:, position]))
        return pooled

    def encode(
        self,
        tokens: Tensor,
        pixels: Tensor,
        prompts: Tensor | None = None,
        text_mask: Tensor | None = None,
        image_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states and the pooled state of the text's first token, n x width.

        Hidden states are n x (P + L + 1 + M) x width. prompts: P x width (shared by all samples) or
        n x P x width, prepended at the first layer. Masks are True where a token may be attended
        to; by default only padding is ignored.
        """
        embedded = torch.cat([self.embed_text(tokens), self.embed_image(pixels)], 1)
        mask = torch.cat(
            [
                self.text_mask(tokens) if text_mask is None else text_mask,
                self.image_mask(pixels) if image_mask is None else image_mask,
            ],
            1,
        )
        hidden = self.run(embedded, mask, None if prompts is None else prompts[None])
        return hidden, self.pool(hidden, 0 if prompts is None else prompts.shape[-2])
