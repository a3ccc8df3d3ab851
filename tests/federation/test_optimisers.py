import pytest
import torch

from fedvl.config import TrainingConfig
from fedvl.federation.optimisers import Optimiser, learning_rate

CASES = [
    ({"optimiser": "sgd", "momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=0.1)),
    (
        {"optimiser": "sgd", "momentum": 0.9, "weight_decay": 0.05},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    ),
    (
        {"optimiser": "adam", "betas": (0.9, 0.98), "epsilon": 1e-6, "weight_decay": 0.2},
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2),
    ),
    ({"optimiser": "adamw", "weight_decay": 0.3}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3)),
]


@pytest.mark.parametrize("settings, oracle", CASES)
def test_steps_equal_those_of_torch(settings, oracle):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 2, 5, generator=generator)
    moving = {"weight": start.clone()}
    optimiser = Optimiser(TrainingConfig(learning_rate=0.1, **settings), 0.1, moving)
    expected = [torch.nn.Parameter(client.clone()) for client in start]
    oracles = [oracle([parameter]) for parameter in expected]
    active_by_step = [3, 3, 2, 1]  # clients with fewer batches stop earlier
    for active in active_by_step:
        gradient = torch.randn(active, 2, 5, generator=generator)
        optimiser.step({"weight": gradient.clone()}, active)
        for client in range(active):
            expected[client].grad = gradient[client].clone()
            oracles[client].step()
    torch.testing.assert_close(moving["weight"], torch.stack([p.detach() for p in expected]), rtol=1e-6, atol=1e-6)


def test_schedules_by_hand():
    assert learning_rate(TrainingConfig(learning_rate=2.0), 7, 10) == 2.0
    cosine = TrainingConfig(learning_rate=2.0, schedule="cosine")
    assert [round(learning_rate(cosine, r, 4), 6) for r in range(4)] == [2.0, 1.707107, 1.0, 0.292893]
    step = TrainingConfig(learning_rate=2.0, schedule="step", step_factor=0.5)
    assert [learning_rate(step, r, 4) for r in range(4)] == [2.0, 1.0, 0.5, 0.25]


def test_cosine_restarts_fall_by_epoch_and_begin_anew():
    training = TrainingConfig(learning_rate=2.0, schedule="cosine-restarts", restart_rounds=2, local_epochs=2)
    rates = [round(learning_rate(training, r, 99, e), 6) for r in range(3) for e in range(2)]
    assert rates == [2.0, 1.707107, 1.0, 0.292893, 2.0, 1.707107]  # FedPP: (1 + cos(pi e / 4)) / 2


@pytest.mark.parametrize(("settings", "oracle"), CASES)
def test_clients_may_have_rates_of_their_own(settings, oracle):
    generator = torch.Generator().manual_seed(0)
    moving = {"weight": torch.randn(3, 2, 5, generator=generator)}
    expected = [torch.nn.Parameter(client.clone()) for client in moving["weight"]]
    oracles = [oracle([parameter]) for parameter in expected]
    optimiser = Optimiser(TrainingConfig(**settings), 0.1, moving)
    for active, rates in ((3, [0.1, 0.2, 0.3]), (2, [0.05, 0.1, 9.0])):
        gradient = torch.randn(active, 2, 5, generator=generator)
        optimiser.rate = torch.tensor(rates)
        optimiser.step({"weight": gradient.clone()}, active)
        for client in range(active):
            oracles[client].param_groups[0]["lr"] = rates[client]
            expected[client].grad = gradient[client].clone()
            oracles[client].step()
    torch.testing.assert_close(moving["weight"], torch.stack([p.detach() for p in expected]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_single_step_needs_no_momentum_and_has_the_same_bits(decay):
    training = TrainingConfig(optimiser="sgd", momentum=0.9, weight_decay=decay, learning_rate=0.1)
    start, gradient = torch.randn(3, 4), torch.randn(3, 4)
    found = []
    for once in (False, True):
        tensors, given = {"w": start.clone()}, {"w": gradient.clone()}
        Optimiser(training, 0.1, tensors, once=once).step(given, 3)
        found.append(tensors["w"])
        assert torch.equal(given["w"], gradient)  # a step of a graph is written again by the next
    assert torch.equal(*found)
