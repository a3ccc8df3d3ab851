"""Merge updates: what is needed in sum by a rule, what is needed of each by the method."""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch.nn.functional import cosine_similarity

from fedvl.federation.robust import Rule, mean, merged_move
from fedvl.federation.stacks import Updates
from fedvl.methods.base import Method, Update
from fedvl.tensors import ByClient, Tensors


def merge(method: Method, shared: Tensors, updates: Sequence[Update], rule: Rule = mean) -> Tensors:
    """Average what the server needs in sum; let the method merge what it needs of each."""
    summed = [name for name in shared if method.role.needs(name) == "sum"]
    rest = {name: tensor for name, tensor in shared.items() if name not in summed}
    stacked = Updates.of(updates)
    if rule is mean or not summed:
        merged = stacked.mean(summed)
    else:
        moves = moves_of(shared, stacked, summed)
        merged = moved_by(shared, merged_move(rule, moves, moves.new_tensor(stacked.weights)), summed)
    if rest:
        merged |= method.merge(rest, stacked.only(name for name in stacked.columns if name not in summed))
    return {name: merged[name] for name in shared}


def moves_of(shared: Tensors, updates: Updates, names: Sequence[str]) -> torch.Tensor:
    """Return what updates change, one row for each."""
    return torch.cat(
        [(updates.column(name) - shared[name]).double().reshape(len(updates), -1) for name in names], dim=1
    )


def moved_by(shared: Tensors, move: torch.Tensor, names: Sequence[str]) -> Tensors:
    parts = torch.split(move, [shared[name].numel() for name in names])
    return {
        name: (shared[name] + part.reshape(shared[name].shape)).to(shared[name].dtype)
        for name, part in zip(names, parts, strict=True)
    }


def last_updates(method: Method, last: ByClient, updates: Sequence[Update]) -> ByClient:
    """Return every client's last tensors that the method needs kept, in the order of clients."""
    updates = Updates.of(updates)
    kept = updates.only(name for name in updates.columns if method.role.needs(name) == "last")
    if not kept.columns:
        return last
    sent = {update.client: {name: t.clone() for name, t in update.tensors.items()} for update in kept}
    newest = last | {client: tensors for client, tensors in sent.items() if tensors}
    return {client: newest[client] for client in sorted(newest)}


def drift(before: Sequence[Tensors], after: Sequence[Tensors], names: Sequence[str]) -> dict[str, float]:
    """Return figures for each name; private tensors are known only in simulation."""
    figures = {}
    for name in names:
        shapes = {tensors[name].shape if name in tensors else None for tensors in (*before, *after)}
        if len(after) > 1 and len(shapes) == 1 and None not in shapes:
            ends = [tensors[name].double().flatten() for tensors in after]
            moves = torch.stack([end - start[name].double().flatten() for start, end in zip(before, ends, strict=True)])
            together = moves.sum(0).pow(2).sum()
            if together > 0:  # one client may send the others' moves back, and standing still has no direction
                figures[f"drift_diversity_{name}"] = float(moves.pow(2).sum() / together)  # eq. 6
            cosines = [cosine_similarity(one, other, dim=0) for one, other in combinations(ends, 2)]
            figures[f"cosine_distance_{name}"] = float(1 - torch.stack(cosines).mean())
    return figures
