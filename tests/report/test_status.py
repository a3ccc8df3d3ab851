"""How a run stands, from the files of its folder."""

import json
import threading
import time
from html import unescape
from http.client import HTTPConnection

import pytest
from scipy.stats import binomtest

from fedvl.config import Experiment
from fedvl.errors import FedVLError
from fedvl.report.status import RunStatus, make_server, print_status, read_status, render_status
from fedvl.runs.folder import RunFolder

RECORD = {
    "round": 1,
    "cohort": [0, 1, 2],
    "dropped": [2],
    "refused": [{"client": 2, "reason": "it says: <b>no</b>"}],
    "loss": 1.5,
    "bytes_up": 2000,
    "bytes_down": 3000,
    "seconds": 4.0,
    "accuracy": 61.25,
}


@pytest.fixture
def run(tmp_path):
    experiment = Experiment.model_validate({"data": {"clients": 3}, "federation": {"rounds": 5}})
    (tmp_path / "config.toml").write_text(experiment.to_toml())
    (tmp_path / "metrics.jsonl").write_text(json.dumps(RECORD) + '\n{"round": 2, "coh')  # a line that is being written
    status = {
        "parties": ["north", "south", "west"],
        "phase": "train",
        "round": 2,
        "waiting_for": [1],
        "connected": [0, 1],
        "last_seen": {"0": time.time() - 7},
    }
    (tmp_path / "status.json").write_text(json.dumps(status))
    with RunFolder(tmp_path).lock():
        yield tmp_path


def test_everything_is_told(run):
    found = read_status(run)
    assert found.phase == "round 2 of 5: train"
    assert [(p.name, p.state, p.missed) for p in found.parties] == [
        ("north", "connected", 0),
        ("south", "working", 0),
        ("west", "not connected", 1),
    ]
    assert [p.last_seen == "never" for p in found.parties] == [False, False, True]
    assert found.refused == [(1, "west", "it says: <b>no</b>")]
    assert (found.bytes_up, found.bytes_down) == (2000, 3000)


def test_a_waiting_server_names_whom_it_waits_for(run):
    status = json.loads((run / "status.json").read_bytes())
    (run / "status.json").write_text(
        json.dumps({**status, "phase": "waiting for clients", "waiting_for": [1, 2], "connected": [0]})
    )
    found = read_status(run)
    assert found.phase == "round 2 of 5: waiting for south, west"
    assert [party.state for party in found.parties] == ["connected", "not connected", "not connected"]


def test_the_last_accuracy_has_its_interval(run, capsys):
    """Of 800 images 490 are right: 61.25 %."""
    assert read_status(run).accuracy == ""  # how many there are is not known
    status = json.loads((run / "status.json").read_bytes())
    (run / "status.json").write_text(json.dumps({**status, "test_images": 800}))
    low, high = binomtest(490, 800).proportion_ci(method="wilson")
    told = f"Round 1: 61.25 % ({100 * low:.1f} to {100 * high:.1f}) of 800 test images; in brackets, 95 %."
    assert told in render_status(read_status(run))
    print_status(run)
    assert told in capsys.readouterr().out.replace("\n", " ")


def test_a_round_whose_sum_could_not_be_used_is_named(run, capsys):
    void = {**RECORD, "loss": None, "dropped": [0, 1, 2], "void": "The sum of round 1 has the [b]weight[/b] 0."}
    (run / "metrics.jsonl").write_text(json.dumps(void) + "\n")
    print_status(run)
    assert "Round 1 has no update. The sum of round 1 has the [b]weight[/b] 0." in capsys.readouterr().out.replace(
        "\n", " "
    )


def test_before_the_first_round_and_after_the_last(run):
    (run / "metrics.jsonl").unlink()
    (run / "status.json").unlink()
    assert read_status(run).phase == "round 1 of 5: starting"
    (run / "result.json").write_text('{"method": "linear"}')
    assert read_status(run).phase == "finished"


def test_finished_parties_are_those_that_have_the_model(run):
    (run / "result.json").write_text('{"method": "linear", "zero_shot_accuracy": 50.5}')
    (run / "federation.json").write_text('{"federation": "clinic", "run": "a", "told": [0, 2]}')
    found = read_status(run)
    assert [party.state for party in found.parties] == ["finished", "has not fetched the model", "finished"]
    page = render_status(found)
    assert "50.50" in page  # the chart's line of zero-shot


def test_the_page_draws_accuracy_over_rounds(run):
    page = render_status(read_status(run))
    assert page.count("accuracy, % over 1 rounds: 61.25 first, 61.25 last") == 2  # for a desk and for a phone
    (run / "metrics.jsonl").unlink()
    assert "No round is over yet." in render_status(read_status(run))


def test_a_run_that_no_process_holds_has_stopped(run):
    (run / ".lock").unlink()
    found = read_status(run)
    assert found.phase == "stopped after round 1 of 5; continue with fedvl resume"
    assert {party.state for party in found.parties} == {"not connected"}


def test_what_a_client_says_is_text_on_the_page(run):
    page = render_status(read_status(run))
    assert "<b>no</b>" not in page
    assert "&lt;b&gt;no&lt;/b&gt;" in page
    assert "61.25 %" in page


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FedVLError, match="There is no run"):
        read_status(tmp_path)


def test_the_page_answers_this_machine_only(run):
    server = make_server(run, 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        answers = {}
        for host, path in (("127.0.0.1", "/"), ("evil.example", "/"), ("127.0.0.1", "/config.toml")):
            connection = HTTPConnection("127.0.0.1", server.server_port)
            connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
            answers[host, path] = connection.getresponse().status
            connection.close()
        assert list(answers.values()) == [200, 404, 404]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(("days", "line"), [(10, "10 days; fedvl federation renew."), (500, "500 days.")])
def test_the_status_says_how_long_the_servers_certificate_is_valid(days, line):
    found = RunStatus("linear", "x", 5, [], [], None, [], days, "")
    assert f"The server's certificate is valid for {line}" in unescape(render_status(found))
    assert "certificate" not in render_status(found._replace(certificate_days=None))
