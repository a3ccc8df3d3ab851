"""promptprox: a pull that has a gradient."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.prompts import gradient
from helpers.small import batch_of, small_federation, small_method, small_samples

from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment


def test_a_bad_option_is_refused():
    with pytest.raises(FedVLError, match=r"method\.mu"):
        resolve_experiment({"method": {"name": "promptprox", "mu": -1}})


def test_promptprox_pulls_with_a_gradient():
    """mu (context - received), by hand; the released code's is 0 everywhere."""
    plain, proximal = small_method("promptfl"), small_method("promptprox", mu=0.4)
    received = plain.start(torch.Generator().manual_seed(0))
    moved = {"context": received["context"] + 2.0}
    batch = batch_of(small_samples(plain, 5), received)
    extra = proximal.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    torch.testing.assert_close(extra, torch.tensor(0.4 / 2 * 16 * 8 * 4.0), rtol=1e-5, atol=0)
    pull = gradient(proximal, moved, batch, "context") - gradient(plain, moved, batch, "context")
    torch.testing.assert_close(pull, torch.full((16, 8), 0.4 * 2.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        gradient(proximal, received, batch, "context"), gradient(plain, received, batch, "context")
    )


def test_promptprox_stays_nearer_to_what_it_received_and_without_mu_is_promptfl():
    def distance(name, **options):
        federation = small_federation(small_method(name, **options), {"learning_rate": 0.1}, rounds=1)
        sent = federation.shared["context"]
        moved = [trained.update.tensors["context"] for trained in federation.engine.train(0, [3], federation.shared)]
        return float((moved[0] - sent).norm())

    assert distance("promptprox", mu=5.0) < 0.95 * distance("promptfl")
    assert distance("promptprox", mu=0.0) == distance("promptfl")


def test_it_declares_what_the_table_says():
    assert_declared("promptprox")
