"""Clients in chunks: those of one train in one kernel, with tensors of the same shapes.

A client with fewer samples is padded and masked; one with fewer batches stops earlier: clients are
sorted by their number of samples, so those still moving are a prefix, and a prefix of a tensor is
a view.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.federation.stacks import Column, Folded, SampleRows, Stack
from fedvl.methods.roles import Roles
from fedvl.tensors import IntArray, Tensors

ClientRows = IntArray  # client, samples it trains on, number of its stack, row in it: one column each

LABELS = "labels"  # the private tensor that replaces a client's labels; -1: not trained on


class Chunk(NamedTuple):
    """Clients that train in one kernel, who has most to train on first."""

    clients: list[int]
    used: list[int]  # samples that each trains on
    private: Tensors  # stacked; with a row per sample, padded to one more than the largest client has
    begins: Sequence[Tensors]  # one state for all, or each client's own


class Done(NamedTuple):
    """What training leaves of a chunk, in its order of clients."""

    clients: list[int]
    sent: dict[str, Column]
    private: list[Stack]
    losses: Tensor


def share_out_to_chunks(
    stacks: Sequence[Stack],
    rows: SampleRows,
    role: Roles,
    size: int,
    shared: Tensors,
    own: Mapping[int, Tensors] | None,
) -> list[Chunk]:
    """Share clients out to chunks; all begin from the shared tensors, or each from its ``own``."""
    groups: dict[object, list[ClientRows]] = {}
    for number, stack in enumerate(stacks):
        for shapes, places in places_of(number, stack, rows, role, own):
            groups.setdefault(shapes, []).append(places)
    chunks = []
    for group in groups.values():
        found = np.concatenate(group, axis=1)
        client, used, number, row = found[:, np.lexsort((found[0], -found[1]))]
        for first in range(0, len(client), size):
            some = slice(first, first + size)
            members = client[some].tolist()
            largest = int(rows.sizes_known[members].max())
            private = stacked_private(number[some], row[some], stacks, role.per_sample, largest)
            begins = [own[member] for member in members] if own else [shared]
            chunks.append(Chunk(members, used[some].tolist(), private, begins))
    return chunks


def places_of(
    number: int, stack: Stack, rows: SampleRows, role: Roles, own: Mapping[int, Tensors] | None
) -> Iterable[tuple[object, ClientRows]]:
    """Return the places of clients that have samples, by the shapes of their tensors."""
    shapes = frozenset((name, t.shape[1:]) for name, t in stack.tensors.items() if name not in role.per_sample)
    clients = np.array(stack.clients, dtype=np.int64)
    used = rows.sizes_known[clients]
    if LABELS in stack.tensors:
        used = (stack.tensors[LABELS] >= 0).sum(1).cpu().numpy()
    places = np.stack([clients, used, np.full_like(clients, number), np.arange(len(clients))])[:, used > 0]
    if own is None:
        return [(shapes, places)] if places.size else []
    handed = [frozenset((name, tensor.shape) for name, tensor in own[client].items()) for client in places[0]]
    return [((shapes, kind), places[:, [each == kind for each in handed]]) for kind in set(handed)]


def stacked_private(
    numbers: IntArray, rows: IntArray, stacks: Sequence[Stack], per_sample: Collection[str], largest: int
) -> Tensors:
    """Stack private tensors; pad those with a row per sample to one more than the largest."""
    stacked: Tensors = {}
    for number in np.unique(numbers).tolist():
        places = np.flatnonzero(numbers == number)
        for name, tensor in stacks[number].tensors.items():
            shape = tensor.shape[1:]
            long = (largest + 1, *shape[1:]) if name in per_sample else shape
            if name not in stacked:
                stacked[name] = tensor.new_zeros(len(numbers), *long)
            target = stacked[name][:, : shape[0]] if name in per_sample else stacked[name]
            here, there = (torch.from_numpy(index).to(tensor.device) for index in (places, rows[places]))
            target[here] = tensor[there]
    return stacked


def same_form(known: Tensor, column: Tensor) -> bool:
    return known.shape[1:] == column.shape[1:] and known.dtype == column.dtype


def add_columns(
    whole: dict[str, Column | Folded], part: Mapping[str, Column], rows: Tensor, weights: Tensor, count: int
) -> None:
    """Write a chunk's columns to their rows of the whole: one tensor, while shapes agree."""
    for name, column in part.items():
        known = whole.get(name)
        if isinstance(known, Folded):
            assert isinstance(column, Tensor), "what is summed has one shape"
            known.add(column, weights, rows)
            continue
        if known is None and isinstance(column, Tensor):
            known = whole[name] = column.new_empty(count, *column.shape[1:])
        if isinstance(known, Tensor) and isinstance(column, Tensor) and same_form(known, column):
            first, last = int(rows[0]), int(rows[-1])
            in_a_row = last - first == len(rows) - 1 and bool((rows.diff() == 1).all())
            known[slice(first, last + 1) if in_a_row else rows.to(column.device)] = column
            continue
        each = whole[name] = list(known) if known is not None else [torch.empty(0)] * count
        for row, tensor in zip(rows.tolist(), column, strict=True):
            each[row] = tensor
