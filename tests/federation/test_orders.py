"""Which samples each step has: every chosen one once an epoch, in batches, whoever is beside a client."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedvl.config import TrainingConfig
from fedvl.federation.orders import draw_orders, order_of, rates_of_steps


def orders_of(chosen, batch, epochs=2, clients=None):
    used = chosen.sum(1).tolist()
    clients = torch.arange(len(chosen)) if clients is None else clients
    return draw_orders(TrainingConfig(batch_size=batch, local_epochs=epochs), 5, 3, clients, chosen, used)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 3))
def test_each_epoch_has_every_chosen_sample_once_in_batches(sizes, batch, epochs):
    sizes = sorted(sizes, reverse=True)
    chosen = torch.zeros(len(sizes), sizes[0] + 2, dtype=torch.bool)
    for row, size in enumerate(sizes):
        chosen[row, 1 : size + 1] = True  # not the first, nor all of the rest
    positions, steps = orders_of(chosen, batch, epochs)
    filler, width = chosen.shape[1], min(batch, sizes[0])
    assert positions.shape == (len(sizes), steps[0], width)
    for row, size in enumerate(sizes):
        batches = -(-size // width)
        assert steps[row] == epochs * batches
        for epoch in range(epochs):
            seen = positions[row, epoch * batches : (epoch + 1) * batches].flatten().tolist()
            assert sorted(place for place in seen if place < filler) == list(range(1, size + 1))
            full = seen[: size // width * width]
            assert filler not in full  # only the last batch has gaps
        assert (positions[row, steps[row] :] == filler).all()


def test_an_order_does_not_depend_on_who_is_beside():
    chosen = torch.arange(8) < torch.tensor([[8], [5]])
    together = orders_of(chosen, 4)
    alone = orders_of(chosen[1:, :5], 4, clients=torch.tensor([1]))
    there, here = together.positions[1], alone.positions[0]
    assert torch.equal(torch.where(there == 8, 5, there)[: len(here)], here)


def test_the_order_of_one_client_is_that_of_its_batches():
    positions, _ = orders_of(torch.ones(3, 8, dtype=torch.bool), 4)
    for client in range(3):
        for epoch in range(2):
            flat = positions[client, 2 * epoch : 2 * epoch + 2].flatten()
            assert torch.equal(flat, order_of(5, 3, client, 8, epoch))
    assert not torch.equal(order_of(5, 3, 0, 8), order_of(5, 4, 0, 8))


def test_rates_fall_by_epoch_of_each_client():
    training = TrainingConfig(
        schedule="cosine-restarts", restart_rounds=1, local_epochs=2, learning_rate=1.0, batch_size=4
    )
    rates = rates_of_steps(training, 0, 1, [8, 4], 4, torch.device("cpu"))
    found = [[float(value) for value in torch.as_tensor(rate)] for rate in rates]
    assert found == [pytest.approx(pair) for pair in ([1, 1], [1, 0.5], [0.5, 0.5], [0.5, 0.5])]
