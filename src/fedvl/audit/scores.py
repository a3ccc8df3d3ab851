"""Scores of membership: how much of a candidate's signature is in an item of a message.

Larger means likelier. No score knows what an item is: each compares tensors alone, so that it
applies to every method.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.candidates import Signature
from fedvl.audit.messages import LOW_BITS
from fedvl.seeding import torch_generator

COVARIANCE_RIDGES = (0.01, 1.0, 100.0)  # of a covariance, as shares of its mean eigenvalue
FLOORS = (1e-4, 1e-2)  # of singular values, as shares of the largest
TINY = 1e-12
MAX_COLUMNS = 32  # in which rows are compared number by number
MAX_ROWS, FEW_ROWS = 256, 8  # of a message, and of a signature, that are compared with each other


class Item:
    """One item: its candidates' signatures, and what the scores of all messages have in common."""

    def __init__(self, name: str, signature: Signature, labels: Tensor, known: slice) -> None:
        self.name, self.labels, self.known = name, labels, known
        self.part = signature.part
        # in units of its usual length, so that no score depends on how an item is scaled
        self.scale = 1.0
        if LOW_BITS not in name:
            self.scale = (
                float(signature.delta[self.known].double().flatten(1).norm(dim=1).square().mean().sqrt()) or 1.0
            )
        self.raw, self.delta = signature.raw / self.scale, signature.delta / self.scale

    @cached_property
    def varies(self) -> bool:
        """Whether the item depends on the candidate at all."""
        return bool((self.raw - self.raw[0]).any())

    @cached_property
    def flat(self) -> Tensor:
        return self.delta.flatten(1).float()

    @cached_property
    def informative(self) -> Tensor:
        """The rows of the signatures that depend on the candidate."""
        varying = (self.raw - self.raw[:1]).abs().amax((0, 2)) > 0
        return torch.nonzero(varying)[:FEW_ROWS, 0]

    # --- whitening

    @cached_property
    def common(self) -> Tensor | None:
        """An orthonormal basis of what images of a class share; None of few numbers."""
        own, labels = self.flat[self.known], self.labels[self.known]
        classes = torch.unique(labels)
        if self.flat.shape[1] <= 2 * len(classes):
            return None
        basis: Tensor = torch.linalg.qr(torch.stack([own[labels == c].mean(0) for c in classes]).T)[0]
        return basis

    @cached_property
    def apart(self) -> Tensor:
        """The signatures without what classes have in common."""
        if self.common is None:
            return self.flat - self.flat[self.known].mean(0)
        return self.flat - self.flat @ self.common @ self.common.T

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues of the covariance, its directions, and where all candidates are on these."""
        rest, labels = self.apart[self.known], self.labels[self.known]
        means = torch.zeros(int(labels.max()) + 1, rest.shape[1]).index_add(0, labels, rest)
        rest = (rest - (means / torch.bincount(labels)[:, None].clamp(min=1))[labels]) / len(labels) ** 0.5
        values, vectors = torch.linalg.eigh(rest @ rest.T)
        kept = values > 1e-6 * float(values[-1])
        turned = normalize(vectors.T[kept] @ rest, dim=1)
        return values[kept], turned, self.apart @ turned.T

    @cached_property
    def lengths(self) -> list[Tensor]:
        """The length of each candidate's signature in the whitened space, for each ridge."""
        values, _, there = self.spectrum
        left = (self.apart.square().sum(1) - there.square().sum(1)).clamp(min=0)
        return [
            (left / ridge + (there.square() / (values + ridge)).sum(1)).clamp(min=TINY).sqrt() for ridge in self.ridges
        ]

    @cached_property
    def ridges(self) -> list[float]:
        return [share * float(self.spectrum[0].mean()) for share in COVARIANCE_RIDGES]

    # --- scores of the first so many candidates against one message

    def scores(self, message: Tensor, centre: Tensor | None, count: int) -> Iterator[tuple[str, Tensor]]:
        message, same_width = (message / self.scale).float(), message.shape[1] == self.part.shape[1]
        rows = some_rows(message)[:, self.part.columns] if same_width else message[:0]
        if LOW_BITS in self.name:
            if len(rows):
                yield "equal", self.equal_share(rows, count)
            return
        if tuple(message.shape) == self.part.shape:
            part = message[self.part.rows][:, self.part.columns]
            common = 0 if centre is None else (centre[self.part.rows][:, self.part.columns] / self.scale).float()
            change = (part - common).flatten()
            yield "cosine", normalize(self.flat[:count], dim=1) @ change
            if len(self.spectrum[0]):
                yield from self.whitened(change, count)
            if len(part) > 1:
                yield from self.spanned(part, count)
            if len(self.part.columns) > 1:
                yield "nearest change of a row", self.nearest_row(part - common, self.moved[:count])
        if len(rows) and len(self.part.columns) > 1:
            yield "nearest row", self.nearest_row(rows, self.raw[:count, self.informative].float())
        yield "nearest number", self.nearest_number(message, count)

    def whitened(self, change: Tensor, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yield matched filters in the covariance of the signatures, for each ridge."""
        values, turned, there = self.spectrum
        if self.common is not None:
            change = change - self.common @ (self.common.T @ change)
        along = turned @ change
        left = self.apart[:count] @ (change - along @ turned)
        for share, ridge, length in zip(COVARIANCE_RIDGES, self.ridges, self.lengths, strict=True):
            yield f"whitened {share:g}", (left / ridge + there[:count] @ (along / (values + ridge))) / length[:count]

    def spanned(self, message: Tensor, count: int) -> Iterator[tuple[str, Tensor]]:
        """Yield how well rows, or columns, of a message span those of a signature (leverage)."""
        columns, sizes, rows = torch.linalg.svd(message, full_matrices=False)
        rank = int((sizes > FLOORS[0] * sizes[0]).sum())
        delta, total = self.delta[:count].float(), self.flat[:count].square().sum(1).clamp(min=TINY)
        if not sizes[0] > 0:
            return
        sides = [("rows", delta @ rows.T, 1)] if rank < message.shape[1] or len(message) == message.shape[1] else []
        sides += [("columns", columns.T @ delta, 2)] if rank < len(message) != message.shape[1] else []
        for side, there, over in sides:
            inside = there.square().sum(over)  # candidates x directions
            outside = (total - inside.sum(1)).clamp(min=0)
            for floor in FLOORS:
                leverage = (inside / (sizes / sizes[0] + floor)).sum(1) + outside / floor
                yield f"span of {side} {floor:g}", -(leverage / total).clamp(min=TINY).log()

    @cached_property
    def moved(self) -> Tensor:
        """The rows of the signatures less what they have in common."""
        rows = self.raw[:, self.informative].float()
        return rows - rows[self.known].mean(0)

    def nearest_row(self, message: Tensor, known: Tensor) -> Tensor:
        """Return how near the nearest row of a message is to a row of each signature."""
        likeness = normalize(known, dim=2) @ normalize(message, dim=1).T
        return -(1 - likeness.flatten(1).amax(1)).clamp(min=1e-6).log()

    def equal_share(self, message: Tensor, count: int) -> Tensor:
        """Return the largest share of equal numbers of a signature's row and a message's row."""
        columns = torch.randperm(message.shape[1], generator=torch_generator(0, "columns"))[:MAX_COLUMNS]
        known = self.raw[:count, self.informative][:, :, columns]
        best = torch.zeros(count)
        for row in message[:, columns]:
            best = torch.maximum(best, (known == row).float().mean(2).amax(1))
        return best

    @cached_property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """Numbers of the signatures that depend on the candidate, and how far they spread."""
        flat = self.raw.flatten(1)
        varying = torch.nonzero((flat - flat[:1]).abs().amax(0) > 0)[:, 0]
        if len(varying) > MAX_COLUMNS:
            varying = varying[torch.randperm(len(varying), generator=torch_generator(0, "numbers"))[:MAX_COLUMNS]]
        known = flat[:, varying].float().contiguous()
        return known, known[self.known].std(0).clamp(min=TINY)

    def nearest_number(self, message: Tensor, count: int) -> Tensor:
        """Return how near numbers of the signature are to some number of the message."""
        known, spread = self.numbers[0][:count], self.numbers[1]
        ordered = message.flatten().sort().values
        place = torch.searchsorted(ordered, known).clamp(max=len(ordered) - 1)
        distance = torch.minimum((ordered[place] - known).abs(), (ordered[(place - 1).clamp(min=0)] - known).abs())
        return -(distance / spread + 1e-6).log().mean(1)


def some_rows(message: Tensor) -> Tensor:
    if len(message) <= MAX_ROWS:
        return message
    return message[torch.randperm(len(message), generator=torch_generator(0, "rows"))[:MAX_ROWS]]
