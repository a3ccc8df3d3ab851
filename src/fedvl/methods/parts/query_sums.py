"""Fed-MP's merge for a query (eq. 9) from sums over clients, to first order.

A query with mean text q gives client k the weight e^(q . m_k), where m_k is the mean of the client's
texts. For any common vector c this is proportional to 1 + q . (m_k - c), up to second order. With r
orthonormal directions u_j, in which the texts of the trained classes differ most, the merged gate is

    gate + sum over j of (q . u_j) T_j,    T_j = sum over rounds of the mean over clients of
                                                 (u_j . (m_k - c)) (gate of k - gate received).

Clients add to T, so that the server needs sums alone and a query needs no client. The exact ratio
needs another sum over all clients for each query, and spends the privacy budget again.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.tensors import Tensors

DIRECTIONS, TILT = "directions", "tilt."  # names of the shared tensors: r x d, and T of each tensor of the gate


def directions_of(texts: Tensor, count: int) -> Tensor:
    """Return orthonormal rows in which unit texts differ most; at most one fewer than texts."""
    unit = normalize(texts, dim=-1)
    found: Tensor = torch.linalg.svd(unit - unit.mean(0), full_matrices=False).Vh
    return found[: max(1, min(count, len(texts) - 1))]


def expected_mean(texts: Tensor, variance: float) -> Tensor:
    """Return c, the mean of unit vectors of texts whose numbers have noise of this variance."""
    lengths = (texts.square().sum(-1, keepdim=True) + texts.shape[-1] * variance).sqrt()
    return (texts / lengths).mean(0)


def start(gate: Tensors, texts: Tensor, count: int) -> Tensors:
    """Return the directions, and T before the first round."""
    rows = directions_of(texts, count)
    return {DIRECTIONS: rows, **{f"{TILT}{name}": t.new_zeros(len(rows), *t.shape) for name, t in gate.items()}}


def added(tilt: Tensor, directions: Tensor, offset: Tensor, move: Tensor) -> Tensor:
    """Return what a client sends of T: its move times u_j . (m_k - c), added to what it received."""
    return tilt + torch.tensordot((directions @ offset)[:, None], move[None], 1)


def tailored(tensors: Tensors, query: Tensor) -> Tensors:
    """Return the gate merged for a query with this mean of unit texts."""
    near = tensors[DIRECTIONS] @ query
    tilts = {name.removeprefix(TILT): tilt for name, tilt in tensors.items() if name.startswith(TILT)}
    return {name: tensors[name] + torch.tensordot(near, tilt, 1) for name, tilt in tilts.items()}
