"""Which samples each step of a client has, and at which rate it moves."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fedvl.config import TrainingConfig
from fedvl.federation.optimisers import learning_rate
from fedvl.federation.privacy import RecordPrivacy
from fedvl.seeding import derived_seed, permutations


class Orders(NamedTuple):
    """The samples of each client's steps (clients x steps x batch), and its number of steps."""

    positions: Tensor  # one past the last stands where there is no sample
    steps: list[int]


def draw_orders(
    training: TrainingConfig, seed: int, round_index: int, clients: Tensor, chosen: Tensor, used: Sequence[int]
) -> Orders:
    """Shuffle each client's ``chosen`` samples in each epoch; ``used`` counts them."""
    filler, width, epochs = chosen.shape[1], min(training.batch_size, used[0]), training.local_epochs
    seed = derived_seed(seed, "order", round_index)
    shuffled = torch.stack([permutations(seed, clients, chosen, epoch) for epoch in range(epochs)], dim=1)
    counts = torch.tensor(used, device=clients.device)[:, None]
    batches = -(-counts // width)
    steps = [epochs * -(-count // width) for count in used]
    # step s of a client is its batch s % b of epoch s // b, where b is its number of batches
    step = torch.arange(steps[0], device=clients.device)
    epoch, batch = (step // batches)[..., None], (step % batches)[..., None]
    within = batch * width + torch.arange(width, device=clients.device)
    real = (epoch < epochs) & (within < counts[..., None])
    flat = epoch.clamp(max=epochs - 1) * filler + within.clamp(max=filler - 1)
    positions = shuffled.flatten(1).gather(1, flat.flatten(1)).view(flat.shape)
    return Orders(positions.masked_fill_(~real, filler), steps)


def order_of(seed: int, round_index: int, client: int, samples: int, epoch: int = 0) -> Tensor:
    """Return the order of one client's samples in an epoch."""
    chosen = torch.ones(1, samples, dtype=torch.bool)
    return permutations(derived_seed(seed, "order", round_index), torch.tensor([client]), chosen, epoch)[0]


def draw_private_orders(
    hidden: RecordPrivacy,
    seed: int,
    round_index: int,
    clients: Sequence[int],
    chosen: Tensor,
    units: Tensor | None = None,
) -> Orders:
    """Draw each image for each step by itself, as the accounting of private records asks for.

    With ``units`` (clients x samples) all images of a unit are drawn together.
    """
    filler, device, orders = chosen.shape[1], chosen.device, []
    for row, (client, own) in enumerate(zip(clients, chosen.cpu(), strict=True)):
        places = own.nonzero()[:, 0]
        if units is None:
            orders.append([places[step] for step in hidden.draw(len(places), seed, round_index, client)])
            continue
        names, number = torch.unique(units[row].cpu()[places], return_inverse=True)
        drawn = hidden.draw(len(names), seed, round_index, client)
        orders.append([places[torch.isin(number, step)] for step in drawn])
    width = max(1, *(len(step) for steps in orders for step in steps))
    stacked = [torch.stack([pad(step, (0, width - len(step)), value=filler) for step in steps]) for steps in orders]
    positions = pad_sequence(stacked, batch_first=True, padding_value=filler).to(device)
    return Orders(positions, [len(steps) for steps in orders])


def rates_of_steps(
    training: TrainingConfig, round_index: int, rounds: int, used: Sequence[int], steps: int, device: torch.device
) -> Sequence[float | Tensor]:
    """Return each step's rate: one for all, or one per client if it falls by epoch."""
    if training.schedule != "cosine-restarts":
        return [learning_rate(training, round_index, rounds)] * steps
    by_epoch = torch.tensor([learning_rate(training, round_index, rounds, e) for e in range(training.local_epochs)])
    batches = torch.tensor([-(-count // training.batch_size) for count in used])
    epochs = torch.arange(steps)[:, None] // batches  # a client that has finished is not moved, whatever its rate
    return list(by_epoch[epochs.clamp(max=training.local_epochs - 1)].to(device))
