"""fedvl contributions on small runs, as a user types it."""

import json

import pytest
from helpers.closed_form import finished, settings
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.report.page import write_report
from fedvl.runs.settings import resolve_experiment

RUNNER = CliRunner()


@pytest.fixture
def run(tmp_path):
    folder = finished(tmp_path / "run", resolve_experiment(settings()))
    write_report(folder.path)
    return folder.path


def test_contributions_are_printed_drawn_and_read_as_json(run):
    told = RUNNER.invoke(app, ["contributions", str(run), "--quiet"], catch_exceptions=False)
    assert "32 models were valued" in told.output
    assert told.output.count("\n") >= 7
    found = json.loads(RUNNER.invoke(app, ["contributions", str(run), "--quiet", "--json", "--orders", "3"]).output)
    assert found["orders"] == 3
    assert len(found["intervals"]) == 5
    page = (run / "report.html").read_text()
    assert "Contributions of clients" in page
    assert "estimated from 3 random orders" in page


def test_retraining_says_what_it_costs(tmp_path):
    asked = {"method": {"name": "linear"}, "data": {"shots": 4, "clients": 2}, "federation": {"rounds": 1}}
    folder = finished(tmp_path / "run", resolve_experiment(asked))
    told = RUNNER.invoke(app, ["contributions", str(folder.path)], catch_exceptions=False)
    assert "Up to 4 models are trained" in told.output + told.stderr
