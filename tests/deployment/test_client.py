"""What a client takes part in, what it refuses, and what it says."""

import re
import secrets
import socket
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.kills import draw_images
from helpers.parties import EXPERIMENT, NO_WATCH, SmallClient, request

from fedvl import __version__
from fedvl.deployment.audit_log import NO_HEAD, read_log
from fedvl.deployment.class_lists import names_of_tensors
from fedvl.deployment.client import MAX_RUNS, Client
from fedvl.deployment.files import PartyFile, resolve_for_parties
from fedvl.deployment.membership import (
    admit_participant,
    approve_experiment,
    create,
    make_join_request,
    read_federation,
)
from fedvl.deployment.messages import Message, pack_tensors, unpack_tensors
from fedvl.deployment.own_counts import image_noise
from fedvl.deployment.party import Cost
from fedvl.deployment.policy import Policy, read_experiments
from fedvl.deployment.roster import pin_roster, roster_of
from fedvl.deployment.supervisor import free_port
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.seeding import torch_generator

# --- what a client takes part in


@pytest.fixture
def client(tmp_path):
    """A client of the small federation with two experiments in its folder."""
    found = SmallClient.joined(3, tmp_path, experiments=(EXPERIMENT, "d" * 64))
    found.stay = False
    return found


def test_a_client_takes_part_in_one_run_unless_it_stays(client):
    assert client.problem(run="1") == ""
    assert "It takes part in one run" in client.problem(run="2")
    assert not (client.state / "runs" / "2").exists()
    assert client.problem(run="1", round=1) == ""
    client.stay = True
    assert client.problem(run="2") == ""


@pytest.mark.parametrize("problem", ["", "It says so."])
def test_a_message_without_the_head_of_the_servers_log_is_refused_and_logged(problem, client):
    """Otherwise the logs of both sides could not be compared; a request that looks like a refusal is no exception."""
    reply = client.ask(payload=b"" if problem else None, log="", problem=problem)
    assert (reply.header.problem, reply.payload) == (NO_HEAD, b"")
    received, refused = read_log(client.folder).chain.entries[-2:]
    assert (received["kind"], received["head"]) == ("received", "")
    assert (refused["kind"], refused["reason"]) == ("refused", NO_HEAD)
    assert reply.header.log == client.log.head
    assert not (client.state / "runs").exists()


def test_a_run_has_one_experiment_also_after_a_restart(client):
    assert client.problem(run="1") == ""
    assert "with another experiment" in client.problem(run="1", experiment="d" * 64)
    client.parties.clear()
    assert "with another experiment" in client.problem(run="1", experiment="d" * 64)
    assert "no such experiment" in client.problem(run="1", experiment="c" * 64)


def test_a_server_cannot_fill_the_disk_with_runs(client):
    client.stay = True
    for number in range(MAX_RUNS):
        (client.state / "runs" / f"{number:x}").mkdir(parents=True)
    assert f"holds {MAX_RUNS} runs" in client.problem(run="ff")
    assert len(list((client.state / "runs").iterdir())) == MAX_RUNS


def test_a_mistake_in_a_method_is_told_here_by_its_line_and_to_the_server_without_its_words(own_method, tmp_path):
    """The words of an error may hold what must not leave: the server learns that there was one."""
    mine = own_method("def loss(self, tensors, batch):\n        return batch.mask[f'secret {len(batch.mask)}']")
    found = SmallClient.joined(3, tmp_path / "party")
    found.ready[EXPERIMENT].prepared.method.__class__ = mine
    problem = found.problem()
    assert problem == "Its method failed; what it says is told there."
    (told,) = [line for line in found.said if line.startswith("linear.py")]
    assert re.match(r"linear.py, line 6, in loss: `return batch.mask\[.*\]` fails with \w+: ", told)
    assert found.said[-1] == f"Refused: {problem}"


def test_what_is_no_mistake_of_a_packaged_method_is_not_blamed_on_it(tmp_path, monkeypatch):
    found = SmallClient.joined(3, tmp_path / "party")
    monkeypatch.setattr("fedvl.federation.local.LocalEngine.train", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        found.ask()


# --- a rehearsal, without --data


RECORD: dict[str, Any] = {"privacy": {"unit": "record", "epsilon": 8.0}}
SECURE: dict[str, Any] = {"federation": {"rounds": 1, "threads": 1, "secure_sum": True, "least_clients": 2}}


@pytest.fixture
def rehearsing(tmp_path, monkeypatch):
    """A client of a federation on this machine or elsewhere, that brings no images of its own."""
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    images = draw_images(tmp_path)

    def make(host, data=None, **settings):
        common: dict[str, Any] = {"method": {"name": "linear"}, "data": {"dataset": str(images), "partition": "iid"}}
        common["federation"] = {"rounds": 1, "threads": 1}
        create(tmp_path / "clinic", ["north", "south"], host, 9443, resolve_for_parties({**common, **settings}, 2))
        party = tmp_path / "clinic" / "parties" / "north"
        if host != "127.0.0.1":
            for name in ("north", "south"):
                admit_participant(tmp_path / "clinic", make_join_request(tmp_path / "clinic" / "parties" / name))
            pin_roster(party, roster_of(tmp_path / "clinic", read_federation(tmp_path / "clinic")))
            for experiment in read_experiments(party).values():
                approve_experiment(party, experiment)
        client = Client(party, str(images) if data else None, print)
        client.prepare(Silent())
        return client

    return make


def train(client):
    ((identity, ready),) = client.ready.items()
    start = ready.prepared.method.start(torch_generator(0, "start"))
    asked = request(experiment=identity, round=0, client=0)
    return client.answer(Message(asked, pack_tensors(start))).header.problem


def test_a_rehearsal_books_no_epsilon(rehearsing):
    """Its noise comes from the experiment's seed, which everybody knows: it hides nothing, and spends nothing."""
    client = rehearsing("127.0.0.1", **RECORD)
    assert train(client) == ""
    kinds = [entry["kind"] for entry in read_log(client.folder).chain.entries]
    assert "sent" in kinds
    assert "budget" not in kinds


def test_with_images_of_its_own_the_same_client_books_it(rehearsing):
    client = rehearsing("127.0.0.1", data=True, **RECORD)
    assert train(client) == ""
    assert "budget" in [entry["kind"] for entry in read_log(client.folder).chain.entries]


@pytest.mark.parametrize("settings", [RECORD, SECURE], ids=["noise", "secure sums"])
def test_a_rehearsal_of_noise_or_secure_sums_is_refused_unless_the_server_is_on_this_machine(settings, rehearsing):
    client = rehearsing("fed.example.org", **settings)
    assert train(client).startswith("Without --data this is a rehearsal")
    assert "sent" not in [entry["kind"] for entry in read_log(client.folder).chain.entries]
    with pytest.raises(FedVLError, match="Without --data this is a rehearsal"):
        client.serve(NO_WATCH, stay=False)


def test_a_rehearsal_without_them_takes_part(rehearsing):
    assert train(rehearsing("fed.example.org")) == ""


def test_a_client_on_this_machine_is_told_by_its_servers_address():
    known: dict[str, Any] = {"name": "a", "number": 0, "names": ("a",), "class_names": (), "templates": {}}
    there = {"127.0.0.1:1": True, "localhost:1": True, "fed.example.org:1": False, "127.0.0.1.example.org:1": False}
    assert {server: PartyFile(server=server, **known).on_this_machine for server in there} == there


def test_a_port_that_is_taken_is_not_chosen(monkeypatch):
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        drawn, below = [port - 20_000, port - 20_000], secrets.randbelow
        monkeypatch.setattr(secrets, "randbelow", lambda most: drawn.pop() if drawn else below(most))
        assert free_port() != port
        assert not drawn


def test_an_experiment_that_another_version_described_names_both_versions(tmp_path):
    """Each version hashes its own settings, so that the same file has two identities."""
    client = SmallClient.joined(3, tmp_path)
    said = "Its folder has no such experiment, or its model has other weights."
    assert client.problem(experiment="f" * 64) == said
    client.server_version = __version__
    assert client.problem(experiment="f" * 64) == said
    client.server_version = "9.9.9"
    assert client.problem(experiment="f" * 64).startswith(
        f"{said} The server runs FedVL 9.9.9, and it {__version__}: install"
    )


# --- a comparison of two runs


def test_another_run_is_one_of_its_own_that_may_be_evaluated(client):
    client.stay = True
    client.problem(run="1")
    client.problem(run="2", experiment="d" * 64)
    found = client._other_run(EXPERIMENT, "2")
    assert found == (client.ready["d" * 64].prepared, client.state / "runs" / "2")
    with pytest.raises(FedVLError, match="did not take part in the run that the model is to be compared with"):
        client._other_run(EXPERIMENT, "3")
    (client.state / "policy.toml").write_text("evaluations = 0")
    with pytest.raises(FedVLError, match="The line evaluations"):
        client._other_run(EXPERIMENT, "2")


def test_counts_of_secure_sums_do_not_leave_by_a_comparison_with_another_run(client):
    client.stay = True
    client.problem(run="2", experiment="d" * 64)
    ready = client.ready["d" * 64]
    summed = ready.prepared.experiment.federation.model_copy(update={"secure_sum": True, "least_clients": 2})
    changed = ready.prepared.experiment.model_copy(update={"federation": summed})
    client.ready["d" * 64] = ready._replace(prepared=SimpleNamespace(**{**vars(ready.prepared), "experiment": changed}))
    with pytest.raises(FedVLError, match="would leave by themselves"):
        client._other_run(EXPERIMENT, "2")
    assert client._other_run("d" * 64, "2").folder == client.state / "runs" / "2"


# --- names of classes in a survey


def test_class_names_leave_only_if_the_policy_says_so(rehearsing, tmp_path):
    client = rehearsing("127.0.0.1", data=True)
    client.surveyed = SimpleNamespace(images=SimpleNamespace(labels=["melanom", "", "scar", "melanom"]))
    ((identity, _),) = client.ready.items()
    asked = Message(request(experiment=identity, round=2, client=0, kind="names"), pack_tensors({}))
    refused = client.answer(asked)
    assert "The line class_names of this party's policy.toml is false" in refused.header.problem
    assert refused.payload == b""
    (client.state / "policy.toml").write_text("class_names = true\nleast_images = 1")
    found = client.answer(asked)
    assert found.header.problem == ""
    assert names_of_tensors(unpack_tensors(found.payload, 10_000)) == ["melanom", "scar"]
    (client.state / "policy.toml").write_text("class_names = true\nsurveys = 0\nleast_images = 1")
    assert (
        "The line surveys"
        in client.answer(asked._replace(header=request(**{**asked.header.model_dump(), "attempt": 1}))).header.problem
    )


# --- noise on the counts of an evaluation


def test_counts_leave_without_noise_only_if_the_policy_has_no_epsilon_and_with_it_within_the_epsilon(client):
    experiment = client.ready[EXPERIMENT].prepared.experiment
    client._allow_counts(Policy(), experiment, None)
    with pytest.raises(FedVLError, match="request them with noise"):
        client._allow_counts(Policy(epsilon=3.0), experiment, None)
    step = image_noise(2.0, 1e-5, 10, 1).step
    client._allow_counts(Policy(epsilon=3.0), experiment, Cost("record", step, 1, "rdp"))
    spent = {"rate": step.rate, "sigma": step.sigma, "steps": 1, "unit": "record", "account": "rdp"}
    client.log.append("budget", **spent)
    with pytest.raises(FedVLError, match=r"is 2\.5, and this round would take the sum over all runs to 2"):
        client._allow_counts(Policy(epsilon=2.5), experiment, Cost("record", step, 1, "rdp"))
