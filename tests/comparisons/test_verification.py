"""Comparisons are verified by executing them again: every kind of forged figure is found."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.forging import compared_with, edited, forged_right, summarised_again, verdict_of

from fedvl.comparisons.verification import read_comparison
from fedvl.errors import FedVLError
from fedvl.files import file_sha256


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return compared_with(
        tmp_path_factory.mktemp("honest") / "c", "--methods", "linear", "--seeds", "2", "--no-references"
    )


@pytest.fixture
def copy(honest, tmp_path):
    return Path(shutil.copytree(honest, tmp_path / "c"))


def first_run(folder):
    return sorted((folder / "runs").iterdir())[0]


def test_an_honest_comparison_has_the_same_bits_elsewhere(copy):
    found = verdict_of(copy)
    assert (found["verdict"], found["left"], found["summary"]) == ("same bits", 0, [])
    assert [run["verdict"] for run in found["runs"]] == ["same bits"] * 2


def test_a_sample_executes_that_many_runs(copy):
    found = verdict_of(copy, "--sample", "1")
    assert (found["verdict"], len(found["runs"]), found["left"]) == ("same bits", 1, 1)


def accuracy(folder):
    edited(first_run(folder) / "result.json", lambda result: result.update(accuracy=99.0))


def predictions(folder):
    edited(first_run(folder) / "result.json", forged_right)


def rounds(folder):
    path = first_run(folder) / "metrics.jsonl"
    path.write_text(re.sub(r'"loss": [0-9.]+', '"loss": 0.001', path.read_text()))


def answers(folder):
    path = first_run(folder) / "test.csv"
    lines = path.read_text().splitlines()
    file, truth, _, *rest = lines[1].split(",")
    other = "frog" if lines[1].split(",")[2] != "frog" else "ship"
    path.write_text("\n".join([lines[0], ",".join([file, truth, other, *rest]), *lines[2:]]) + "\n")


def evaluation(folder):
    edited(first_run(folder) / "evaluation.json", lambda found: found["pooled"].update(images=7))


def settings(folder):
    path = first_run(folder) / "config.toml"
    path.write_text(path.read_text().replace("learning_rate = ", "learning_rate = 1"))


def seed(folder):
    path = first_run(folder) / "config.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 5"))


def tensors(folder):
    """Put the tensors of the other run in place, with their hashes."""
    ours, other = sorted((folder / "runs").iterdir())
    shutil.copyfile(other / "model.safetensors", ours / "model.safetensors")
    theirs = json.loads((other / "result.json").read_text())
    sha256 = file_sha256(ours / "model.safetensors")

    def put(result):
        result.update(state_sha256=theirs["state_sha256"])
        result["files_sha256"]["model.safetensors"] = sha256

    edited(ours / "result.json", put)


def damaged_tensors(folder):
    path = first_run(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")


def mean(folder):
    edited(folder / "comparison.json", lambda found: found["cells"][0].update(mean=99.0))


def interval(folder):
    edited(folder / "comparison.json", lambda found: found["cells"][0].update(interval=[90.0, 95.0]))


def seeds(folder):
    edited(folder / "comparison.json", lambda found: found["cells"][0].update(seeds=[3, 4]))


def title(folder):
    edited(folder / "comparison.json", lambda found: found.update(opening="linear is best."))


def page(folder):
    path = folder / "report.html"
    path.write_text(path.read_text().replace("Comparison", "Comparision", 1))


def curves(folder):
    path = folder / "curves.pdf"
    path.write_bytes(path.read_bytes().replace(b"linear", b"Linear").replace(b"round", b"Round"))


def table(folder):
    path = folder / "table.csv"
    path.write_text(re.sub(r"accuracy,[0-9.]+", "accuracy,99.0", path.read_text()))


def everything(folder):
    """Change one run's predictions, and make the summary, the tables and the page follow from it."""
    predictions(folder)
    summarised_again(folder)


FORGED = {
    accuracy: "accuracy",
    predictions: "right",
    rounds: "metrics.jsonl",
    answers: "test.csv",
    evaluation: "evaluation.json",
    settings: "config.toml is not of the settings",
    seed: "config.toml is not of the settings",
    tensors: "state_sha256",
    damaged_tensors: "model.safetensors",
    mean: "linear, accuracy.mean",
    interval: "interval",
    seeds: "seeds",
    title: "opening",
    page: "report.html",
    curves: "curves.pdf",
    table: "table.csv",
    everything: "right",
}


@pytest.mark.parametrize("forge", FORGED, ids=lambda forge: forge.__name__)
def test_a_forged_figure_is_found_and_named(copy, forge):
    forge(copy)
    found = verdict_of(copy, code=1)
    named = json.dumps([found["summary"], [run["differences"] for run in found["runs"]]])
    assert found["verdict"] == "different"
    assert FORGED[forge] in named


def test_figures_of_another_machine_may_differ_by_rounding_and_no_more(copy):
    run = first_run(copy)
    edited(run / "result.json", lambda result: result.update(machine="arm64 NEON", state_sha256="0" * 64))
    found = verdict_of(run)
    assert found["verdict"] == "within rounding"
    assert found["runs"][0]["elsewhere"][0].startswith("machine arm64 NEON there and ")
    edited(
        run / "result.json", lambda result: result.update(per_round_loss=[1.01 * x for x in result["per_round_loss"]])
    )
    assert verdict_of(run, code=1)["verdict"] == "different"


def test_a_comparison_without_its_grid_or_without_a_file_is_refused(copy):
    edited(copy / "comparison.json", lambda found: found.pop("grid"))
    assert "does not name its grid" in verdict_of(copy, code=2)["error"]
    (copy / "comparison.json").unlink()
    with pytest.raises(FedVLError, match="There is no comparison in"):
        read_comparison(copy)


def test_a_tuned_comparison_is_verified_with_what_it_tried(tmp_path):
    words = ["--methods", "linear", "--seeds", "1", "--no-references", "--tune", "training.learning_rate=0.01,0.1"]
    folder = compared_with(tmp_path / "c", *words)
    assert verdict_of(folder)["left"] == 0
    edited(folder / "comparison.json", lambda found: found["tuned"][0].update(validation=[90.0, 10.0]))
    assert "tuned" in json.dumps(verdict_of(folder, code=1)["summary"])
