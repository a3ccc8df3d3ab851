"""fedmsplit-p: mixtures by hand, of what was sent, and clients that begin apart."""

import torch
from helpers.declarations import assert_declared
from helpers.small import run_quietly, small_federation, small_method

from fedvl.methods.base import Update


def test_a_client_begins_with_the_mixture_of_all_by_hand():
    method = small_method("fedmsplit-p")
    names = ("prompts.complete", "pooler.weight", "hidden.weight", "hidden.bias")
    first = {"prompts.complete": [1.0, 0.0], "pooler.weight": [2.0, 0.0], "hidden.weight": [1.0], "hidden.bias": [0.0]}
    second = {"prompts.complete": [0.0, 1.0], "pooler.weight": [1.0, 0.0], "hidden.weight": [3.0], "hidden.bias": [1.0]}
    updates = [
        Update(client, {name: torch.tensor(tensors[name]) for name in names}, 1.0)
        for client, tensors in ((0, first), (4, second))
    ]
    shared = {name: torch.zeros_like(tensor) for name, tensor in updates[0].tensors.items()}
    kept = {update.client: update.tensors for update in updates}
    root = 2**0.5
    # <theta_0, theta_l> / sqrt(size) of the parts: prompts, pooler, classifier (two tensors of together two values)
    rows = [torch.tensor(r) for r in ([1 / root, 0.0], [4 / root, 2 / root], [1 / root, 3 / root])]
    rows = [torch.softmax(row, 0) for row in rows]
    mean = sum(rows) / 3
    weights = [row * mean / (row * mean).sum() for row in rows]
    sent = method.hand_out(shared, kept, 0)
    for name, weight in zip(names, (weights[0], weights[1], weights[2], weights[2]), strict=True):
        expected = weight[0] * torch.tensor(first[name]) + weight[1] * torch.tensor(second[name])
        torch.testing.assert_close(sent[name], expected)
    assert method.hand_out(shared, kept, 3) is shared  # it has sent nothing yet


def test_mixtures_are_made_of_what_clients_sent_and_everyone_trains_from_its_own(monkeypatch):
    federation = small_federation(small_method("fedmsplit-p"), rounds=2)
    engine, train, seen = federation.engine, federation.engine.train, []

    def listening(round_index, cohort, shared, own=None):
        trained = train(round_index, cohort, shared, own)
        seen.append((own, {result.update.client: result.update.tensors for result in trained}))
        return trained

    monkeypatch.setattr(engine, "train", listening)
    run_quietly(federation)
    (_, first), (second, _) = seen
    for client in first:
        expected = federation.method.hand_out(
            second[1], first, client
        )  # client 1 has no data: it was sent the mean of all
        assert all(torch.equal(second[client][name], expected[name]) for name in expected)
    assert not torch.equal(second[0]["pooler.weight"], second[3]["pooler.weight"])


def test_clients_that_begin_apart_are_trained_together_as_one_by_one():
    def trained(**how):
        federation = small_federation(small_method("fedmsplit-p"), {"batch_size": 2}, rounds=2, **how)
        return run_quietly(federation).shared

    together, alone = trained(chunk=5), trained(one_by_one=True)
    for name in together:
        torch.testing.assert_close(together[name], alone[name], rtol=0, atol=1e-5)


def test_it_declares_what_the_table_says():
    assert_declared("fedmsplit-p")
