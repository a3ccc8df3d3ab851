"""fedvl evaluate: on one machine, and which run of which federation it asks sites about."""

import json
import shutil

import pytest
from evaluation.test_counts import drawn
from PIL import Image
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import count
from fedvl.evaluation.figures import Evaluation, choose_thresholds, figures_of_counts
from fedvl.runs.contents import Federation
from fedvl.runs.evaluation import facts_of, read_evaluation
from fedvl.runs.folder import RunFolder

RUNNER = CliRunner()


@pytest.fixture
def run(folder_of, tmp_path):
    shutil.copytree(folder_of("linear"), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def others(run, tmp_path):
    """Two noise images of each of the run's first three classes."""
    for label in RunFolder(run).result.class_names[:3]:
        (tmp_path / "others" / label).mkdir(parents=True)
        for number in range(2):
            Image.effect_noise((16, 16), 50 + number).save(tmp_path / "others" / label / f"{number}.png")
    return tmp_path / "others"


def test_the_command_writes_the_file_and_the_page(run, others):
    shown = RUNNER.invoke(app, ["evaluate", str(run), "--dataset", str(others), "--quiet"])
    assert shown.exit_code == 0, shown.output
    assert "linear on 6 labelled images (others)." in shown.output
    assert f"The page: {run / 'evaluation.html'}" in shown.output.replace("\n", "")
    assert isinstance(read_evaluation(RunFolder(run)), Evaluation)
    assert "Each class against all others" in (run / "evaluation.html").read_text()


def test_the_evaluation_as_json_and_a_page_elsewhere(run, others, tmp_path):
    words = ["evaluate", str(run), "--dataset", str(others), "--quiet", "--json", "--out", str(tmp_path / "page.html")]
    shown = RUNNER.invoke(app, words, catch_exceptions=False)
    assert json.loads(shown.output) == json.loads((run / "evaluation.json").read_text())
    assert (tmp_path / "page.html").exists()
    assert not (run / "evaluation.html").exists()


def test_two_runs_are_compared_on_the_same_images(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    shown = RUNNER.invoke(app, ["evaluate", str(run), "--against", str(other), "--quiet"], catch_exceptions=False)
    assert "0 images are right with this model only, 0 with other only" in shown.output
    assert "Compared with another model" in (run / "evaluation.html").read_text()


@pytest.mark.parametrize(
    "words, said",
    [(("clinic", "RUN", "RUN"), "Give a run, after its federation's folder"), (("clinic", "RUN"), "leave it out")],
)
def test_words_that_name_no_run_are_refused(run, words, said):
    shown = RUNNER.invoke(app, ["evaluate", *(str(run) if word == "RUN" else word for word in words)])
    assert isinstance(shown.exception, FedVLError)
    assert said in str(shown.exception)


@pytest.fixture
def sites(run, tmp_path, monkeypatch):
    """The run is one between machines, whose sites send made-up counts; the numbers of the evaluations asked for."""
    RunFolder(run).write_federation(Federation(federation=str(tmp_path / "clinic"), run="0" * 32))
    asked: list[int] = []

    def evaluate_sites(folder, number, display, against, noise):
        assert against is None
        assert noise == ((4.0, 1e-5) if number == 2 else None)
        asked.append(number)
        assert folder.at_work, "nobody else may use it at the same time"
        names = folder.result.class_names
        counts = count(*drawn(200, classes=len(names)))
        return Evaluation(
            **facts_of(folder, folder.result),
            images_from="the sites' own test images",
            thresholds_from="made up",
            secure_sum=False,
            sites=["north"],
            missing=[],
            refused=[],
            pooled=figures_of_counts(counts, names, choose_thresholds(counts)),
            by_site={},
        )

    monkeypatch.setattr("fedvl.deployment.evaluation.evaluate_sites", evaluate_sites)
    monkeypatch.setattr("fedvl.commands.federation.end_on_termination", lambda: None)
    return asked


def test_the_sites_of_its_federation_are_asked(run, sites, tmp_path):
    for words in ([str(run)], [str(tmp_path / "clinic"), str(run), "--number", "2", "--epsilon", "4"]):
        shown = RUNNER.invoke(app, ["evaluate", *words, "--quiet"], catch_exceptions=False)
        assert "Sites: north." in shown.output
    assert sites == [1, 2]
    assert (run / "evaluation.json").exists()


def test_a_run_of_another_federation_is_refused(run, sites, tmp_path):
    shown = RUNNER.invoke(app, ["evaluate", str(tmp_path / "other"), str(run)])
    assert isinstance(shown.exception, FedVLError)
    assert f"is of another federation: {tmp_path / 'clinic'}." in str(shown.exception)
    assert sites == []


def test_images_here_are_evaluated_without_the_sites(run, sites, others):
    shown = RUNNER.invoke(app, ["evaluate", str(run), "--dataset", str(others), "--quiet"], catch_exceptions=False)
    assert "linear on 6 labelled images (others)." in shown.output
    assert sites == []
