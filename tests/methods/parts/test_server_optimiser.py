"""The server's optimisers over any method, with sums alone and under client-level privacy."""

import math

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method, stepped
from hypothesis import given
from hypothesis import strategies as st

from fedvl.config import PrivacyConfig
from fedvl.methods.fedavgm import Momentum, MomentumOptions
from fedvl.methods.promptfl import PromptFL, PromptOptions


class Options(MomentumOptions, PromptOptions):
    pass


class Prompts(Momentum, PromptFL):
    """What a user writes to have the server's momentum over another method."""

    options: Options


def test_any_method_can_have_the_servers_optimiser():
    method = Prompts(Options(), small_method("promptfl").task)
    federation = run_quietly(small_federation(method, rounds=2))
    assert federation.shared.keys() == {"context"}
    assert federation.server.keys() == {"v.context"}
    assert federation.server["v.context"].any()


OPTIMISERS = ["fedavgm", "fedadam", "fedyogi", "scaffold", "feddyn"]
PLAIN = {"momentum": 0.0}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_sums_are_enough(name):
    federation = run_quietly(small_federation(small_method(name), PLAIN, secure_sum=True))
    plain = run_quietly(small_federation(small_method(name), PLAIN))
    assert {**federation.shared, **federation.server}.keys() == small_method(name).start(torch.Generator()).keys()
    for tensors, others in ((federation.shared, plain.shared), (federation.server, plain.server)):
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, others[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_it_runs_under_client_level_privacy(name, summed):
    hidden = PrivacyConfig(unit="client", epsilon=50.0, clip=0.1)
    federation = run_quietly(small_federation(small_method(name), PLAIN, privacy=hidden, secure_sum=summed))
    assert all(bool(tensor.isfinite().all()) for tensor in federation.shared.values())
    assert len(federation.records) == 3


def published(name, moves, rate=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3):
    """Algorithm 2 of Reddi et al. (2021) in float64: the tensor after each round, begun at 0."""
    x = m = 0.0
    v, found = tau**2, []
    for move in moves:
        m = beta_1 * m + (1 - beta_1) * move
        v = {
            "fedadam": beta_2 * v + (1 - beta_2) * move**2,
            "fedyogi": v - (1 - beta_2) * move**2 * math.copysign(1.0, v - move**2),
        }[name]
        x += rate * m / (math.sqrt(v) + tau)
        found.append(x)
    return found


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
@given(moves=st.lists(st.floats(-2, 2).filter(lambda move: move == 0 or abs(move) > 1e-3), min_size=1, max_size=12))
def test_adaptive_servers_follow_the_published_algorithm(name, moves):
    """Moves of any sign and size: with Yogi the second moment falls after a large one, by a small one's square."""
    found, state = stepped(small_method(name, server_rate=0.1), moves)
    assert found == pytest.approx(published(name, moves), rel=1e-3, abs=1e-4)
    assert float(state["v.bias"].min()) > 0


def test_the_adaptive_servers_have_the_papers_constants():
    for name in ("fedadam", "fedyogi"):
        options = small_method(name).options
        assert (options.server_betas, options.tau) == ((0.9, 0.99), 1e-3)
        assert set(small_method(name).initial().values()) == {0.0, 1e-6}
