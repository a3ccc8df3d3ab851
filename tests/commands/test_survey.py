"""fedvl survey: what it prints and writes."""

import json

import pytest
from helpers.surveys import made_up_survey

from fedvl.runs.settings import resolve_experiment


@pytest.fixture
def surveyed(tmp_path, monkeypatch):
    (tmp_path / "clinic" / "experiments").mkdir(parents=True)
    experiment = resolve_experiment({"method": {"name": "linear"}})
    (tmp_path / "clinic" / "experiments" / "linear.toml").write_bytes(experiment.to_toml().encode())
    monkeypatch.setattr("fedvl.deployment.survey.survey_sites", lambda folder, display, names: made_up_survey())
    monkeypatch.setattr("fedvl.commands.federation.end_on_termination", lambda: None)


def test_lines_and_the_page(call, surveyed, tmp_path):
    shown = call("survey", "clinic", "--out", "found", "--quiet")
    assert shown.exit_code == 0, shown.output
    assert "A class name at 1 site probably means Melanoma." in shown.output
    assert "Survey of 2 sites" in (tmp_path / "found" / "survey.html").read_text()


def test_json(call, surveyed):
    shown = call("survey", "clinic", "--out", "found", "--quiet", "--json")
    assert json.loads(shown.output) == made_up_survey().model_dump()
