"""feddyn: its gradient, two rounds by hand, and h stays on the server."""

import torch
from helpers.declarations import assert_declared
from helpers.small import RAGGED, batch_of, run_quietly, small_federation, small_method, small_samples

from fedvl.federation.local import LocalEngine
from fedvl.tensors import count_bytes

ALPHA, RATE = 0.4, 0.1
TRAINING = {"learning_rate": RATE, "local_epochs": 1, "batch_size": 100, "momentum": 0.0}


def test_the_corrected_gradient_is_that_of_the_regularised_loss():
    """Of L - <g, x> + alpha / 2 |x - x_0|^2 by autograd."""
    method, generator = small_method("feddyn", alpha=ALPHA), torch.Generator().manual_seed(3)
    received = {name: tensor for name, tensor in method.start(generator).items() if not name.startswith("h.")}

    def near(tensors):
        return {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}

    moved, gradients = near(received), {f"g.{name}": tensor for name, tensor in near(received).items()}
    batch = batch_of(small_samples(method, 5), received)

    def regularised(tensors):
        linear = sum((gradients[f"g.{name}"] * tensor).sum() for name, tensor in tensors.items())
        pull = sum((tensor - received[name]).square().sum() for name, tensor in tensors.items())
        return method.loss(tensors, batch) - linear + ALPHA / 2 * pull

    plain = torch.func.grad(lambda tensors: method.loss(tensors, batch))(moved)
    expected = torch.func.grad(regularised)(moved)
    found = method.correct(plain, {**moved, **gradients}, received)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4)


def steps_of(federation: LocalEngine, index: int, x: dict) -> dict[int, dict]:
    return {r.update.client: r.update.tensors for r in federation.train(index, range(5), x)}


def test_two_rounds_by_hand():
    """Clients take one step on all their images; the equations of the server are written out again."""
    method = small_method("feddyn", alpha=ALPHA, scale=2.0)
    federation = run_quietly(small_federation(method, TRAINING, rounds=2))
    start = small_method("linear", scale=2.0).start(torch.Generator())
    engine = small_federation(small_method("linear", scale=2.0), TRAINING).engine
    x = {name: tensor.double() for name, tensor in start.items()}
    h = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    g = {client: h for client, size in enumerate(RAGGED) if size}
    for index in range(2):
        handed = {name: tensor.float() for name, tensor in x.items()}
        trained = steps_of(engine, index, handed)
        # one step of rate 0.1 along the gradient, which FedAvg's client shows; the pull is 0 where training begins
        y = {c: {n: sent[n].double() + RATE * g[c][n] for n in x} for c, sent in trained.items()}
        g = {c: {n: g[c][n] - ALPHA * (y[c][n] - x[n]) for n in x} for c in y}
        h = {n: h[n] - ALPHA / len(RAGGED) * sum(y[c][n] - x[n] for c in y) for n in x}
        x = {n: sum(y[c][n] for c in y) / len(y) - h[n] / ALPHA for n in x}
    for name, tensor in x.items():
        torch.testing.assert_close(federation.shared[name].double(), tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(federation.server[f"h.{name}"].double(), h[name], rtol=1e-4, atol=1e-5)
        for client, kept in g.items():
            own = federation.engine.private[client][f"g.{name}"].double()
            torch.testing.assert_close(own, kept[name], rtol=1e-4, atol=1e-5)


def test_h_is_in_no_message():
    federation = run_quietly(small_federation(small_method("feddyn"), TRAINING))
    plain = small_method("linear").start(torch.Generator())
    assert federation.shared.keys() == plain.keys()
    for record in federation.records:
        assert record.bytes_up == 4 * count_bytes(plain)
        assert record.bytes_down == 5 * count_bytes(plain)


def test_it_declares_what_the_table_says():
    assert_declared("feddyn")
