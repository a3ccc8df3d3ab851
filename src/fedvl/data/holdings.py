"""Rows that clients hold out, that newcomers or absent clients have, or that are the server's."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.config import Experiment
from fedvl.errors import FedVLError
from fedvl.seeding import numpy_generator

Integers = NDArray[np.int64]


def hold_out(clients: list[Integers], experiment: Experiment) -> tuple[list[Integers], list[Integers]]:
    """Split each client's rows into those to train on and those to validate with."""
    share = experiment.evaluation.validation
    kept, held = list[Integers](), list[Integers]()
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
    """Take the images of those who take no part out of everyone's rows."""
    return [own[~torch.isin(own, left)] for own in rows] if len(left) else rows


def take_root(rows: list[Tensor], total: int, experiment: Experiment) -> tuple[Tensor, list[Tensor]]:
    """Take the server's own images, of those that no client has if they suffice."""
    held, wanted = torch.cat(rows), experiment.federation.root_images
    everything = torch.arange(total, device=held.device)
    free = everything[~torch.isin(everything, held)]
    source = free if len(free) >= wanted else held
    if len(source) <= wanted:
        raise FedVLError(f"The server's own {wanted} images would be all there are; lower federation.root_images.")
    chosen = numpy_generator(experiment.seed, "root").choice(len(source), wanted, replace=False)
    root = source[torch.from_numpy(chosen).to(source.device)].sort().values
    return root, [own[~torch.isin(own, root)] for own in rows]
