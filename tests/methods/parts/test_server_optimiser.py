"""The server's optimisers over any method, with sums alone and under client-level privacy."""

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method

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
