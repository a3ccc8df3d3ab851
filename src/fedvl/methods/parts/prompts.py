"""Class texts with a learned context: the text features of "[context] NAME." for every class.

``texts = ClassTexts(encoder, class_names, context=16)``; ``texts.start(generator)`` draws a context
(16 x width), ``texts.features(context)`` returns unit vectors (classes x d),
``texts.scores(context, images)`` scaled cosines (rows x classes), for one client; the engine
batches over clients.

The tower is causal, so start token and context do not depend on the name: they run once, and only
the names' tokens run for every class: a fifth of all, for 16 context tokens and short names. Long
lists run in chunks, each cut to its longest name and recomputed in the backward pass, so that
memory grows with the number of classes by their features alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from fedvl.errors import FedVLError
from fedvl.models.clip import DualEncoder
from fedvl.models.transformer import Block, take_rows

SPREAD = 0.02  # standard deviation of a context before training (CoOp)
CLASSES_AT_ONCE = 100


class Chunk(NamedTuple):
    """Names of similar length."""

    words: Tensor  # embedded tokens without the start token, n x T x width
    ends: Tensor  # index of each name's end token


class ClassTexts:
    def __init__(
        self,
        encoder: DualEncoder,
        class_names: Sequence[str],
        context: int | None,
        at_once: int = CLASSES_AT_ONCE,
        words: str = "",
    ) -> None:
        """Prepare a context of so many tokens, which starts as ``words``, repeated to its length.

        Without ``words`` it is drawn; without a length it is as long as they are.
        """
        device = encoder.positional_embedding.device
        tokens = encoder.tokenise([f"{name}." for name in class_names]).to(device)
        end = int(encoder.tokenise([""])[0, -1])
        ends = (tokens == end).int().argmax(-1)
        with torch.no_grad():
            self.first = encoder.embed_tokens(tokens[0, :1])
            embedded = encoder.embed_tokens(encoder.tokenise([words]).to(device))[0, 1:-1]
        self.encoder, self.context = encoder, context or len(embedded)
        self.words = embedded.repeat(-(-self.context // max(1, len(embedded))), 1)[: self.context]
        check_room(encoder, class_names, ends, self.context)
        with torch.no_grad():
            order = ends.argsort(stable=True)
            self.places = order.argsort()  # where the features of each class are found again
            self.chunks = [
                Chunk(encoder.embed_tokens(tokens[rows, 1 : int(ends[rows].max()) + 1]), ends[rows] - 1)
                for rows in torch.split(order, at_once)
            ]

    def start(self, generator: torch.Generator) -> Tensor:
        """Draw a context (context x width) from N(0, 0.02), or return the words."""
        if len(self.words):
            return self.words.clone()
        drawn = torch.randn(self.context, self.encoder.text_width, generator=generator)
        return SPREAD * drawn.to(self.first.device)

    def features(self, context: Tensor) -> Tensor:
        """Return unit class texts (classes x d) with a ``context`` (P x width) for all classes."""
        prefix = self.read_prefix(context)
        if len(self.chunks) == 1:
            found = self.read_words(self.chunks[0], *prefix)
        else:
            found = torch.cat([recomputed(partial(self.read_words, chunk), *prefix) for chunk in self.chunks])
        return normalize(found[self.places].to(context.dtype), dim=-1)

    def scores(self, context: Tensor, images: Tensor) -> Tensor:
        """Return scale cos(image, class text) for unit ``images``: rows x classes."""
        texts = self.features(context)
        with torch.autocast(images.device.type, enabled=False):  # the scale would magnify what 16 bits lose
            return self.encoder.logit_scale * images @ texts.T

    def read_prefix(self, context: Tensor) -> list[Tensor]:
        """Return keys and values (heads x (1 + P) x head width) of start and context, by layer."""
        x = torch.cat([self.first, context])
        x = x + self.encoder.positional_embedding[: len(x)]
        visible = causal(len(x), x.device)
        *layers, last = blocks(self.encoder)
        kept: list[Tensor] = []
        for block in layers:
            query, key, value = project(block, x)
            kept += [key, value]
            shares = (query @ key.mT).masked_fill(~visible, float("-inf")).softmax(-1)
            x = finish_block(block, x, shares @ value)
        return [*kept, *project(last, x)[1:]]

    def read_words(self, chunk: Chunk, *prefix: Tensor) -> Tensor:
        """Return the text embeddings (n x d) of a chunk of names behind the prefix."""
        length, before = chunk.words.shape[1], prefix[0].shape[-2]
        x = chunk.words + self.encoder.positional_embedding[before : before + length]
        visible = causal(length, x.device)
        layers = blocks(self.encoder)
        for layer, block in enumerate(layers):
            query, key, value = project(block, x)
            if layer == len(layers) - 1:  # only the end token is read from here on
                rows = chunk.ends[:, None, None, None]
                query = query.gather(-2, rows.expand(-1, query.shape[1], 1, query.shape[-1]))
                visible = torch.arange(length, device=x.device) <= rows
                x = take_rows(x, chunk.ends)
            to_prefix = torch.einsum("nhtd,hpd->nhtp", query, prefix[2 * layer])
            to_words = (query @ key.mT).masked_fill(~visible, float("-inf"))
            shares = torch.cat([to_prefix, to_words], -1).softmax(-1)
            mixed = torch.einsum("nhtp,hpd->nhtd", shares[..., :before], prefix[2 * layer + 1])
            x = finish_block(block, x, mixed + shares[..., before:] @ value)
        embedded: Tensor = self.encoder.ln_final(x)[:, 0] @ self.encoder.text_projection
        return embedded


def check_room(encoder: DualEncoder, class_names: Sequence[str], ends: Tensor, context: int) -> None:
    longest = int(ends.argmax())
    taken = int(ends[longest]) + 1
    if taken + context > encoder.context_length:
        room = encoder.context_length - taken
        advice = f"use --set method.context={room} or less" if room > 0 else "use shorter class names"
        raise FedVLError(
            f"The class name '{class_names[longest]}' takes {taken} of the {encoder.context_length} text positions of "
            f"{encoder.name}, which leaves no room for a context of {context} tokens; {advice}."
        )


def blocks(encoder: DualEncoder) -> list[Block]:
    return cast(list[Block], list(encoder.transformer.resblocks))


def causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def project(block: Block, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scaled queries, keys, values (... x heads x T x head width) of x (... x T x width)."""
    attention = block.attn
    projected = linear(block.ln_1(x), attention.in_proj_weight, attention.in_proj_bias)
    parts = projected.reshape(*x.shape[:-1], 3, attention.heads, -1).movedim(-3, 0).transpose(-3, -2)
    query, key, value = parts.unbind(0)
    return query * query.shape[-1] ** -0.5, key, value


def finish_block(block: Block, x: Tensor, mixed: Tensor) -> Tensor:
    """Return a block's output for attention's mixed values (... x heads x T x head width)."""
    x = x + block.attn.out_proj(mixed.transpose(-3, -2).flatten(-2))
    out: Tensor = x + block.mlp(block.ln_2(x))
    return out


class Recomputed(torch.autograd.Function):
    """A function whose inner values are recomputed in the backward pass instead of being kept.

    ``torch.utils.checkpoint`` works by hooks, which do not support vmap; this has a rule for it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        device = output.device.type
        ctx.function = inputs[0]
        ctx.precision = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        device, dtype, enabled = ctx.precision  # a backward pass runs outside of the forward pass's autocast
        with torch.autocast(device, dtype, enabled):
            pull = torch.func.vjp(ctx.function, *ctx.saved_tensors)[1]
        return None, *pull(gradients[0])


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    result: Tensor = Recomputed.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return result
