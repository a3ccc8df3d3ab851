"""Class texts with a learned context: the text features of "[context] NAME." for every class.

``texts = ClassTexts(encoder, class_names, context=16)``; ``texts.start(generator)`` draws a context
(16 x width), ``texts.features(context)`` returns unit vectors (classes x d),
``texts.scores(context, images)`` scaled cosines (rows x classes), for one client; the engine
batches over clients.

CLIP's tower is causal, so start token and context do not depend on the name: they run once, beside
the names' tokens, which are a fifth of all for 16 context tokens and short names. Other towers read
every text in full. Long lists run in chunks, each cut to its longest name and recomputed in the
backward pass, so that memory grows with the number of classes by their features alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.errors import FedVLError
from fedvl.methods.parts.cosines import cosine_scores
from fedvl.models.attention import mix, multiply
from fedvl.models.clip import Clip, DualEncoder
from fedvl.models.transformer import Block, cast, take_rows

CONTEXT_DEVIATION = 0.02  # standard deviation of a context before training (CoOp)
CLASSES_AT_ONCE = 100

QueryKeyValue = tuple[Tensor, Tensor, Tensor]


class NameChunk(NamedTuple):
    """Names of similar length."""

    tokens: Tensor  # n x (1 + T)
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
        tokens = encoder.tokenise([f"{name}." for name in class_names])
        device = encoder.positional_embedding.device
        tokens = tokens.to(device)
        ends = encoder.ends(tokens)
        with torch.no_grad():
            self.first = encoder.embed_tokens(tokens[0, : encoder.starts])
            embedded = encoder.embed_tokens(encoder.tokenise([words]).to(device))[0, encoder.starts : -1]
        self.encoder, self.context = encoder, context or len(embedded)
        self.words = embedded.repeat(-(-self.context // max(1, len(embedded))), 1)[: self.context]
        check_room(encoder, class_names, ends, self.context)
        with torch.no_grad():
            order = ends.argsort(stable=True)
            self.places = order.argsort()  # where the features of each class are found again
            cut = [(tokens[rows, : int(ends[rows].max()) + 1], ends[rows]) for rows in torch.split(order, at_once)]
            self.chunks = [NameChunk(part, encoder.embed_tokens(part[:, 1:]), places - 1) for part, places in cut]

    def start(self, generator: torch.Generator) -> Tensor:
        """Draw a context (context x width) from N(0, 0.02), or return the words."""
        if len(self.words):
            return self.words.clone()
        drawn = torch.randn(self.context, self.encoder.text_width, generator=generator)
        return CONTEXT_DEVIATION * drawn.to(self.first.device)

    def features(self, context: Tensor) -> Tensor:
        """Return unit class texts (classes x d) with a ``context`` (P x width) for all classes."""
        if len(self.chunks) == 1:
            found = self.read(self.chunks[0], context)
        else:
            found = torch.cat([recomputed(partial(self.read, chunk), context) for chunk in self.chunks])
        return normalize(found[self.places].to(context.dtype), dim=-1)

    def scores(self, context: Tensor, images: Tensor) -> Tensor:
        """Return scale cos(image, class text) for unit ``images``: rows x classes."""
        texts = self.features(context)
        return cosine_scores(self.encoder.logit_scale, images, texts.to(images.dtype))

    def read(self, chunk: NameChunk, context: Tensor) -> Tensor:
        """Return the text embeddings (n x d) of a chunk of names behind start and context."""
        if isinstance(self.encoder, Clip):
            return self.read_behind_prefix(self.encoder, chunk, context)
        return self.encoder.encode_text(chunk.tokens, context)

    def read_behind_prefix(self, encoder: Clip, chunk: NameChunk, context: Tensor) -> Tensor:
        """Return the same from a causal tower, through which start and context go once."""
        count, length, _ = chunk.words.shape
        before, device = 1 + len(context), chunk.words.device
        positions = encoder.positional_embedding
        prefix = torch.cat([self.first, context]) + positions[:before]
        words = chunk.words + positions[before : before + length]
        x = torch.cat([prefix, words.flatten(0, 1)])  # as rows: all products of a layer in one
        of_prefix = causal(before, device)
        of_words = torch.cat([torch.ones(length, before, dtype=torch.bool, device=device), causal(length, device)], 1)
        *layers, last = blocks(encoder)
        for block in layers:
            start, behind = self.project(block, x, before, count)
            mixed = [mix(*start, of_prefix), mix(*behind, of_words)]
            x = finish_block(block, x, torch.cat([as_rows(each) for each in mixed]))
        _, (query, key, value) = self.project(last, x, before, count)
        ends = chunk.ends[:, None, None, None]  # only the end token is read from here on
        query = query.gather(-2, ends.expand(-1, query.shape[1], 1, query.shape[-1]))
        seen = torch.arange(before + length, device=device) <= before + ends
        x = take_rows(x[before:].reshape(count, length, -1), chunk.ends)[:, 0]
        x = finish_block(last, x, as_rows(mix(query, key, value, seen)))
        embedded: Tensor = encoder.ln_final(x) @ encoder.text_projection
        return embedded

    def project(self, block: Block, x: Tensor, before: int, count: int) -> tuple[QueryKeyValue, QueryKeyValue]:
        """Return queries, keys, values of the prefix (1 x heads x P x width) and of the words.

        Words (n x heads x T x width) also have the prefix's keys and values before their own.
        """
        attention = block.attn
        projected = multiply(block.ln_1(x), *cast(attention, attention.in_proj_weight, attention.in_proj_bias))
        parts = projected.reshape(len(x), 3, attention.heads, -1).unbind(1)
        start = [part[:before].transpose(0, 1)[None] for part in parts]
        query, *own = [part[before:].reshape(count, -1, *part.shape[1:]).transpose(1, 2) for part in parts]
        key, value = [torch.cat([s.expand(count, -1, -1, -1), o], 2) for s, o in zip(start[1:], own, strict=True)]
        return (start[0], start[1], start[2]), (query, key, value)


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


def blocks(encoder: Clip) -> list[Block]:
    return list(encoder.transformer.resblocks)  # type: ignore[arg-type]


def causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def as_rows(mixed: Tensor) -> Tensor:
    """Return attention's mixed values (n x heads x T x head width) as rows: n T x width."""
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def finish_block(block: Block, x: Tensor, mixed: Tensor) -> Tensor:
    """Return a block's output for its input and attention's mixed values (rows x width)."""
    x = x + block.attn.out_proj(mixed)
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
