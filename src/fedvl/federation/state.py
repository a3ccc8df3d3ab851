"""The state of a round by names: shared, last and private tensors, and the best so far."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fedvl.tensors import ByClient, Tensors, unflatten

Record = dict[str, Any]
BEST = "best/"  # before the names of the best round's tensors, in the journal of a later round


def best_round(records: Sequence[Record]) -> int | None:
    """Return the first round with the highest accuracy on validation images; None without them."""
    known = [record for record in records if record.get("validation") is not None]
    return int(max(known, key=lambda record: record["validation"])["round"]) if known else None


def chosen_round(tensors: Tensors) -> Tensors:
    """Return the tensors of the best round of a journal's newest round, which may be the newest."""
    older = {name.removeprefix(BEST): tensor for name, tensor in tensors.items() if name.startswith(BEST)}
    return older or tensors


class State(NamedTuple):
    """What the journal holds of a round."""

    shared: Tensors
    last: ByClient
    private: ByClient


def read_state(tensors: Tensors, device: torch.device | str) -> State:
    """Sort the tensors of a round by owner, and place them."""
    owners: dict[str, Tensors] = {"shared": {}, "kept": {}, "": {}}
    for key, tensor in tensors.items():
        owner, name = key.split("/", 1)
        known = owner in ("shared", "kept")
        owners[owner if known else ""][name if known else key] = tensor.to(device)
    return State(owners["shared"], unflatten(owners["kept"]), unflatten(owners[""]))
