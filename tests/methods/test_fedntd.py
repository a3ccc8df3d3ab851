"""fedntd: the distance over the classes that are not true."""

import math

import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, small_method, small_samples

from fedvl.methods.fedntd import not_true_distance


def test_fedntd_distance_by_hand():
    """Three classes, label 0: over classes 1 and 2 the server says (3/4, 1/4) and the client (1/2, 1/2)."""
    server, local = torch.tensor([[9.0, math.log(3), 0.0]]), torch.tensor([[-4.0, 1.0, 1.0]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    torch.testing.assert_close(not_true_distance(local, server, torch.tensor([0]), 1.0), torch.tensor([expected]))
    softer = not_true_distance(local, server, torch.tensor([0]), 2.0)
    share = math.sqrt(3) / (math.sqrt(3) + 1)
    torch.testing.assert_close(
        softer, torch.tensor([share * math.log(2 * share) + (1 - share) * math.log(2 * (1 - share))])
    )


def test_fedntd_loss_adds_the_distance_to_what_the_server_sent():
    method, plain = small_method("fedntd", beta=0.7, temperature=2.0), small_method("linear")
    start = plain.start(torch.Generator())
    moved = {name: tensor + 0.3 * torch.randn(tensor.shape) for name, tensor in start.items()}
    batch = batch_of(small_samples(plain, 5), start)
    own, sent = (plain.predict(tensors, batch.inputs) for tensors in (moved, start))
    distance = not_true_distance(own, sent, batch.labels, 2.0).mean()
    extra = method.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    torch.testing.assert_close(extra, 0.7 * 4 * distance)
    assert method.objective(start, batch)[0] == plain.objective(start, batch)[0]
    padded = batch._replace(mask=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    real = not_true_distance(own, sent, batch.labels, 2.0)[:3].mean()
    torch.testing.assert_close(method.objective(moved, padded)[0] - plain.objective(moved, padded)[0], 0.7 * 4 * real)


def test_it_declares_what_the_table_says():
    assert_declared("fedntd")
