"""What logs say of a run: who answered when, with how many bytes, and what was refused."""

import json

import pytest
from helpers.parties import RUN, request

from fedvl.deployment.audit_log import FILE, Log
from fedvl.deployment.messages import write
from fedvl.deployment.participation import own_rounds, who_took_part
from fedvl.run_folder import RunFolder
from fedvl.settings import resolve_experiment


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / FILE)


def entries(log):
    return [json.loads(line) for line in log.path.read_bytes().splitlines()]


def test_a_server_knows_the_bytes_of_each_party_and_when_it_answered_last_in_a_round(log, tmp_path, monkeypatch):
    for client in (0, 1):
        log.send(write(request(round=0, client=client), b"12345"))
        log.receive(request(round=0, client=client), b"123")
    log.receive(request(round=0, client=1), b"1234")  # after a crash the round was run again
    log.receive(request(round=0, client=0, kind="report"), b"12")
    log.receive(request(round=0, client=0, run="c" * 32), b"of another run")
    log.append("refused", run=RUN, client=1, reason="it says: no")
    folder = RunFolder(tmp_path / "run")
    folder.experiment, folder.federation = resolve_experiment({}), {"run": RUN}
    monkeypatch.chdir(tmp_path.parent)
    found = who_took_part(tmp_path, folder, ["north", "south"])
    assert found["parties"] == [
        {"name": "north", "bytes_up": 5, "bytes_down": 5},
        {"name": "south", "bytes_up": 7, "bytes_down": 5},
    ]
    trained = [entry for entry in entries(log) if entry["kind"] == "received" and entry["run"] == RUN]
    assert found["answers"] == [
        {"round": 1, "client": 0, "time": trained[0]["time"]},
        {"round": 1, "client": 1, "time": trained[2]["time"]},
    ]
    assert found["partition"] is None
    clients = ["fedvl client north --data IMAGES", "fedvl client south --data IMAGES"]
    assert found["command"].splitlines() == [f"fedvl server {tmp_path.name}", *clients]


def test_a_server_of_several_experiments_is_told_which_to_run_again(log, tmp_path):
    (tmp_path / "experiments").mkdir()
    for name in ("linear", "fst-cbdg"):
        (tmp_path / "experiments" / f"{name}.toml").touch()
    log.append("run", run=RUN)
    folder = RunFolder(tmp_path / "run")
    folder.experiment, folder.federation = resolve_experiment({"method": {"name": "fst-cbdg"}}), {"run": RUN}
    first = who_took_part(tmp_path, folder, ["north"])["command"].splitlines()[0]
    assert first == f"fedvl server {tmp_path} --experiment fst-cbdg"


def test_a_party_knows_its_own_rounds_what_it_sent_and_what_it_refused(log, tmp_path):
    log.receive(request(round=0), b"1234")
    log.send(write(request(round=0), b"12"))
    for _ in range(2):  # a server that asks again and again fills no page
        log.receive(request(round=1), b"1234")
        log.send(write(request(round=1, problem="Not at this hour.")))
    log.receive(request(round=2, kind="finish"), b"123456")
    log.receive(request(round=0, run="c" * 32), b"of another run")
    first, second = own_rounds(tmp_path, RUN, 3, rounds=2)
    assert (first["round"], first["bytes_down"], first["bytes_up"]) == (1, 4, 2)
    assert (first["cohort"], first["dropped"], first["refused"]) == ([3], [], [])
    assert 0 <= first["seconds"] < 600
    assert (second["round"], second["bytes_down"], second["bytes_up"]) == (2, 8, 0)
    assert (second["dropped"], second["refused"]) == ([3], [{"client": 3, "reason": "Not at this hour."}])
