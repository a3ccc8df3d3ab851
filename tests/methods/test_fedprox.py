"""fedprox: the pull towards what was received."""

import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, small_method, small_samples


def test_fedprox_adds_the_proximal_term_and_its_gradient():
    plain, proximal = small_method("linear"), small_method("fedprox", mu=0.4)
    start = plain.start(torch.Generator())
    moved = {"weight": start["weight"] + 2.0, "bias": start["bias"] - 1.0}
    batch = batch_of(small_samples(plain, 5), start)
    extra = proximal.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    torch.testing.assert_close(extra, torch.tensor(0.4 / 2 * (24 * 4.0 + 4 * 1.0)), rtol=1e-4, atol=0)
    gradients = [torch.func.grad(lambda t, m=m: m.objective(t, batch)[0])(moved)["bias"] for m in (proximal, plain)]
    torch.testing.assert_close(gradients[0] - gradients[1], torch.full((4,), -0.4), rtol=1e-4, atol=1e-5)


def test_it_declares_what_the_table_says():
    assert_declared("fedprox")
