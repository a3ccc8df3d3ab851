"""fedavgm: two steps of the server by hand, and sums alone are needed."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import run_quietly, small_federation, small_method, stepped


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


def test_it_declares_what_the_table_says():
    assert_declared("fedavgm")
