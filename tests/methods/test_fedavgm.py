"""fedavgm: two steps of the server by hand, and sums alone are needed."""

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method, stepped

from fedvl.config import PrivacyConfig
from fedvl.methods.fedavgm import Momentum, MomentumOptions
from fedvl.methods.promptfl import PromptFL, PromptOptions


def test_the_servers_momentum_by_hand():
    """v is 1, then 0.5 + 3 = 3.5; with rate 0.1 the bias is 0.1, then 0.45."""
    found, state = stepped(small_method("fedavgm", server_rate=0.1, server_momentum=0.5), [1.0, 3.0])
    assert found == pytest.approx([0.1, 0.45], rel=1e-6)
    assert float(state["v.bias"][0]) == pytest.approx(3.5)
    assert not state["v.weight"].any()


def test_without_momentum_and_at_rate_1_it_is_fedavg():
    plain = run_quietly(small_federation(small_method("linear")))
    federation = run_quietly(small_federation(small_method("fedavgm", server_momentum=0.0)))
    for name, tensor in plain.shared.items():
        torch.testing.assert_close(federation.shared[name], tensor, rtol=0, atol=1e-6)


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
