"""Fed-MP's merge for a query (eq. 9) from sums over clients, to first order.

A query with mean text q gives client k the weight e^(q . m_k), where m_k is the mean of the
client's texts. To first order the weights are (1 + q . (m_k - m)) / K, where m is the mean of all
m_k. With r orthonormal directions u_j, in which the texts of the trained classes differ most, the
merged gate is

    gate + sum over j of (q . u_j) T_j,

where T_j is the covariance, over clients, of u_j . m_k and the move of the client's gate, added up
over rounds. Clients send their products and their u_j . m_k, of which the server needs sums alone.
A query needs no client. The exact ratio of eq. 9 needs another sum over all clients for each query,
and spends the privacy budget each time.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.tensors import Tensors

DIRECTIONS, PLACE, TILT = "directions", "place", "tilt."  # shared: r x d, r, and T of each tensor of the gate
PLACE_SCALE = 0.01  # of places as they are sent: a small part of the norm that noise is measured by


def directions_of(texts: Tensor, count: int) -> Tensor:
    """Return orthonormal rows in which unit texts differ most; at most one fewer than texts."""
    unit = normalize(texts, dim=-1)
    found: Tensor = torch.linalg.svd(unit - unit.mean(0), full_matrices=False).Vh
    return found[: max(1, min(count, len(texts) - 1))]


def first_places(gate: Tensors, texts: Tensor, count: int) -> Tensors:
    """Return the directions, and places and T before the first round."""
    rows = directions_of(texts, count)
    tilts = {f"{TILT}{name}": tensor.new_zeros(len(rows), *tensor.shape) for name, tensor in gate.items()}
    return {DIRECTIONS: rows, PLACE: rows.new_zeros(len(rows)), **tilts}


def place_of(directions: Tensor, texts: Tensor) -> Tensor:
    """Return what a client sends of its place, u_j . m_k, given its unit texts."""
    return PLACE_SCALE * (directions @ texts.mean(0))


def times(place: Tensor, move: Tensor) -> Tensor:
    """Return the products of a place, as it is sent, and a move."""
    found: Tensor = torch.tensordot((place / PLACE_SCALE)[:, None], move[None], 1)
    return found


def settled(shared: Tensors, mean: Tensors) -> Tensors:
    """Make covariances of the means of products; directions stay, and places begin anew."""
    tilts = [name for name in shared if name.startswith(TILT)]
    found = {name: mean[name] for name in shared}
    for name in tilts:
        gate = name.removeprefix(TILT)
        found[name] = mean[name] - times(mean[PLACE], mean[gate] - shared[gate])
    return found | {DIRECTIONS: shared[DIRECTIONS], PLACE: torch.zeros_like(shared[PLACE])}


def tailored_to_query(tensors: Tensors, query: Tensor) -> Tensors:
    """Return the gate merged for a query with this mean of unit texts."""
    near = tensors[DIRECTIONS] @ query
    tilts = {name.removeprefix(TILT): tilt for name, tilt in tensors.items() if name.startswith(TILT)}
    return {name: tensors[name] + torch.tensordot(near, tilt, 1) for name, tilt in tilts.items()}
