"""A finished run at a client: its own tensors, figures and budget, and nothing of the others."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import EXPERIMENT, RUN, request
from helpers.runs import prepare

from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.finishing import finish_run
from fedvl.deployment.messages import Message
from fedvl.deployment.state import state_folder
from fedvl.federation.records import Budget
from fedvl.runs.experiment import local_engine
from fedvl.runs.folder import RunFolder
from fedvl.tensors import load

CLIENT, ROUNDS = 1, 2
SETTINGS = {
    "method": {"name": "fst-cbdg"},
    "data": {"clients": 3, "shots": 4, "test_shots": 3, "minimum": 0},
    "federation": {"rounds": ROUNDS, "threads": 1},
    "training": {"local_epochs": 1},
}
SPENT = [
    Budget(unit="client", epsilon=epsilon, delta=1e-5, sampling="every client in every round")
    for epsilon in (1.5, 2.25)
]


@pytest.fixture(scope="module")
def prepared():
    return prepare(SETTINGS)


@pytest.fixture
def finished(prepared, tmp_path):
    """Write the folder of a run; return it, what was said, the client and the final tensors."""

    def make(spent=(), data=None):
        folder, said = tmp_path / "party", list[str]()
        state_folder(folder).mkdir(parents=True)
        log = AuditLog(state_folder(folder) / "audit.jsonl")
        for number in range(ROUNDS):
            asked = Message(request(round=number, client=CLIENT), b"asked")
            log.receive(asked.header, asked.payload)
            log.send(Message(asked.header, b"answered"))
        engine = local_engine(prepared)
        shared = prepared.method.first_shared(0)
        engine.keep(engine.train(0, [CLIENT], shared))
        place = state_folder(folder) / "runs" / RUN
        place.mkdir(parents=True)
        party: Any = SimpleNamespace(number=CLIENT, engine=engine, folder=place, finished=shared, spent=list(spent))
        last = request(round=ROUNDS, client=CLIENT, kind="finish", experiment=EXPERIMENT)
        finish_run(folder, "north", prepared, party, last, data, said.append)
        return RunFolder.open(place), said, engine, shared

    return make


def test_the_folder_holds_shared_tensors_and_the_clients_own(finished):
    run, said, engine, shared = finished()
    tensors = load(run.path / "model.safetensors")
    own = engine.private_of(CLIENT)
    assert own
    assert tensors.keys() == {*shared, *own}
    assert all(torch.equal(tensors[name], each) for name, each in {**shared, **own}.items())
    assert (run.path / "report.html").is_file()
    assert any(str(run.path) in line for line in said)


def test_the_result_is_of_this_client_alone(finished, prepared):
    run, said, _, _ = finished(data="my scans")
    result = run.result
    assert (result.party, result.rounds, result.partition) == ("north", ROUNDS, None)
    assert result.partition_counts == [prepared.training.counts[CLIENT].tolist()]
    assert prepared.training.counts[CLIENT].tolist() != prepared.training.counts[0].tolist()
    assert result.command.startswith("fedvl client ")
    assert result.command.endswith("--data 'my scans'")
    assert result.privacy is None
    assert any(f"own {len(prepared.test.samples)} test images: " in line for line in said)


def test_its_rounds_are_those_of_its_log(finished):
    run, _, _, _ = finished()
    records = run.rounds
    assert [record.round for record in records] == [1, 2]
    assert [record.cohort for record in records] == [[CLIENT]] * 2
    assert all((record.bytes_down, record.bytes_up) == (5, 8) for record in records)


def test_the_budget_is_what_all_rounds_spent(finished):
    run, said, _, _ = finished(spent=SPENT)
    assert run.result.privacy == SPENT[-1].model_copy(update={"of": "image"})
    assert "This client has spent epsilon 2.25 (delta 1e-05)." in said
