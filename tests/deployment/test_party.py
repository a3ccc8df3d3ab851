"""One client: what it answers, what it keeps, and what it ends with."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from helpers.small import run_quietly, small_method, small_task

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import local_federation, party_of, remote_federation, request

from fedvl.deployment.messages import Message, pack_tensors
from fedvl.deployment.party import Party


def test_a_party_refuses_what_is_for_another(tmp_path):
    party = party_of(small_method("linear"), 3, tmp_path, local_federation("linear").engine)
    assert "the request is for client 2" in party.answer(Message(request(client=2))).header.problem


def test_old_private_tensors_are_removed(tmp_path):
    remote, grid = remote_federation("fst-cbdg", tmp_path, rounds=8)
    run_quietly(remote)
    assert [len(list(party.folder.glob("*.safetensors"))) for party in grid.parties] == [4, 0, 4, 4, 4]


def test_everyone_gets_the_final_tensors_and_has_its_own(tmp_path):
    remote, grid = remote_federation("fst-cbdg", tmp_path)
    run_quietly(remote)
    remote.engine.finish(remote.shared, 3)
    final = grid.parties[3].finished
    assert final.keys() == remote.shared.keys()
    assert all(torch.equal(final[name], remote.shared[name]) for name in remote.shared)
    assert grid.parties[3].engine.private_of(3).keys() == {"soft_labels", "sigma"}


def test_a_client_solves_around_the_final_solution_on_its_own_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.small.small_task", partial(replace, small_task(), protocol="personal"))
    remote, grid = remote_federation("ridge", tmp_path, rounds=1)
    local = run_quietly(local_federation("ridge", rounds=1, one_by_one=True))
    run_quietly(remote)
    remote.engine.finish(remote.shared, 1)
    assert not remote.engine.private
    for client, private in local.engine.private.items():
        (own,) = private.values()
        torch.testing.assert_close(grid.parties[client].engine.private_of(client)["own"], own)
    assert not grid.parties[1].engine.private_of(1)  # it has no images


@pytest.mark.parametrize(("settings", "kept"), [({}, {0, 2, 3, 4}), ({"secure_sum": True, "least_clients": 2}, set())])
def test_the_server_keeps_single_sums_only_where_it_learns_them(settings, kept, tmp_path):
    remote, _ = remote_federation("ridge", tmp_path, rounds=1, **settings)
    run_quietly(remote)
    assert {client for client, sums in remote.last.items() if sums["counts"].any()} == kept
    for name, total in remote.server.items():
        if kept:
            torch.testing.assert_close(sum(sums[name] for sums in remote.last.values()), total, rtol=0, atol=0)


def test_sums_of_several_exchanges_are_not_kept(tmp_path):
    remote, _ = remote_federation("fed-em", tmp_path, rounds=2)
    assert not run_quietly(remote).last


@pytest.mark.parametrize("name", ["fed-mp", "linear"])  # residuals; the order of batches
def test_what_a_party_draws_comes_from_its_own_secret_and_lasts_through_a_restart(name, tmp_path):
    """The server knows the experiment's seed: with it, it could draw residuals and batches again."""
    template = local_federation(name, training={"batch_size": 2}).engine

    def answer(folder, rehearsal):
        engine = party_of(small_method(name), 3, folder, template).engine
        party = Party(3, engine, folder / "3", rehearsal)
        reply = party.answer(Message(request(round=0), pack_tensors(engine.start)))
        assert reply.header.problem == ""
        return reply.payload

    public = answer(tmp_path / "rehearsal", True)
    assert answer(tmp_path / "another rehearsal", True) == public
    first, second = answer(tmp_path / "first", False), answer(tmp_path / "second", False)
    assert len({public, first, second}) == 3
    for path in (tmp_path / "first").rglob("*.answer"):  # it starts again, and has forgotten what it answered
        path.with_suffix(".json").unlink()
        path.unlink()
    assert answer(tmp_path / "first", False) == first
