"""Six ways to share low-rank factors: what travels, what clients begin with, how updates merge.

The change of a projection is B A, with A (r x width) and B (width x r) for all layers and targets
of a tower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedvl.methods.roles import Given, Private, Role, Shape, Shared
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

Pair = tuple[Tensor, Tensor]  # A, B


@dataclass(frozen=True)
class Factors:
    """The shapes of the factors of each tower, and how they are drawn."""

    towers: dict[str, tuple[int, int]]  # layers and width
    targets: int
    ranks: tuple[int, ...]  # that clients take in turn
    like: Tensor  # of the dtype and device of all factors
    seed: int

    @property
    def largest(self) -> int:
        return max(self.ranks)

    def drawn(self, rank: int, generator: torch.Generator) -> Tensors:
        """Draw A uniformly within 1 / sqrt(width), and make B = 0."""
        factors: Tensors = {}
        for tower, (layers, width) in self.towers.items():
            a = torch.empty(layers, self.targets, rank, width)
            a = a.uniform_(-(width**-0.5), width**-0.5, generator=generator)
            factors[f"{tower}.A"] = a.to(self.like)
            factors[f"{tower}.B"] = torch.zeros(layers, self.targets, width, rank).to(self.like)
        return factors

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of factors of any rank that occurs."""
        shapes: dict[str, Shape] = {}
        for tower, (layers, width) in self.towers.items():
            rank = range(1, max(self.largest, width) + 1)
            shapes[f"{tower}.A"] = (layers, self.targets, rank, width)
            shapes[f"{tower}.B"] = (layers, self.targets, width, rank)
        return shapes


class FedIT:
    """Zhang et al. (2024): A and B are averaged apart, which is not the mean of the products."""

    shared: ClassVar[tuple[str, ...]] = ("A", "B")
    ranked: ClassVar[bool] = False  # whether clients may have different ranks

    def __init__(self, factors: Factors) -> None:
        self.factors = factors

    def roles(self) -> dict[str, Role]:
        return {}

    def join(self, generator: torch.Generator) -> Tensors:
        return {}

    def hand_out(self, shared: Tensors, client: int) -> Tensors:
        return shared

    def merge(self, before: Pair, updates: Sequence[Pair], weights: Sequence[float]) -> Pair:
        shares = [(weight * a, weight * b) for weight, (a, b) in zip(weights, updates, strict=True)]
        return torch.stack([a for a, _ in shares]).sum(0), torch.stack([b for _, b in shares]).sum(0)


class FFA(FedIT):
    """Sun et al. (2024): A stays as drawn, the same for all clients; B is averaged."""

    shared = ("B",)


class FedSA(FedIT):
    """Guo et al. (2025): A is averaged, and each client keeps its own B."""

    shared = ("A",)

    def roles(self) -> dict[str, Role]:
        return {f"{tower}.B": Private(trained=True) for tower in self.factors.towers}

    def join(self, generator: torch.Generator) -> Tensors:
        drawn = self.factors.drawn(self.factors.largest, generator)
        return {name: factor for name, factor in drawn.items() if name.endswith("B")}


class HetLoRA(FedIT):
    """Cho et al. (2024): updates are padded with zeros and weighted by the norm of their product.

    A client of a smaller rank takes the first rows and columns. Self-pruning is left out.
    """

    ranked = True

    def roles(self) -> dict[str, Role]:
        return {name: Shared(needs="each", shape=shape) for name, shape in self.factors.shapes().items()}

    def rank(self, client: int) -> int:
        return self.factors.ranks[client % len(self.factors.ranks)]

    def hand_out(self, shared: Tensors, client: int) -> Tensors:
        rank = self.rank(client)
        return {
            name: (factor[..., :rank, :] if name.endswith("A") else factor[..., :rank]).contiguous()
            for name, factor in shared.items()
        }

    def merge(self, before: Pair, updates: Sequence[Pair], weights: Sequence[float]) -> Pair:
        return padded(updates, self.factors.largest)


class FlexLoRA(HetLoRA):
    """Bai et al. (2024): the mean of the products is factorised again (SVD), best factors first.

    A client takes as many of them as its rank.
    """

    def merge(self, before: Pair, updates: Sequence[Pair], weights: Sequence[float]) -> Pair:
        products = [weight * b @ a for weight, (a, b) in zip(weights, updates, strict=True)]
        return factorised(torch.stack(products).sum(0), self.factors.largest)


class FLoRA(HetLoRA):
    """Wang et al. (2024): the server stacks all factors, the exact sum of the products.

    Clients add the stack and begin with fresh factors, drawn once for each client. If a stack had
    more rows than W, the product itself is sent in its place.
    """

    def roles(self) -> dict[str, Role]:
        given = {f"stack.{name}": Given(shape) for name, shape in self.factors.shapes().items()}
        return {**super().roles(), **given}

    def hand_out(self, shared: Tensors, client: int) -> Tensors:
        fresh = self.factors.drawn(self.rank(client), torch_generator(self.factors.seed, "fedlora", client))
        return {**fresh, **{f"stack.{name}": factor for name, factor in shared.items()}}

    def merge(self, before: Pair, updates: Sequence[Pair], weights: Sequence[float]) -> Pair:
        kept = [(before, 1.0)] if before[1].any() else []  # at first it is 0
        return stacked([*kept, *zip(updates, weights, strict=True)])


VARIANTS: dict[str, type[FedIT]] = {
    "fedit": FedIT,
    "ffa": FFA,
    "fedsa": FedSA,
    "flora": FLoRA,
    "hetlora": HetLoRA,
    "flexlora": FlexLoRA,
}


def stacked(weighted: Sequence[tuple[Pair, float]]) -> Pair:
    """Return factors of the weighted sum of products; beyond full rank, that sum and 1."""
    a = torch.cat([a for (a, _), _ in weighted], -2)
    b = torch.cat([weight * b for (_, b), weight in weighted], -1)
    if a.shape[-2] <= a.shape[-1]:
        return a, b
    total = b @ a
    return total, torch.eye(a.shape[-1]).to(total).expand_as(total).clone()


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
