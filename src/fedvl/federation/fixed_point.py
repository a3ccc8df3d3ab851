"""Sums of clients' tensors in whole numbers: the same bits in every order, in the open or masked.

A number x is counted as round(x * 2^30) in 64 bits. Sums wrap around at 2^64, as masks do; a client
refuses to send what could make the true sum leave that range, so that it is always read correctly.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.methods.roles import Shapes
from fedvl.tensors import Tensors

FRACTION_BITS = 30
RANGE_BITS = 62 - FRACTION_BITS  # of the absolute value of a sum


class SumOfUpdates(NamedTuple):
    """What the server learns of a round: the weighted sum of moves, of weights and of losses."""

    moves: Tensors
    weight: float
    loss: float


def to_whole(values: Tensor, clients: int) -> Tensor:
    """Count values in units of 2^-30; refuse those that a sum over these clients could not hold."""
    most = 2**RANGE_BITS / clients
    if not bool((values.abs() < most).all()):  # NaN is not below either
        raise FedVLError(f"A secure sum of {clients} clients holds numbers below {most:.3g}, and this one is not.")
    return torch.round(values.double() * 2**FRACTION_BITS).long()


def from_whole(total: Tensor) -> Tensor:
    return torch.div(total.double(), 2**FRACTION_BITS)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all numbers in the order of names."""
    return torch.cat([tensors[name].reshape(-1).double() for name in sorted(tensors)] or [torch.zeros(0)]).cpu()


def unflat(numbers: Tensor, shapes: Shapes) -> Tensors:
    """Sort numbers into tensors of these shapes, in the order of names."""
    found, first = {}, 0
    for name in sorted(shapes):
        shape = [size or 0 for size in shapes[name]]
        size = int(torch.Size(shape).numel())
        found[name] = numbers[first : first + size].reshape(shape)
        first += size
    return found


def encode_update(sent: Tensors, received: Tensors, weight: float, loss: float, clients: int) -> Tensor:
    """Return one client's part of the sum: its weighted moves, its weight and its loss."""
    moves = flat({name: (sent[name].double() - received[name].double()) * weight for name in sent})
    return to_whole(torch.cat([moves, torch.tensor([weight, loss], dtype=torch.float64)]), clients)


def decode_updates(total: Tensor, received: Tensors) -> SumOfUpdates:
    numbers = from_whole(total)
    shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in received.items()}
    return SumOfUpdates(unflat(numbers[:-2], shapes), float(numbers[-2]), float(numbers[-1]))


def moved(received: Tensors, total: SumOfUpdates) -> Tensors:
    """Return the shared tensors after the mean of the clients' moves."""
    return {
        name: (tensor.double() + (total.moves[name] / total.weight).to(tensor.device)).to(tensor.dtype)
        for name, tensor in received.items()
    }


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)
