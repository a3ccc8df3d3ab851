"""LoRA in a federation: low-rank changes of attention's projections, and six ways to merge them.

Every adapted projection W becomes W + s B A with A (r x width), B (width x r) and s = alpha / r of
the largest rank (Hu et al., 2022). A starts uniform within 1/sqrt(width), B at 0, so that a run
starts as zero-shot. The text tower alone is adapted by default: image features are computed once.

- fedit (Zhang et al., 2024): A and B are averaged apart, which is not the mean of the products;
- ffa (Sun et al., 2024): A stays as drawn, the same for all; B is averaged;
- fedsa (Guo et al., 2025): A is averaged, each client keeps its own B;
- flora (Wang et al., 2024): the server stacks all factors, which is the exact sum of the products.
  Clients add the stack and begin with fresh factors, drawn once for each client;
- hetlora (Cho et al., 2024): a client of a smaller rank takes the first rows and columns; updates
  are padded with zeros and weighted by the norm of their product. Self-pruning is left out;
- flexlora (Bai et al., 2024): the products are averaged and factorised again (SVD), the best
  factors first, of which each client takes as many as its rank.

Where a stack would have more rows than W, the product itself is sent in its place.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import normalize, pad

from fedvl.errors import FedVLError
from fedvl.methods.base import Method, Options, Samples, Task, Update
from fedvl.methods.parts.prompts import CLASSES_AT_ONCE, recomputed
from fedvl.methods.roles import Given, Private, Role, Shape, Shared
from fedvl.models.transformer import Change, Deltas
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

RANKED = ("flora", "hetlora", "flexlora")  # variants in which clients may have different ranks


class FedLoRAOptions(Options):
    variant: Literal["fedit", "ffa", "fedsa", "flora", "hetlora", "flexlora"] = "fedit"
    """How clients' low-rank factors are merged."""
    rank: int = Field(8, ge=1, le=4096)
    """Rank of the change of each adapted projection."""
    ranks: tuple[int, ...] = ()
    """Ranks that clients take in turn under flora, hetlora and flexlora; every client has `rank` if
    empty.
    """
    alpha: float = Field(16.0, gt=0)
    """Scaling of the change: its factor is alpha / rank."""
    targets: tuple[Literal["q", "k", "v", "o"], ...] = Field(("q", "v"), min_length=1)
    """Attention projections that are adapted."""
    towers: Literal["text", "both"] = "text"
    """Adapted towers; with both, images pass through the model in every step."""

    @model_validator(mode="after")
    def ranks_fit(self) -> "FedLoRAOptions":
        if self.ranks and (self.variant not in RANKED or min(self.ranks) < 1 or max(self.ranks) > 4096):
            raise ValueError(f"ranks from 1 to 4096 are for {', '.join(RANKED)}")
        return self


class FedLoRA(Method):
    labels = "candidates"
    vocabulary = "any"
    scope = "row"
    through_encoder = True
    options: FedLoRAOptions
    presets = {
        "paper": {
            "training": {"optimiser": "adamw", "learning_rate": 2e-4, "weight_decay": 0.01, "batch_size": 32},
        }
    }

    def __init__(self, options: FedLoRAOptions, task: Task) -> None:
        super().__init__(options, task)
        clip = task.clip
        self.towers = {"text": (clip.text_layers, clip.text_width)}
        if options.towers == "both":
            if not clip.vision_layers:
                raise FedVLError(f"The image tower of {clip.name} is no ViT; use --set method.towers=text.")
            self.towers["image"] = (clip.vision_layers, clip.vision_width)
        device = task.text_embeddings.device
        texts = [template.replace("{}", name) for template in task.templates for name in task.class_names]
        self.tokens = clip.tokenise(texts).to(device)
        self.largest = max(options.ranks, default=options.rank)
        self.same = self.factors(self.largest, torch_generator(task.seed, "fedlora"))  # as all parties draw them (ffa)

    @classmethod
    def forms(cls, options: FedLoRAOptions) -> tuple[str, ...]:
        return ("features",) if options.towers == "text" else ("pixels",)

    def roles(self) -> dict[str, Role]:
        roles: dict[str, Role] = {}
        for tower, (layers, width) in self.towers.items():
            for factor in ("A", "B"):
                name, shape = f"{tower}.{factor}", self.shape(factor, layers, width)
                if self.options.variant in RANKED:
                    roles[name] = Shared(needs="each", shape=shape)
                if self.options.variant == "flora":
                    roles[f"stack.{name}"] = Given(shape)
            if self.options.variant == "fedsa":
                roles[f"{tower}.B"] = Private(trained=True)
        return roles

    def shape(self, factor: str, layers: int, width: int) -> Shape:
        """Return the shape of a factor of any rank that occurs."""
        rank = range(1, max(self.largest, width) + 1)
        sizes: Shape = (rank, width) if factor == "A" else (width, rank)
        return (layers, len(self.options.targets), *sizes)

    def notes(self) -> list[str]:
        if self.options.variant != "fedsa":
            return []
        return ["Every client keeps its own B: without one, as in the closed protocol, the model is zero-shot."]

    def start(self, generator: torch.Generator) -> Tensors:
        drawn = self.factors(self.largest, generator)
        kept = {"ffa": ("B",), "fedsa": ("A",)}.get(self.options.variant, ("A", "B"))
        return {name: tensor for name, tensor in drawn.items() if name.endswith(kept)}

    def join(self, samples: Samples, generator: torch.Generator) -> Tensors:
        if self.options.variant != "fedsa":
            return {}
        return {name: tensor for name, tensor in self.factors(self.options.rank, generator).items() if name[-1] == "B"}

    def factors(self, rank: int, generator: torch.Generator) -> Tensors:
        """Draw A and make B for all layers and targets of each tower."""
        drawn: Tensors = {}
        for tower, (layers, width) in self.towers.items():
            shape = (layers, len(self.options.targets), rank, width)
            a = torch.empty(shape).uniform_(-(width**-0.5), width**-0.5, generator=generator)
            drawn[f"{tower}.A"] = a.to(self.task.text_embeddings)
            drawn[f"{tower}.B"] = torch.zeros(*shape[:2], width, rank).to(self.task.text_embeddings)
        return drawn

    def hand_out(self, shared: Tensors, last: dict[int, Tensors], client: int) -> Tensors:
        """Return factors of the client's rank: fresh ones beside the stack, or the first ones."""
        if self.options.variant not in RANKED:
            return shared
        ranks = self.options.ranks or (self.options.rank,)
        rank = ranks[client % len(ranks)]
        if self.options.variant == "flora":
            fresh = self.factors(rank, torch_generator(self.task.seed, "fedlora", client))
            return {**fresh, **{f"stack.{name}": tensor for name, tensor in shared.items()}}
        return {
            name: (tensor[..., :rank, :] if name.endswith("A") else tensor[..., :rank]).contiguous()
            for name, tensor in shared.items()
        }

    def merge(self, shared: Tensors, updates: Sequence[Update]) -> Tensors:
        merged: Tensors = {}
        for tower, (_, width) in self.towers.items():
            pairs = [(update.tensors[f"{tower}.A"], update.tensors[f"{tower}.B"]) for update in updates]
            weights = torch.tensor([update.weight for update in updates], dtype=torch.float64)
            shares = [float(share) for share in weights / weights.sum()]
            if self.options.variant == "flora":
                own = (shared[f"{tower}.A"], shared[f"{tower}.B"])
                before = [(own, 1.0)] if own[1].any() else []  # at first it is nothing
                a, b = stacked([*before, *zip(pairs, shares, strict=True)], width)
            elif self.options.variant == "hetlora":
                a, b = padded(pairs, self.largest)
            else:
                products = [share * b @ a for share, (a, b) in zip(shares, pairs, strict=True)]
                a, b = factorised(torch.stack(products).sum(0), self.largest)
            merged |= {f"{tower}.A": a, f"{tower}.B": b}
        return merged

    def deltas(self, tensors: Tensors, tower: str) -> list[Deltas]:
        """Return the changes of each layer of a tower; none where B is unknown."""
        if f"{tower}.B" not in tensors:
            return []
        a, b = tensors.get(f"{tower}.A", self.same[f"{tower}.A"]), tensors[f"{tower}.B"]
        if f"stack.{tower}.A" in tensors:
            a = torch.cat([a, tensors[f"stack.{tower}.A"]], -2)
            b = torch.cat([b, tensors[f"stack.{tower}.B"]], -1)
        b = b * (self.options.alpha / self.largest)
        return [
            {target: (a[layer, place], b[layer, place]) for place, target in enumerate(self.options.targets)}
            for layer in range(len(a))
        ]

    def texts(self, tensors: Tensors) -> Tensor:
        """Return the class texts as unit vectors, the mean over templates."""
        deltas = self.deltas(tensors, "text")
        if not deltas:
            return self.task.text_features
        flat = [part for layer in deltas for pair in layer.values() for part in pair]
        read = partial(self.read, list(deltas[0]))
        parts = torch.split(self.tokens, CLASSES_AT_ONCE)
        found = [recomputed(partial(read, part), *flat) if len(parts) > 1 else read(part, *flat) for part in parts]
        embedded = torch.cat(found)
        embedded = embedded.reshape(len(self.task.templates), -1, embedded.shape[-1])
        return normalize((embedded if len(embedded) == 1 else normalize(embedded, dim=-1)).mean(0), dim=-1)

    def read(self, targets: Sequence[str], tokens: Tensor, *flat: Tensor) -> Tensor:
        """Return text embeddings, given the factors of all layers in a row."""
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        count = len(targets)
        deltas = [dict(zip(targets, pairs[at : at + count], strict=True)) for at in range(0, len(pairs), count)]
        return self.task.clip.encode_text(tokens, changes=[Change(deltas=layer) for layer in deltas])

    def predict(self, tensors: Tensors, inputs: Tensors) -> Tensor:
        texts = self.texts(tensors)
        if self.options.towers == "text":
            images = inputs["features"]
        else:
            pixels = self.task.clip.normalise(inputs["pixels"]).to(texts.dtype)
            changes = [Change(deltas=layer) for layer in self.deltas(tensors, "image")]
            images = normalize(self.task.clip.encode_image(pixels, changes=changes), dim=-1)
        with torch.autocast(images.device.type, enabled=False):  # the scale would magnify what 16 bits lose
            kind = next(iter(tensors.values())).dtype
            return self.scale * images.to(kind) @ texts.to(kind).T


Pair = tuple[Tensor, Tensor]


def stacked(weighted: Sequence[tuple[Pair, float]], width: int) -> Pair:
    """Return factors of the weighted sum of products; beyond rank ``width``, that sum and 1."""
    a = torch.cat([a for (a, _), _ in weighted], -2)
    b = torch.cat([share * b for (_, b), share in weighted], -1)
    if a.shape[-2] <= width:
        return a, b
    total = b @ a
    return total, torch.eye(width).to(total).expand_as(total).clone()


def padded(pairs: Sequence[Pair], rank: int) -> Pair:
    """Return the mean of factors padded to a rank, weighted by the norms of their products."""
    norms = torch.stack([(b @ a).norm() for a, b in pairs])
    shares = torch.where(norms.sum() > 0, norms / norms.sum(), 1 / len(pairs))
    wide = [(pad(a, (0, 0, 0, rank - a.shape[-2])), pad(b, (0, rank - b.shape[-1]))) for a, b in pairs]
    a, b = (torch.stack([pair[place] for pair in wide]) for place in (0, 1))
    return torch.einsum("k,k...->...", shares, a), torch.einsum("k,k...->...", shares, b)


def factorised(product: Tensor, rank: int) -> Pair:
    """Return the nearest factors of a rank, the largest first; A has unit rows."""
    left, sizes, right = torch.linalg.svd(product.double())
    rank = min(rank, len(right[0, 0]))
    left, sizes, right = left[..., :rank], sizes[..., :rank], right[..., :rank, :]
    strongest = left.gather(-2, left.abs().argmax(-2, keepdim=True)).sign()  # the sign of a pair is free
    return (right * strongest.mT).to(product), (left * strongest * sizes[..., None, :]).to(product)
