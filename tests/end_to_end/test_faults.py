"""Faults among real processes, with TLS and keys: the link is killed, a connection is cut, a client is too slow.

A run ends with the bits that the same experiment has in one process, without the clients that its record says were dropped.
"""

import json
import os
import signal
import time
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.kills import draw_images
from helpers.machines import (
    LATEST,
    Wire,
    alone,
    clients_at_work,
    committed,
    dropped,
    ended,
    kill,
    make_federation,
    of_folder,
    redirect,
    resume,
    start_server,
    wait_until,
)

from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.supervisor import free_port
from fedvl.tensors import digest, load

NAMES = ["north", "south"]
SOUTH = 1
CUT_SECONDS = 5.0
FEDERATION = {"threads": 1, "chunk": 1, "deadline": 120}  # one client in a kernel, as between processes: the same bits
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "linear": {"federation": {**FEDERATION, "rounds": 3, "quorum": 2}},
    "fst-cbdg": {"federation": {**FEDERATION, "rounds": 3, "deadline": 15}},
    "pfedprompt": {"federation": {**FEDERATION, "rounds": 2, "quorum": 2}},
    "fedpp": {"federation": {**FEDERATION, "rounds": 2, "quorum": 2}, "method": {"visual_prompts": False}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A federation of two clients, at work; the wire of one of them can be cut."""
    root = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(root / "cache"))
        images = draw_images(root)
        experiments = {name: resolve(name, settings, images) for name, settings in EXPERIMENTS.items()}
        folder = make_federation(root / "clinic", {name: list(experiments.values()) for name in NAMES})
        port = free_port()
        with Wire(port, redirect(folder, NAMES[SOUTH], port)) as wire, clients_at_work(folder, NAMES) as place:
            place.wire, place.experiments = wire, experiments
            yield place


def resolve(name, settings, images):
    common = {"device": "cpu", "data": {"dataset": str(images), "partition": "iid"}, "training": {"local_epochs": 1}}
    method = {"name": name, **settings.get("method", {})}
    return resolve_for_parties({**common, **settings, "method": method}, len(NAMES))


def log_of(run):
    return run.with_suffix(".log").read_text()


def assert_same_bits(place, run, name):
    """The run has the tensors of the same experiment in this process, without those who were dropped."""
    if len(json.loads((run / "federation.json").read_bytes())["told"]) < len(NAMES):  # too slow for the farewell too
        assert resume(run).wait(LATEST) == 0, log_of(run)
    federation = alone(place.experiments[name], dropped(run))
    assert digest(load(run / "model.safetensors")) == digest(federation.shared)
    for client, party in enumerate(NAMES):
        known = json.loads((run / "federation.json").read_bytes())["run"]
        theirs = load(place.folder / "parties" / party / "state" / "runs" / known / "model.safetensors")
        assert digest(theirs) == digest({**federation.shared, **federation.engine.private_of(client)}), party


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_connection_that_is_cut_for_a_while_delays_a_run_and_changes_nothing(place, tmp_path):
    run = tmp_path / "run"
    server = start_server(place, "linear", run)
    with ended([server]):
        wait_until(lambda: committed(run), server)
        place.wire.cut()
        time.sleep(CUT_SECONDS)
        assert committed(run) < 3  # it waits
        assert server.poll() is None
        place.wire.mend()
        assert server.wait(LATEST) == 0, log_of(run)
    assert dropped(run) == []
    assert_same_bits(place, run, "linear")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_client_that_is_too_slow_for_one_of_two_runs_is_left_out_of_its_round_there(place, tmp_path):
    patient, hurried = tmp_path / "patient", tmp_path / "hurried"
    first, slow = start_server(place, "linear", patient), place.clients[NAMES[SOUTH]]
    with ended([first]):
        wait_until(lambda: committed(patient), first)
        second = start_server(place, "fst-cbdg", hurried)
        with ended([second]):
            wait_until(lambda: committed(hurried), second)
            os.kill(slow.pid, signal.SIGSTOP)
            try:
                wait_until(lambda: SOUTH in dict(dropped(hurried)), second)
            finally:
                os.kill(slow.pid, signal.SIGCONT)
            assert second.wait(LATEST) == 0, log_of(hurried)
        assert first.wait(LATEST) == 0, log_of(patient)
    assert any(client == SOUTH and round_index >= 1 for client, round_index in dropped(hurried))
    assert dropped(patient) == []
    assert slow.poll() is None
    assert_same_bits(place, hurried, "fst-cbdg")
    assert_same_bits(place, patient, "linear")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_runs_whose_link_is_killed_say_so_and_go_on_to_the_same_bits(place, tmp_path):
    runs = {name: tmp_path / name for name in ("pfedprompt", "fedpp")}
    servers = {name: start_server(place, name, run, flower__LINK_SECONDS=2.0) for name, run in runs.items()}
    with ended(list(servers.values())):
        wait_until(lambda: any(committed(run) for run in runs.values()), *servers.values())
        [link] = of_folder(place.folder, "superlink")
        kill(link)
        for name, server in servers.items():
            assert server.wait(LATEST) == 2, log_of(runs[name])
            assert "committed rounds are safe" in log_of(runs[name])
    again = {name: resume(run) for name, run in runs.items()}
    with ended(list(again.values())):
        for name, server in again.items():
            assert server.wait(LATEST) == 0, log_of(runs[name])
    for name, run in runs.items():
        assert dropped(run) == []
        assert_same_bits(place, run, name)
