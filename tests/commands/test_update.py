"""fedvl update on a small run of ridge, as a user types it."""

import pytest
from helpers.closed_form import finished, settings
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.errors import FedVLError
from fedvl.report.page import write_report
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

RUNNER = CliRunner()


@pytest.fixture
def run(tmp_path):
    folder = finished(tmp_path / "run", resolve_experiment(settings()))
    write_report(folder.path)
    return folder.path


def test_an_update_leaves_the_old_run_and_names_the_new_one(run):
    told = RUNNER.invoke(app, ["update", str(run), "--dataset", "emoji-mini", "--quiet"], catch_exceptions=False)
    new = run.with_name("run-updated")
    assert told.exit_code == 0
    assert f"The new run is in {new}." in told.output.replace("\n", "")
    result = RunFolder(new).result
    assert len(result.class_names) == 19
    assert len(RunFolder(run).result.class_names) == 10
    assert f"{result.accuracy:.2f} % after the update" in told.output


def test_a_method_that_trains_is_refused_with_what_to_do(tmp_path):
    asked = {"method": {"name": "linear"}, "data": {"shots": 4, "clients": 2}, "federation": {"rounds": 1}}
    folder = finished(tmp_path / "run", resolve_experiment(asked))
    told = RUNNER.invoke(app, ["update", str(folder.path), "--dataset", "emoji-mini"])
    assert isinstance(told.exception, FedVLError)
    assert "use ridge" in str(told.exception)


def test_a_run_with_noise_is_refused_for_its_noise(tmp_path):
    asked = {**settings(), "privacy": {"unit": "record", "epsilon": 3.0}}
    folder = finished(tmp_path / "run", resolve_experiment(asked))
    told = RUNNER.invoke(app, ["update", str(folder.path), "--dataset", "emoji-mini"])
    assert isinstance(told.exception, FedVLError)
    assert "Noise hides the sums" in str(told.exception)
    assert not folder.path.with_name("run-updated").exists()
