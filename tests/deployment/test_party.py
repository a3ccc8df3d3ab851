"""One client: what it answers, what it keeps, and what it ends with."""

from importlib.util import find_spec

import pytest
import torch
from helpers.small import run_quietly, small_method

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import local_federation, party_of, remote_federation, request

from fedvl.deployment.messages import Message, write
from fedvl.errors import FedVLError


def test_a_party_refuses_what_is_for_another(tmp_path):
    party = party_of(small_method("linear"), 3, tmp_path, local_federation("linear").engine)
    assert "the request is for client 2" in party.answer(write(request(client=2))).read_header().problem
    with pytest.raises(FedVLError, match="header of its message"):
        party.answer(Message("{}"))


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
