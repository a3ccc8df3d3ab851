"""Candidates of membership, what each does to a message, and imitated clients that hold some.

A candidate's signature is what a client sends that has this image alone, or beside a few others
less what it sends without it. Imitated clients are drawn from the attacker's own images.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.audit.evidence import Evidence
from fedvl.audit.imitation import ONE_STEP, Began, CannotImitateError, draw_rows, imitate, joined
from fedvl.audit.messages import LOW_BITS, NUMBERS, REPORTED, WEIGHT, Seen
from fedvl.methods.base import Samples
from fedvl.seeding import numpy_generator, torch_generator
from fedvl.tensors import Tensors

MAX_MEMBERS, FEW_MEMBERS = 100, 10  # images of one client that are tried
COMPANY, LITTLE_COMPANY = 15, 3  # images beside a candidate
SHADOWS, FEWER_SHADOWS, FEW_SHADOWS = 48, 16, 8  # imitated clients; where training runs an encoder on texts, on images
SKEW = 0.3  # of the classes of every second imitated client, as Dirichlet's parameter
MAX_STACKED = 2**23  # numbers of one item of all candidates that are compared


class Candidates(NamedTuple):
    """Images that are tried: the attacker's own, those that nobody trained on, and clients' own."""

    samples: Samples
    labels: Tensor
    trial: slice  # the first half of the attacker's own, of which clients are imitated
    outside: slice
    held: slice
    known: slice  # the other half, by which candidates are told from what images have in common
    rows: Tensor  # of the clients' own, in the training split


class Part(NamedTuple):
    """The part of an item that is compared: all of it, or rows and columns of a large one."""

    shape: tuple[int, int]
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], most: int) -> "Part":
        generator = torch_generator(0, "part", *shape)
        columns = torch.randperm(shape[1], generator=generator)[:most].sort().values
        rows = torch.randperm(shape[0], generator=generator)[: max(1, most // len(columns))].sort().values
        return cls(shape, rows, columns)

    @property
    def share(self) -> float:
        """The share of the item's numbers that is compared."""
        return len(self.rows) * len(self.columns) / (self.shape[0] * self.shape[1])


class Signature(NamedTuple):
    """What each candidate does to one item: as it is sent, and less what is sent without it."""

    raw: Tensor  # candidates x rows x columns
    delta: Tensor
    part: "Part"


class Shadow(NamedTuple):
    """An imitated client: which of the attacker's images it has, and what it sends."""

    rows: Tensor
    seen: list[Seen]


def candidates_of(evidence: Evidence) -> Candidates:
    return evidence.once("candidates", lambda: collect(evidence))


def collect(evidence: Evidence) -> Candidates:
    """Collect the candidates: of each audited client a few images."""
    limit = FEW_MEMBERS if evidence.slow else MAX_MEMBERS
    rows = [
        draw_rows(own, min(limit, len(own)), torch_generator(0, "members", client))
        for client in evidence.clients
        if len(own := evidence.rows(client))
    ]
    held = torch.unique(torch.cat(rows))
    trained, true = evidence.training.samples.take(held), evidence.labels(held)
    labelled = Samples(trained.inputs, torch.where(true >= 0, true, trained.labels.clamp(min=0)))
    trial, known = own_halves(evidence)
    places = torch.arange(len(evidence.own), device=held.device)
    first, second = (evidence.own.take(places[half]) for half in (trial, known))
    samples = joined(evidence, first, evidence.outside, labelled, second)
    outside = trial.stop + len(evidence.outside)
    return Candidates(
        samples,
        samples.labels.cpu(),
        trial=trial,
        outside=slice(trial.stop, outside),
        held=slice(outside, outside + len(held)),
        known=slice(outside + len(held), len(samples)),
        rows=held.cpu(),
    )


def own_halves(evidence: Evidence) -> tuple[slice, slice]:
    """Return the attacker's images that clients are imitated of, and those to compare with."""
    return slice(0, len(evidence.own) // 2), slice(len(evidence.own) // 2, len(evidence.own))


# --- rounds


def began_of(evidence: Evidence, client: int | None) -> list[Began]:
    """Return what rounds begin with, for all or for a client with tensors of its own."""
    own = {message.round_index: message.before for message in evidence.messages if message.client == client}
    return [(index, own.get(index, happened.before)) for index, happened in enumerate(evidence.rounds)]


def tailored(evidence: Evidence, seen: Seen) -> int | None:
    """Return the client if it was handed tensors of its own, and None if it began as all did."""
    before = evidence.rounds[seen.round_index].before
    alike = all(
        name in before and before[name].shape == each.shape and torch.equal(before[name], each)
        for name, each in seen.before.items()
    )
    return None if alike else seen.client


# --- signatures


def signatures_of(evidence: Evidence, client: int | None, index: int) -> dict[tuple[str, str], Signature]:
    """Return the candidates' signatures in a round, by item and kind (alone or beside others)."""
    return evidence.once(("signatures", client), lambda: replay(evidence, client))[index]


def replay(evidence: Evidence, client: int | None) -> list[dict[tuple[str, str], Signature]]:
    """Replay every round with each candidate."""
    began = began_of(evidence, client)
    found: list[dict[tuple[str, str], Signature]] = [{} for _ in began]
    failed: CannotImitateError | None = None
    for kind in kinds_of(evidence):
        try:
            made = signatures_with(evidence, began, kind == "beside")
        except CannotImitateError as error:  # as of a client with one image
            failed = error
            continue
        for index, signatures in enumerate(made):
            found[index] |= {(name, kind): signature for name, signature in signatures.items()}
    if failed and not any(found):
        raise failed
    return found


def kinds_of(evidence: Evidence) -> list[str]:
    """Return with what company candidates are tried: both, unless an encoder runs in each step."""
    if evidence.slow or evidence.method.through_encoder:
        return ["alone" if evidence.method.scope == "row" else "beside"]
    return ["alone", "beside"]


def signatures_with(evidence: Evidence, began: Sequence[Began], accompanied: bool) -> list[dict[str, Signature]]:
    """Return each candidate's signature by round, alone or beside a few other images."""
    candidates = candidates_of(evidence)
    samples, count = candidates.samples, len(candidates.samples)
    size = min(LITTLE_COMPANY if evidence.slow else COMPANY, len(evidence.own)) if accompanied else 0
    company = torch.arange(count, count + size)
    if accompanied:
        device = evidence.own.labels.device
        samples = joined(evidence, samples, evidence.own.take(torch.arange(size, device=device)))
    rows = [torch.cat([torch.tensor([row]), company]) for row in range(count)]
    rows += [company] if accompanied else []  # and without any candidate
    stacks = [Stacks(count) for _ in began]
    for seen in imitate(evidence, samples, rows, began, ONE_STEP, every_image=True):
        for stack, each in zip(stacks, seen, strict=True):
            stack.add(each.items)
    return [stack.finish(accompanied) for stack in stacks]


class Stacks:
    """Items of many imitated clients, one row for each; of a large item a part."""

    def __init__(self, count: int) -> None:
        self.count, self.most = count, max(1, MAX_STACKED // count)
        self.found: dict[str, list[Tensor]] = {}
        self.parts: dict[str, Part] = {}

    def add(self, items: Tensors) -> None:
        for name, tensor in items.items():
            matrix = as_matrix(tensor)
            shape = (matrix.shape[0], matrix.shape[1])
            if name not in self.parts:
                self.parts[name] = Part.of(shape, self.most)
            part = self.parts[name]
            if shape == part.shape:
                self.found.setdefault(name, []).append(matrix[part.rows][:, part.columns])

    def finish(self, with_base: bool) -> dict[str, Signature]:
        """Return the signatures of items of one shape; the base comes last."""
        found = {}
        for name, matrices in self.found.items():
            if len(matrices) >= self.count:
                raw = torch.stack(matrices[: self.count])
                less = with_base and len(matrices) > self.count and LOW_BITS not in name
                found[name] = Signature(raw, raw - matrices[-1] if less else raw, self.parts[name])
        return found


def as_matrix(tensor: Tensor) -> Tensor:
    """Return an item as rows: a vector is one row, further dimensions are rows too."""
    wide = tensor.detach().cpu()
    return wide.reshape(-1, wide.shape[-1]) if wide.dim() > 1 else wide.reshape(1, -1)


# --- imitated clients


def shadows_of(evidence: Evidence, client: int | None, half: str = "trial") -> list[Shadow]:
    """Return imitated clients, as large as the audited ones, of half of the attacker's images."""

    def make() -> list[Shadow]:
        rows = list(shadow_rows(evidence, half))
        seen = imitate(evidence, evidence.own, rows, began_of(evidence, client), noise="run")
        return [Shadow(own, each) for own, each in zip(rows, seen, strict=True)]

    return evidence.once(("shadows", client, half), make)


def shadow_rows(evidence: Evidence, half: str) -> Iterator[Tensor]:
    """Draw the images of imitated clients: every second one has unequal classes."""
    among = own_halves(evidence)[half == "known"]
    labels, generator = evidence.own.labels[among].cpu().numpy(), numpy_generator(0, "shadows", half)
    sizes = [len(evidence.rows(client)) for client in evidence.clients if len(evidence.rows(client))]
    if evidence.summed:
        sizes = [evidence.typical_size]  # the server does not know the size of each client
    count = FEW_SHADOWS if evidence.slow else FEWER_SHADOWS if evidence.method.through_encoder else SHADOWS
    for number in range(count):
        size = max(1, min(sizes[number % len(sizes)], len(labels) // 2))
        shares = np.full(evidence.classes, 1.0)
        if number % 2:
            shares = generator.dirichlet(np.full(evidence.classes, SKEW))
        chances = shares[labels] / np.bincount(labels, minlength=evidence.classes)[labels] + 1e-6
        drawn = generator.choice(len(labels), size, replace=False, p=chances / chances.sum())
        yield torch.from_numpy(drawn) + among.start


def together(evidence: Evidence, shadows: list[Shadow]) -> list[Shadow]:
    """Return sums over several imitated clients each, of at most half of the attacker's images."""
    half = len(evidence.own) // 4
    taking_part = sum(1 for rows in evidence.training.rows if len(rows))
    count = max(1, min(evidence.summands or taking_part, len(shadows) // 2, half // max(evidence.typical_size, 1)))
    generator = numpy_generator(0, "sums")
    chosen = [generator.choice(len(shadows), count, replace=False) for _ in shadows]
    statistics = frozenset(evidence.method.role.statistics)
    return [sum_of([shadows[number] for number in some], statistics) for some in chosen]


def sum_of(shadows: list[Shadow], statistics: frozenset[str] = frozenset()) -> Shadow:
    """Add up imitated clients as a secure sum does: means of changes, sums of numbers."""
    seen = []
    for parts in zip(*(shadow.seen for shadow in shadows), strict=True):
        weights = torch.stack([part.beside[WEIGHT] for part in parts])
        shares = weights / weights.sum().clamp(min=1e-12)
        change = {
            name: torch.stack([share * part.change[name] for share, part in zip(shares, parts, strict=True)]).sum(0)
            for name in parts[0].change
        }
        summed = [
            name for name in parts[0].beside if name.startswith(REPORTED) or name in NUMBERS or name in statistics
        ]
        beside = {name: torch.stack([part.beside[name] for part in parts]).sum(0) for name in summed}
        seen.append(parts[0]._replace(change=change, beside=beside))
    return Shadow(torch.unique(torch.cat([shadow.rows for shadow in shadows])), seen)
