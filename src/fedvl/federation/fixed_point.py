"""Sums of clients' tensors in whole numbers: the same bits in every order, in the open or masked.

A number x is counted as round(x * 2^30) in 64 bits. Sums wrap around at 2^64, as masks do; a client
refuses to send what could make the true sum leave that range, so that it is always read correctly.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.methods.roles import Shape, Shapes
from fedvl.tensors import Tensors, count_elements

FRACTION_BITS = 30
SUMMED_FIGURES = 3  # behind the moves of an update: its weight, its loss, and 1
RANGE_BITS = 62 - FRACTION_BITS  # of the absolute value of a sum


class SumOfUpdates(NamedTuple):
    """What the server learns of a round: sums of weighted moves, weights, losses and clients."""

    moves: Tensors
    weight: float
    loss: float
    trained: float  # clients that had something to train on


def to_whole(values: Tensor, clients: int) -> Tensor:
    """Count values in units of 2^-30; refuse those that a sum over these clients could not hold."""
    most = 2**RANGE_BITS / clients
    if not bool((values.abs() < most).all()):  # NaN is not below either
        raise FedVLError(
            f"A secure sum of {clients} clients holds numbers below {most:.3g}, and this one is not; if training diverged, lower "
            "the learning rate (training.learning_rate)."
        )
    return torch.round(values.double() * 2**FRACTION_BITS).long()


def from_whole(total: Tensor) -> Tensor:
    return torch.div(total.double(), 2**FRACTION_BITS)


def rounding_error(tensors: Mapping[str, Tensor]) -> float:
    """Return how far rounding to whole numbers may move as many numbers together, at most."""
    return 2.0 ** -(FRACTION_BITS + 1) * math.sqrt(count_elements(dict(tensors)))


def flat_statistics(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all numbers in the order of names."""
    return torch.cat([tensors[name].reshape(-1).double() for name in sorted(tensors)] or [torch.zeros(0)]).cpu()


def unflat_statistics(numbers: Tensor, shapes: Shapes) -> Tensors:
    """Sort numbers into tensors of these shapes, in the order of names."""
    found, first = {}, 0
    for name in sorted(shapes):
        shape = fixed_shape(shapes[name])
        found[name] = numbers[first : first + math.prod(shape)].reshape(shape)
        first += math.prod(shape)
    return found


def count_numbers(shapes: Shapes) -> int:
    return sum(math.prod(fixed_shape(shape)) for shape in shapes.values())


def fixed_shape(shape: Shape) -> list[int]:
    """Return a shape without open sizes: sums need equally many numbers from each client."""
    sizes = [size for size in shape if isinstance(size, int)]
    assert len(sizes) == len(shape), "a tensor of any size cannot be summed"
    return sizes


def encode_update(sent: Tensors, received: Tensors, weight: float, loss: float, clients: int) -> Tensor:
    """Return one client's part of the sum: its weighted moves, its weight, its loss and itself."""
    moves = flat_statistics({name: (sent[name].double() - received[name].double()) * weight for name in sent})
    return to_whole(torch.cat([moves, torch.tensor([weight, loss, 1.0], dtype=torch.float64)]), clients)


def no_update(received: Tensors) -> Tensor:
    """Return the part of a client that has nothing to train on, which nobody need know."""
    return torch.zeros(count_elements(received) + SUMMED_FIGURES, dtype=torch.long)


def with_same_figures(part: Tensor, clients: int) -> Tensor:
    """Return a client's part with the figures of any other: weight 1, no loss, and 1."""
    return torch.cat([part[:-SUMMED_FIGURES], to_whole(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), clients)])


def decode_updates(total: Tensor, received: Tensors) -> SumOfUpdates:
    numbers = from_whole(total)
    shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in received.items()}
    weight, loss, trained = numbers[-SUMMED_FIGURES:].tolist()
    return SumOfUpdates(unflat_statistics(numbers[:-SUMMED_FIGURES], shapes), weight, loss, trained)


def moved(received: Tensors, total: SumOfUpdates) -> Tensors:
    """Return the shared tensors after the mean of the clients' moves."""
    means = {
        name: tensor.double() + (total.moves[name] / total.weight).to(tensor.device)
        for name, tensor in received.items()
    }
    # a counter is whole, and must not become less by the last unit of a sum
    return {
        name: (mean if received[name].is_floating_point() else mean.round()).to(received[name].dtype)
        for name, mean in means.items()
    }


def encode_report(report: Tensors, clients: int) -> Tensor:
    """Return one client's part of a sum of reports."""
    return to_whole(flat_statistics(report), clients)


def no_report(shapes: Shapes) -> Tensor:
    return torch.zeros(count_numbers(shapes), dtype=torch.long)


def decode_reports(total: Tensor, shapes: Shapes) -> Tensors:
    return {name: tensor.float() for name, tensor in unflat_statistics(from_whole(total), shapes).items()}


def sum_of_parts(parts: Iterable[Tensor], least: int) -> Tensor:
    """Add up whole numbers one by one; refuse a sum of too few clients."""
    count, total = 0, torch.zeros((), dtype=torch.long)
    for part in parts:
        count, total = count + 1, total + part
    if count < least:
        raise FedVLError(
            f"A sum of {count} clients is too few to hide one of them; federation.least_clients is {least}."
        )
    return total
