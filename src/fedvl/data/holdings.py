"""Rows that clients hold out, that newcomers or absent clients have, or that are the server's."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.config import Experiment
from fedvl.data.assemble import UNIT_COLUMNS
from fedvl.data.stores import Split
from fedvl.errors import FedVLError
from fedvl.seeding import numpy_generator
from fedvl.tensors import IntArray


def hold_out_validation(clients: list[IntArray], experiment: Experiment) -> tuple[list[IntArray], list[IntArray]]:
    """Split each client's rows into those to train on and those to validate with."""
    share = experiment.evaluation.validation
    kept, held = list[IntArray](), list[IntArray]()
    for client, rows in enumerate(clients):
        count = min(max(1, round(share * len(rows))), max(0, len(rows) - 1)) if share else 0
        drawn = numpy_generator(experiment.seed, "validation", client).permutation(len(rows))
        kept.append(rows[np.sort(drawn[count:])] if count else rows)
        held.append(rows[np.sort(drawn[:count])])
    return kept, held


def of_newcomers(rows: list[Tensor], experiment: Experiment) -> list[Tensor]:
    """Return what newcomers have, and nothing of the others; nothing at all if there are none."""
    first = experiment.data.clients - experiment.data.newcomers
    return [own if client >= first else own[:0] for client, own in enumerate(rows)] if experiment.data.newcomers else []


def without(rows: list[Tensor], left: Tensor) -> list[Tensor]:
    """Remove the images of absent clients from all rows."""
    return [own[~torch.isin(own, left)] for own in rows] if len(left) else rows


def take_root(rows: list[Tensor], total: int, experiment: Experiment) -> tuple[Tensor, list[Tensor]]:
    """Take the server's own images, of those that no client has if they suffice."""
    held, wanted = torch.cat(rows), experiment.federation.root_images
    everything = torch.arange(total, device=held.device)
    free = everything[~torch.isin(everything, held)]
    source = free if len(free) >= wanted else held
    if source is held and len(held) <= wanted:
        raise FedVLError(f"The server's own {wanted} images would be all there are; lower federation.root_images.")
    chosen = numpy_generator(experiment.seed, "root").choice(len(source), wanted, replace=False)
    root = source[torch.from_numpy(chosen).to(source.device)].sort().values
    return root, [own[~torch.isin(own, root)] for own in rows]


class Units(NamedTuple):
    """The unit of each training image, by a column of its source."""

    column: str
    numbers: IntArray

    def most(self, clients: Sequence[IntArray]) -> int:
        """Return the most images that one unit has at a client."""
        return max((int(np.bincount(self.numbers[rows]).max()) for rows in clients if len(rows)), default=0)

    def together(self, clients: Sequence[IntArray]) -> list[IntArray]:
        """Give all images of a unit to the client that has most of them, of equals to the first."""
        held = np.zeros((int(self.numbers.max(initial=-1)) + 1, len(clients)), np.int64)
        for client, rows in enumerate(clients):
            np.add.at(held[:, client], self.numbers[rows], 1)
        owner = held.argmax(1)
        everything = np.sort(np.concatenate([np.array([], np.int64), *clients]))
        return [everything[owner[self.numbers[everything]] == client] for client in range(len(clients))]


def units_of(split: Split, kept: IntArray, wanted: str | None) -> Units | None:
    """Return the units by the wanted column, or by one that the source has; None without any."""
    column = wanted or next((name for name in UNIT_COLUMNS if name in split.units), None)
    if column is None:
        return None
    if column not in split.units:
        raise FedVLError(
            f"The training images have no column '{column}' that says whose they are; add it to the manifest or table, as one "
            f"of {', '.join(UNIT_COLUMNS)}, or leave --unit out."
        )
    values = [split.units[column][row] for row in kept]
    if wanted and (missing := values.count("")):
        raise FedVLError(
            f"{missing} training images have no {column}, so that what one {column} adds is not bounded; fill in the "
            "column, or leave the images out."
        )
    names = [value or f"\0{place}" for place, value in enumerate(values)]  # an image of nobody is by itself
    return Units(column, np.unique(names, return_inverse=True)[1].astype(np.int64))
