"""fedvl compare, fedvl reproduce and fedvl log as a user meets them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fedvl.cli import app
from fedvl.errors import FedVLError

SMALL = ["--set", "federation.rounds=2", "--set", "data.shots=4", "--set", "data.clients=2", "--quiet"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> Result:
        monkeypatch.setattr("sys.argv", ["fedvl", *words])
        return CliRunner().invoke(app, words)

    return run


def test_compare_three_methods(call: Any, tmp_path: Path) -> None:
    words = ["compare", "--methods", "linear,fst-cbdg,zero-shot", "--partition", "iid,shards:5", "--seeds", "1", *SMALL]
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in ("fst-cbdg", "shards:5", "n = 1 seed."))
    out = tmp_path / "comparisons" / "comparison"
    summary = json.loads((out / "comparison.json").read_bytes())
    assert len(summary["cells"]) == 6
    assert summary["command"] == "fedvl " + " ".join(words)
    for cell in summary["cells"]:
        (name,) = cell["runs"]
        assert json.loads((out / "runs" / name / "result.json").read_bytes())["accuracy"] == cell["mean"]


def test_compare_a_file_of_rows_and_columns(call: Any, tmp_path: Path) -> None:
    grid = '[base]\ndata = { clients = 2, shots = 4, partition = "iid" }\n[rows.plain]\n[rows.steep]\n'
    (tmp_path / "grid.toml").write_text(grid + "training = { learning_rate = 0.1 }\n")
    assert call("compare", "grid.toml", "--seeds", "1", "--out", "out", *SMALL).exit_code == 0
    summary = json.loads((tmp_path / "out" / "comparison.json").read_bytes())
    assert summary["rows"] == ["plain", "steep"]


def test_a_failed_run_is_told_of_and_the_command_fails(call: Any, tmp_path: Path) -> None:
    done = call("compare", "--methods", "zero-shot,no-such-method", "--seeds", "1", "--out", "out", *SMALL)
    assert done.exit_code == 1
    assert "Failed: no-such-method" in done.output
    assert len(json.loads((tmp_path / "out" / "comparison.json").read_bytes())["cells"]) == 1


def test_compare_wants_methods_or_a_file(call: Any) -> None:
    with pytest.raises(FedVLError, match="Name the methods"):
        raise call("compare").exception


def test_the_list_shows_all_thirty(call: Any) -> None:
    done = call("reproduce", "--list")
    assert sum(line.split(" ")[0].count("/") for line in done.output.splitlines()) == 30


def test_reproduce_on_the_embedded_model_sets_ours_beside_the_papers(call: Any, tmp_path: Path) -> None:
    done = call("reproduce", "fst-cbdg/table4", "--on", "embedded", "--quick", "--quiet")
    assert done.exit_code == 0, done.output
    assert "Embedded model and data, not the paper's." in done.output
    assert "paper 74.0" in done.output
    result = json.loads(
        (tmp_path / "reproductions" / "embedded-quick" / "fst-cbdg" / "table4" / "result.json").read_bytes()
    )
    assert (result["recipe"], result["kind"]) == ("fst-cbdg/table4", "table")
    cell = next(cell for cell in result["cells"] if cell["row"] == "Balanced sampling")
    assert cell["paper"] == 74.0
    assert cell["difference"] == pytest.approx(cell["ours"] - 74.0)


def test_reproduce_says_what_to_fetch(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDVL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FedVLError) as told:
        raise call("reproduce", "fst-cbdg/table1").exception
    for part in ("hf download timm/resnet50_clip.openai", "fedvl data get cifar10", str(tmp_path / "data" / "cinic10")):
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [(["fst-cbdg/table9"], "There is no recipe"), (["all", "--on", "moon"], "--on is paper or embedded")],
)
def test_wrong_words_are_told(words: list[str], told: str, call: Any) -> None:
    with pytest.raises(FedVLError, match=told):
        raise call("reproduce", *words).exception


@pytest.fixture
def run_folder(call: Any, tmp_path: Path) -> Path:
    done = call("run", "--rounds", "3", "--shots", "4", "--clients", "2", "--out", "one", "--quiet")
    assert done.exit_code == 0, done.output
    return tmp_path / "one"


def test_tensorboards_own_reader_finds_every_round(call: Any, run_folder: Path, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # exported again, nothing is there twice
        assert call("log", str(run_folder), "--to", "tensorboard", "--out", "logs").exit_code == 0
    read = event_accumulator.EventAccumulator(str(tmp_path / "logs" / "one"))
    read.Reload()
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    found = [(event.step, event.value) for event in read.Scalars("rounds/accuracy")]
    assert found == [(line["round"], pytest.approx(line["accuracy"])) for line in lines]
    result = json.loads((run_folder / "result.json").read_bytes())
    assert read.Scalars("final/accuracy")[0].value == pytest.approx(result["accuracy"])


def test_mlflow_finds_every_round(call: Any, run_folder: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    for _ in range(2):
        assert call("log", str(run_folder), "--to", "mlflow", "--out", "logs").exit_code == 0
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'logs' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fedvl").experiment_id])
    history = client.get_metric_history(run.info.run_id, "accuracy")
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [(point.step, point.value) for point in history] == [(line["round"], line["accuracy"]) for line in lines]
    assert run.data.params["data.clients"] == "2"


def test_log_wants_a_run_and_a_program(call: Any, run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FedVLError, match="There is no run in"):
        raise call("log", str(tmp_path)).exception
    with pytest.raises(FedVLError, match="--to is tensorboard or mlflow"):
        raise call("log", str(run_folder), "--to", "paper").exception
