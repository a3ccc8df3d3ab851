"""Metrics of a run, asked for over HTTP and read from its folder."""

import json
from http.client import HTTPConnection

import pytest
from helpers.prometheus import read_metrics

from fedvl.config import Experiment
from fedvl.report.loopback import served
from fedvl.report.metrics import metrics_server
from fedvl.runs.folder import RunFolder

BUDGET = {"unit": "client", "epsilon": 1.5, "delta": 1e-5, "sampling": "every client in every round"}


def record(number, **changes):
    counts = {"cohort": [0, 1, 2], "dropped": [], "refused": [], "bytes_up": 300, "bytes_down": 400, "seconds": 2.5}
    return json.dumps({"round": number, **counts, **changes}) + "\n"


@pytest.fixture
def run(tmp_path):
    experiment = Experiment.model_validate({"data": {"clients": 3}, "federation": {"rounds": 5}})
    (tmp_path / "config.toml").write_text(experiment.to_toml())
    with RunFolder(tmp_path).lock():
        yield tmp_path


def scrape(folder):
    with served(metrics_server(folder, 0)) as server:
        connection = HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.status == 200
        assert str(response.getheader("Content-Type")).startswith("text/plain; version=0.0.4")
        found = read_metrics(response.read().decode())
        connection.close()
    return {name.removeprefix("fedvl_") + "".join(f" {value}" for _, value in of): v for (name, of), v in found.items()}


def test_a_run_that_waits_for_its_clients(run):
    status = {"parties": ["north", "south"], "connected": [1], "phase": "waiting for clients", "certificate_days": 40}
    (run / "status.json").write_text(json.dumps(status))
    found = scrape(run)
    assert (found["rounds_committed_total"], found["rounds_planned"], found["run_finished"]) == (0, 5, 0)
    assert (found["client_connected north"], found["client_connected south"]) == (0, 1)
    assert (found["clients"], found["clients_connected"], found["certificate_days"]) == (2, 1, 40)
    assert not {"round_seconds", "accuracy_percent"} & found.keys()


def test_counts_are_those_of_all_committed_rounds(run):
    refused = [{"client": 2, "reason": 'its "answer"\ncame too late'}]
    lines = [
        record(1, accuracy=50.0),
        record(2, dropped=[2], refused=refused, accuracy=61.25),
        record(3, seconds=4.0, privacy=BUDGET),
    ]
    (run / "metrics.jsonl").write_text("".join(lines))
    found = scrape(run)
    assert found["rounds_committed_total"] == 3
    assert (found["requests_total"], found["requests_answered_total"], found["requests_refused_total"]) == (9, 8, 1)
    assert (found["received_bytes_total"], found["sent_bytes_total"]) == (900, 1200)
    assert (found["round_seconds"], found["accuracy_percent"], found["epsilon_spent client"]) == (4.0, 61.25, 1.5)
    assert "clients_connected" not in found  # all clients are in this process
