"""Training of a chunk: what gradients move and what they must not."""

import pytest
import torch
from helpers.small import small_federation, small_task

from fedvl.methods.base import Method
from fedvl.methods.roles import Given

RATE = 0.1


class Drawn(Method):
    """The loss draws w and the goal that the server gave to each other."""

    def roles(self):
        return {"goal": Given((1,))}

    def start(self, generator):
        return {"w": torch.zeros(1)}

    def hand_out(self, shared, last, client):
        return {**shared, "goal": torch.tensor([float(client)])}

    def loss(self, tensors, batch):
        return ((tensors["w"] - tensors["goal"]) ** 2).sum() / 2


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_given_tensor_stays_as_it_was_given_though_the_loss_has_a_gradient_in_it(one_by_one):
    method = Drawn(Method.options_type(), small_task())
    steps = {"batch_size": 100, "local_epochs": 3, "learning_rate": RATE, "momentum": 0.0}
    federation = small_federation(method, steps, rounds=1, one_by_one=one_by_one)
    clients = [0, 2, 3, 4]
    handed = {client: method.hand_out(federation.shared, {}, client) for client in clients}
    for result in federation.engine.train(0, clients, federation.shared, handed):
        # three steps of w <- w + rate (goal - w); if the goal moved too, w would come less far
        expected = result.update.client * (1 - (1 - RATE) ** 3)
        torch.testing.assert_close(result.update.tensors, {"w": torch.tensor([expected])})
        assert not result.private
    assert [handed[client]["goal"].item() for client in clients] == clients
