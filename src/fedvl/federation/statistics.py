"""Sums of clients' statistics, which are all that a training-free method exchanges."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.federation.checks import Refusal, length, refusal
from fedvl.federation.fixed_point import fixed_shape
from fedvl.methods.base import Method, Samples
from fedvl.methods.roles import Shapes
from fedvl.tensors import ByClient, Tensors

SAMPLES_AT_ONCE = 2**14  # samples whose statistics are computed together


class Statistics(NamedTuple):
    """The sums that an exchange comes to."""

    total: Tensors
    clients: list[int]  # whose samples are in it
    bytes_up: int
    each: ByClient = {}  # what each client sent, where a server learned it and keeps it


def statistics_over(method: Method, data: Samples, rows: Tensor, shared: Tensors) -> Tensors:
    """Return the statistics of these rows of the data, block by block."""
    total = no_statistics(method.role.statistics_shapes, data.labels.device)
    with torch.no_grad():
        for part in torch.split(rows, SAMPLES_AT_ONCE):
            found = method.statistics(shared, data.take(part))
            if problem := unfit(found, method.role.statistics_shapes):
                raise FedVLError(f"{type(method).__name__}.statistics is not what its roles declare: {problem}.")
            total = {name: tensor + found[name] for name, tensor in total.items()}
    return total


def no_statistics(shapes: Shapes, device: torch.device | str = "cpu") -> Tensors:
    return {name: torch.zeros(fixed_shape(shape), dtype=torch.float64, device=device) for name, shape in shapes.items()}


def unfit(tensors: Tensors, shapes: Shapes) -> str | None:
    """Return why these are not the statistics that a method declares, or None."""
    if tensors.keys() != shapes.keys():
        return f"tensors {', '.join(map(repr, sorted(tensors.keys() ^ shapes.keys())))} are missing or not asked for"
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float64 or tuple(tensor.shape) != shapes[name]:
            return f"'{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}, not torch.float64 of {shapes[name]}"
        if not bool(tensor.isfinite().all()):
            return f"'{name}' holds values that are not finite"
    return None


def sum_of_statistics(
    each: dict[int, Tensors], shapes: Shapes, device: torch.device | str, clip: float | None = None
) -> tuple[Statistics, list[Refusal]]:
    """Add up the clipped statistics of clients, in their order; refuse those that do not fit."""
    total, clients, refusals, sent = no_statistics(shapes, device), [], [], 0
    for client in sorted(each):
        if problem := unfit(each[client], shapes):
            refusals.append(refusal(client, problem))
            continue
        clients.append(client)
        counted = clipped_statistics(each[client], clip)
        total = {name: tensor + counted[name] for name, tensor in total.items()}
        sent += sum(tensor.nbytes for tensor in each[client].values())
    return Statistics(total, clients, sent), refusals


def clipped_statistics(statistics: Tensors, clip: float | None) -> Tensors:
    """Shorten statistics whose norm over all tensors exceeds ``clip``."""
    norm = length(statistics)
    if clip is None or norm <= clip:
        return statistics
    return {name: tensor * (clip / norm) for name, tensor in statistics.items()}
