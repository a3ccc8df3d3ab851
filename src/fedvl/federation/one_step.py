"""One local step of many clients as one backward pass.

Where all clients begin alike and take a single step of SGD, the mean of their updates is a step
along the mean of their gradients, and that is the gradient of the mean of their losses: what does
not depend on a client, such as a pass through the text tower, is computed once for all of them.
No update of a single client exists, so none is checked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.federation.optimisers import Optimiser, learning_rate
from fedvl.federation.steps import mixed_products
from fedvl.federation.training import MAX_CHUNK, working_set
from fedvl.methods.base import Batch, overrides
from fedvl.seeding import derived_seed, keys_of
from fedvl.tensors import Tensors


class MeanStep(NamedTuple):
    """What a round comes to: the merged tensors, the mean loss, and whose images are in it."""

    merged: Tensors
    loss: float
    clients: list[int]


def mean_step(engine: LocalEngine, round_index: int, cohort: Sequence[int], shared: Tensors) -> MeanStep:
    """Take the mean of the clients' single steps."""
    refuse_others(engine, shared)
    engine.check_received(shared)
    clients = [client for client in cohort if engine.rows.counts[client]]
    if not clients:
        raise FedVLError(
            f"No client with images answered in round {round_index + 1}; start a new run with a lower "
            "federation.dropout or a higher --per-round."
        )
    sizes = [engine.rows.counts[client] for client in clients]
    equal = engine.method.weighting == "clients"
    weights = torch.tensor([1.0] * len(clients) if equal else sizes, dtype=torch.float64)
    shares = (weights / weights.sum()).float()
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in shared.items()}
    gradients = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in shared.items()}
    losses = []
    size = clients_at_once(engine, max(sizes))
    for first in range(0, len(clients), size):
        some = slice(first, first + size)
        of_clients = losses_of(engine, round_index, clients[some], leaves)
        found = torch.autograd.grad((of_clients * shares[some].to(of_clients)).sum(), list(leaves.values()))
        for name, gradient in zip(leaves, found, strict=True):
            gradients[name] += gradient
        losses.append(of_clients.detach().double().cpu())
    moved = {name: tensor[None].clone() for name, tensor in shared.items()}
    rate = learning_rate(engine.training, round_index, engine.federation.rounds)
    factors = {name: engine.method.role.shared(name).rate for name in shared}
    step = {name: gradient.to(shared[name])[None] for name, gradient in gradients.items()}
    Optimiser(engine.training, rate, moved, factors).step(step, 1)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in moved.values()):
        raise FedVLError(
            f"Training diverged in round {round_index + 1}: its numbers are not finite; lower the learning rate "
            "(training.learning_rate) and start a new run."
        )
    return MeanStep({name: tensor[0] for name, tensor in moved.items()}, float(torch.cat(losses).mean()), clients)


def losses_of(engine: LocalEngine, round_index: int, clients: list[int], tensors: Tensors) -> Tensor:
    """Return the loss of each client's samples, all with the same tensors."""
    method, device = engine.method, engine.data.labels.device
    numbers = torch.tensor(clients, device=device)
    largest = max(engine.rows.counts[client] for client in clients)
    place = torch.arange(largest, device=device).expand(len(clients), -1)
    there = place < engine.rows.sizes[numbers][:, None]
    rows = engine.rows.padded(numbers, largest)
    seeds = {name: derived_seed(engine.private_seed, "noise", name, round_index) for name in method.noise()}
    batch = Batch(
        inputs={name: tensor[rows] for name, tensor in engine.data.inputs.items()},
        labels=engine.data.labels[rows],
        mask=there.float(),
        position=place.masked_fill(~there, largest),
        received={name: tensor.detach() for name, tensor in tensors.items()},
        noise={name: draw(keys_of(seeds[name], numbers, 0)) for name, draw in method.noise().items()},
    )
    axes = Batch(inputs=0, labels=0, mask=0, position=0, received=None, noise=0)  # type: ignore[arg-type]

    def objective(own: Batch) -> Tensor:
        with mixed_products(engine.training.precision, device.type):
            return method.objective(tensors, own)[0]

    return torch.func.vmap(objective, in_dims=(axes,))(batch)


def clients_at_once(engine: LocalEngine, samples: int) -> int:
    """Return how many clients one pass has: their inputs and scores must fit."""
    inputs = sum(tensor[:1].nbytes for tensor in engine.data.inputs.values())
    taken = samples * (inputs + 16 * len(engine.method.task.class_names))
    return max(1, min(working_set(engine.data.labels.device) // taken, 16 * MAX_CHUNK))


def refuse_others(engine: LocalEngine, shared: Tensors) -> None:
    """Refuse a run in which the mean of updates is not one step along the mean of gradients."""
    method, training, federation = engine.method, engine.training, engine.federation
    role, largest = method.role, max(engine.rows.counts, default=0)
    plain = not any(overrides(method, hook) for hook in ("objective", "correct", "hand_out"))
    alone = not overrides(method, "join") and not role.firsts and not role.has_begins and not role.has_ends
    averaged = all(role.needs(name) == "sum" and role.shared(name).trained for name in shared)
    problem = (
        "trains with SGD"
        if training.optimiser != "sgd"
        else "takes one step in a round: training.local_epochs=1, and a batch that holds the largest client"
        if training.local_epochs > 1 or training.batch_size < largest
        else "averages what all clients train alike"
        if not (plain and alone and averaged) or method.scope not in ("row", "batch") or method.consultation()
        else "looks at no single update"
        if federation.robust != "mean" or federation.attack or federation.drift or federation.secure_sum
        else "has no privacy of its own"
        if engine.privacy.unit != "none"
        else None
    )
    if problem:
        raise FedVLError(f"federation.one_step is for a run that {problem}; leave it out.")
