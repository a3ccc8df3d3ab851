"""fedvl withdraw, from the command line."""

import json

import pytest

from fedvl.runs.contents import Federation, Status
from fedvl.runs.folder import RunFolder

RUN = ("run", "--method", "linear", "--clients", "3", "--shots", "4", "--rounds", "1", "--set", "federation.threads=1")


@pytest.fixture
def run(call, tmp_path):
    assert call(*RUN, "--set", "data.minimum=0", "--out", "run", "--quiet").exit_code == 0
    return tmp_path / "run"


def test_a_run_is_made_again_without_a_client_and_measured_again_against_it(call, run, tmp_path):
    told = call("withdraw", "run", "1", "--json", "--quiet")
    assert told.exit_code == 0, told.output
    measured = json.loads(told.stdout)
    other = RunFolder(tmp_path / "run-without-1")
    assert other.experiment.federation.withdrawn == (1,)
    assert (other.path / "report.html").is_file()
    assert measured["without"]["state_sha256"] == other.result.state_sha256 != measured["run"]["state_sha256"]
    again = call("withdraw", "run", "1", "--against", "run-without-1", "--quiet")
    assert f"Difference: {measured['difference']:+.2f} points" in again.output
    assert "run-without-1" in again.output
    told_in = [page.read_text(encoding="utf-8") for page in (run / "report.html", other.path / "report.html")]
    assert all(f"Difference: {measured['difference']:+.2f} points" in text for text in told_in)
    assert all('id="withdrawals"' in text for text in told_in)
    assert call("withdraw", "run", "1", "--quiet").exception is not None  # the folder of the first is there


def test_between_machines_it_says_what_to_do(call, run):
    RunFolder(run).write_federation(Federation(federation="clinic", run="a"))
    RunFolder(run).write_status(Status(parties=["north", "south", "west"]))
    error = call("withdraw", "run", "south").exception
    assert "fedvl federation revoke clinic south" in str(error)
    assert "fedvl withdraw run south --against NEW" in str(error)
    assert not RunFolder(run).withdrawals
