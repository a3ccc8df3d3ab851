"""Simulated hostile clients: what they send, and what it does to a run with and without a rule."""

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method

from fedvl.errors import FedVLError
from fedvl.federation.attacks import Attack, alie, attacked, flipped, ipm, scaled, sign_flip
from fedvl.federation.local import Trained
from fedvl.federation.round import Federation
from fedvl.methods.base import Update


def test_what_is_written_is_read():
    assert Attack.parse("scaled:0.2") == Attack("scaled", 0.2)
    for text in ("scaled", "scaled:", "scaled:2", "scaled:0", "other:0.2", "scaled:x", ""):
        with pytest.raises(FedVLError, match=r"KIND:SHARE, such as scaled:0\.2"):
            Attack.parse(text)


def test_the_hostile_are_a_share_of_the_clients_drawn_from_the_seed():
    attack = Attack("scaled", 0.25)
    assert len(attack.clients(20, 0)) == 5
    assert attack.clients(20, 0) == attack.clients(20, 0) != attack.clients(20, 1)


def test_moves_by_hand():
    moves = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    assert sign_flip(moves, 10).tolist() == [[-1, -2], [-3, -2]]
    assert scaled(moves, 10).tolist() == [[-10, -20], [-30, -20]]
    assert ipm(moves, 10).tolist() == [[-1, -1], [-1, -1]]
    # of ten, two hostile: 4 of the 8 honest are needed for a majority, so that half may be farther: 0 deviations
    assert alie(moves, 10).tolist() == [[2, 2], [2, 2]]
    # four of ten hostile: 2 of 6 needed; the normal quantile of 4/6 is 0.4307
    assert alie(torch.cat([moves, moves]), 10)[0].tolist() == pytest.approx([2 - 0.4307, 2], abs=1e-4)


def test_labels_are_reversed_where_they_are_hostile():
    labels = torch.tensor([0, 1, 2, -1, 2])
    assert flipped(labels, torch.tensor([1, 2, 3]), 3).tolist() == [0, 1, 0, -1, 2]
    assert labels.tolist() == [0, 1, 2, -1, 2]


def test_only_the_hostile_lie_and_whole_numbers_stay():
    shared = {"w": torch.zeros(2), "count": torch.tensor(3)}
    trained = [
        Trained(Update(client, {"w": torch.full((2,), 1.0 + client), "count": torch.tensor(4)}, 1.0), {}, 0.0, 1)
        for client in range(3)
    ]
    sent = attacked(Attack("sign-flip", 0.4), frozenset({1}), shared, trained)
    assert [result.update.tensors["w"].tolist() for result in sent] == [[1, 1], [-2, -2], [3, 3]]
    assert all(result.update.tensors["count"].item() == 4 for result in sent)
    assert trained[1].update.tensors["w"].tolist() == [2, 2]


def test_a_rule_changes_what_is_merged_and_a_root_survives_a_resume(tmp_path):
    from fedvl.federation.journal import Journal
    from fedvl.federation.local import LocalEngine

    def federation(journal=None, **settings):
        found = small_federation(small_method("fst-cbdg"), **settings)
        engine = found.engine
        rows = [torch.cat(list(engine.rows))[:6]]
        root = LocalEngine(found.method, engine.data, rows, engine.training, engine.federation, 0)
        return Federation(found.method, engine, found.config, 0, dict(found.shared), journal=journal, root=root)

    whole = run_quietly(federation(rounds=4, robust="root"))
    mean = run_quietly(small_federation(small_method("fst-cbdg"), rounds=4))
    assert any(not torch.equal(whole.shared[name], mean.shared[name]) for name in whole.shared)
    first = federation(Journal(tmp_path), rounds=2, robust="root")
    run_quietly(first)
    again = federation(Journal(tmp_path), rounds=4, robust="root")
    again.restore()
    run_quietly(again)
    assert all(torch.equal(again.shared[name], whole.shared[name]) for name in whole.shared)
