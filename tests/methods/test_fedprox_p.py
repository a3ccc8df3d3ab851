"""fedprox-p: the pull on every tensor."""

import torch
from helpers.declarations import assert_declared
from helpers.small import small_batch, small_method


def test_the_pull_adds_mu_times_the_way_from_what_was_received_to_every_gradient():
    method, without = small_method("fedprox-p", mu=0.3), small_method("fedavg-p")
    received = method.start(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    tensors = {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in received.items()}
    batch = small_batch(method, torch.arange(4))._replace(received=received)
    pulled, plain = (torch.func.grad(lambda t, m=m: m.objective(t, batch)[0])(tensors) for m in (method, without))
    for name in tensors:
        torch.testing.assert_close(
            pulled[name] - plain[name], 0.3 * (tensors[name] - received[name]), rtol=0, atol=1e-5
        )


def test_it_declares_what_the_table_says():
    assert_declared("fedprox-p")
