"""Matching of the prompts of different clients, as Fed-PRIME's server does it.

``group(pools)`` and ``align(pools, generator)``: every client brings some prompts (n x d, n its
own); noisy copies of one prompt end in one cluster, at most one per client. The result's centroids
are the clusters' means.

``group`` joins the most similar pair of prompts first, by the cosine of their differences from the
mean prompt, unless the two clusters then had two prompts of one client. It stops at ``threshold``,
which random directions exceed in 1 of 30,000 pairs: 0.22 in 320 dimensions.

``align`` is the probabilistic model of the public code. A client uses centroid m with probability
f(m), and its prompt is drawn from N(m, sd(m)^2); f and sd are small networks with sigmoid outputs.
Every prompt founds a centroid; 5 sweeps assign each client, by the Hungarian method, the distinct
centroids that explain its prompts best, and fit centroids and networks to that. A prompt that no
other centroid explains better than the spread of all prompts keeps its own; centroids without
prompts are dropped. sd stays near 0.5, so that copies with more noise than that stay apart.

Three differences from the sequential form of the public code (``benchmarks/alignment.py`` has it):

- A prompt's distance to the centroid it founded is 0, and sd is about 0.5 there: with values near
  0.2 noisy copies never meet, with values near 0.02 even unrelated prompts do. Here prompts are
  standardised, so that sd is a share of their spread, and a centroid that nobody else uses explains
  a prompt no better than N(0, 1), the distribution of all prompts.
- A centroid is set to the mean of its prompts, the optimum. Adam's steps of 0.001 carry the public
  code's centroids by a fixed amount, whatever the prompts' scale. Here Adam trains the networks
  alone. A cluster of n counts n - 1 times for sd, else singles force 0.
- Densities are matrix products, once per sweep; only the assignment goes client by client.

Clients and prompts are ordered by their values first, so that permuting either changes nothing. All
of it runs on one processor thread: its operations are too small for more.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, normalize

from fedvl.methods.parts.adapters import linear_layer
from fedvl.tensors import on_threads

SWEEPS, STEPS, RATE = 5, 5, 1e-3  # reassignments; network steps between two of them; Adam's rate
MATCHER_WIDTH = 128
STRAY = 4.0  # deviations of the cosine of two random directions, whose deviation is 1 / sqrt(d)


class Alignment(NamedTuple):
    centroids: Tensor  # clusters x d
    sizes: Tensor  # how many clients' prompts are in each
    clusters: list[Tensor]  # per client, the cluster of each of its prompts


class Network:
    """A network with one hidden layer, trained by Adam."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        drawn = *linear_layer(inputs, MATCHER_WIDTH, generator), *linear_layer(MATCHER_WIDTH, outputs, generator)
        self.parameters = [tensor.requires_grad_() for tensor in drawn]
        self.moments = [(torch.zeros_like(tensor), torch.zeros_like(tensor)) for tensor in drawn]
        self.steps = 0

    def __call__(self, x: Tensor) -> Tensor:
        first, first_bias, second, second_bias = self.parameters
        return torch.relu(x @ first.T + first_bias) @ second.T + second_bias

    def step(self, loss: Tensor) -> None:
        self.steps += 1
        correction = (1 - 0.999**self.steps) ** 0.5
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for tensor, gradient, (mean, square) in zip(self.parameters, gradients, self.moments, strict=True):
                mean.lerp_(gradient, 0.1)
                square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                size = -RATE * correction / (1 - 0.9**self.steps)
                tensor.addcdiv_(mean, square.sqrt().add_(1e-8 * correction), value=size)


def cosine_threshold(width: int) -> float:
    """Return the cosine above which two vectors count as copies of one."""
    return math.tanh(STRAY / math.sqrt(width))


@on_threads(1)  # of tiny operations
def group_prompts(pools: Sequence[Tensor]) -> Alignment:
    """Group ``pools``: each client's prompts, n x d; a client may have none, but not all."""
    order = canonical_order(pools)
    rows = torch.cat([pools[client][own].cpu().float() for client, own in order])
    owners = [client for client, own in order for _ in own]
    cosines = similarities(rows)
    first, second = (cosines > cosine_threshold(rows.shape[1])).triu(1).nonzero(as_tuple=True)
    most_similar = cosines[first, second].argsort(descending=True, stable=True)
    cluster, members, clients = list(range(len(rows))), [[row] for row in range(len(rows))], [{o} for o in owners]
    for left, right in zip(first[most_similar].tolist(), second[most_similar].tolist(), strict=True):
        kept, joined = cluster[left], cluster[right]
        if kept == joined or clients[kept] & clients[joined]:
            continue
        clients[kept] |= clients[joined]
        members[kept] += members[joined]
        for row in members[joined]:
            cluster[row] = kept
    return summarised(rows, torch.tensor(cluster), pools, order)


def similarities(rows: Tensor) -> Tensor:
    """Return the cosines of rows less their mean; equal rows have 1, also where all are equal."""
    centred = rows.double() - rows.double().mean(0)
    cosines = normalize(centred, dim=-1) @ normalize(centred, dim=-1).T
    return torch.where(torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") == 0, 1.0, cosines)


@on_threads(1)
def align(pools: Sequence[Tensor], generator: torch.Generator) -> Alignment:
    """Align ``pools``: each client's prompts, n x d; a client may have none, but not all."""
    order = canonical_order(pools)
    rows = torch.cat([pools[client][own].cpu().float() for client, own in order])
    blocks = torch.split(torch.arange(len(rows)), [len(own) for _, own in order])
    centred = rows - rows.mean(0)
    x = centred / centred.pow(2).mean().sqrt().clamp(min=1e-12)
    spread, popularity = Network(x.shape[1], x.shape[1], generator), Network(x.shape[1], 1, generator)
    assigned, centroids = torch.full((len(x),), -1), x  # none is used yet
    for sweep in range(SWEEPS):
        if sweep:
            centroids = fit(x, assigned, len(blocks), spread, popularity)
        with torch.no_grad():
            log_sd, log_odds = logsigmoid(spread(centroids)), popularity(centroids)[:, 0]
            assigned = reassign(x, log_density(x, centroids, log_sd) + log_odds, log_odds, blocks, assigned)
    return summarised(rows, assigned, pools, order)


def summarised(
    rows: Tensor, assigned: Tensor, pools: Sequence[Tensor], order: list[tuple[int, list[int]]]
) -> Alignment:
    """Return the means and sizes of clusters, and each client's clusters in its own order."""
    found, numbers, sizes = torch.unique(assigned, return_inverse=True, return_counts=True)
    means = torch.zeros(len(found), rows.shape[1]).index_add(0, numbers, rows) / sizes[:, None]
    clusters = [torch.empty(len(pool), dtype=torch.long) for pool in pools]
    blocks = torch.split(numbers, [len(own) for _, own in order])
    for (client, own), block in zip(order, blocks, strict=True):
        clusters[client][own] = block
    return Alignment(means.to(pools[0]), sizes.to(pools[0]), clusters)


def canonical_order(pools: Sequence[Tensor]) -> list[tuple[int, list[int]]]:
    """Return the clients with prompts and the order of their prompts, both sorted by value."""
    values = [pool.tolist() for pool in pools]
    order = [(client, sorted(range(len(own)), key=own.__getitem__)) for client, own in enumerate(values) if own]
    return sorted(order, key=lambda item: [values[item[0]][row] for row in item[1]])


def fit(x: Tensor, assigned: Tensor, clients: int, spread: Network, popularity: Network) -> Tensor:
    """Set centroids to their prompts' means (unused: to the founder), and train the networks."""
    users = torch.bincount(assigned, minlength=len(x)).float()
    means = torch.zeros_like(x).index_add(0, assigned, x) / users.clamp(min=1)[:, None]
    scatter = torch.zeros_like(x).index_add(0, assigned, (x - means[assigned]).pow(2))
    used = users > 0
    kept, several = means[used], users > 1
    for _ in range(STEPS):
        if several.any():
            log_sd = logsigmoid(spread(means[several]))
            squares = scatter[several] * torch.exp(-2 * log_sd) / 2
            spread.step(((users[several] - 1)[:, None] * log_sd + squares).mean())
        popularity.step(binary_cross_entropy_with_logits(popularity(kept)[:, 0], users[used] / clients))
    return torch.where(used[:, None], means, x)


def log_density(x: Tensor, centroids: Tensor, log_sd: Tensor) -> Tensor:
    """Return log N(row; centroid, diag sd^2), rows x centroids, without the constant."""
    precision, centroids = torch.exp(-2 * log_sd.double()), centroids.double()
    cross, squares = x.double() @ (centroids * precision).T, x.double().pow(2) @ precision.T
    return cross - squares / 2 - (centroids.pow(2) * precision).sum(1) / 2 - log_sd.double().sum(1)


def reassign(x: Tensor, benefit: Tensor, log_odds: Tensor, blocks: Sequence[Tensor], assigned: Tensor) -> Tensor:
    """Assign each client in turn the distinct centroids that fit it best, given the others'."""
    alone = (log_odds - x.double().pow(2).sum(1) / 2).numpy()  # log N(x; 0, 1), the distribution of all prompts
    benefits = benefit.numpy()
    result: NDArray[np.int64] = assigned.numpy().copy()
    users = np.bincount(result[result >= 0], minlength=len(x))
    for block in (part.numpy() for part in blocks):
        before = result[block]
        np.subtract.at(users, before[before >= 0], 1)
        worth = np.where(users > 0, benefits[block], -math.inf)
        free = block[users[block] == 0]
        worth[free - block[0], free] = alone[free]
        result[block] = linear_sum_assignment(worth, maximize=True)[1]
        users[result[block]] += 1  # distinct: each counts once
    return torch.from_numpy(result)


def nearest(prompts: Tensor, pool: Tensor) -> Tensor:
    """Return a different place of the pool for each prompt, at the least squared distances."""
    distances = torch.cdist(prompts.double(), pool.double()).square()
    return torch.from_numpy(linear_sum_assignment(distances.cpu().numpy())[1]).to(prompts.device)
