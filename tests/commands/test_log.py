"""fedvl log as a user meets it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.finished import finish

from fedvl.errors import FedVLError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "one"
    finish(folder, {"data": {"clients": 2, "shots": 4}, "federation": {"rounds": 3}})
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "one")


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


def test_log_wants_a_run_and_a_program(call: Any, run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FedVLError, match="There is no run in"):
        raise call("log", str(tmp_path)).exception
    with pytest.raises(FedVLError, match="--to is tensorboard or mlflow or wandb"):
        raise call("log", str(run_folder), "--to", "paper").exception


@pytest.mark.parametrize("out", [".", "logs"])
def test_only_event_files_of_its_own_are_replaced(out: str, call: Any, run_folder: Path, tmp_path: Path) -> None:
    """Tried on version 0.1: ``fedvl log runs/one --out runs`` deleted the run."""
    pytest.importorskip("tensorboard")
    kept = tmp_path / out / "one" / "notes.txt"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("mine")
    for _ in range(2):
        assert call("log", str(run_folder), "--to", "tensorboard", "--out", out).exit_code == 0
    assert kept.read_text() == "mine"
    assert (run_folder / "result.json").is_file()
    assert len(list(kept.parent.glob("events.out.tfevents.*"))) == 1


class OfflineRun:
    """A stand-in for a run of W&B, whose package is not installed where the tests run."""

    def __init__(self, **given: Any) -> None:
        self.given, self.logged, self.summary, self.finished = given, list[Any](), dict[str, float](), False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_an_offline_run(call: Any, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OfflineRun] = []

    def init(**given: Any) -> OfflineRun:
        made.append(OfflineRun(**given))
        return made[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    done = call("log", str(run_folder), "--to", "wandb", "--out", "logs")
    assert done.exit_code == 0, done.output
    (run,) = made
    assert (run.given["mode"], run.given["name"], run.given["dir"]) == ("offline", "one", "logs")
    assert run.given["config"]["data.clients"] == "2"
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [(step, values["accuracy"]) for step, values in run.logged] == [(n["round"], n["accuracy"]) for n in lines]
    assert run.summary["final_accuracy"] == json.loads((run_folder / "result.json").read_bytes())["accuracy"]
    assert run.finished
    assert "wandb sync" in done.output
    assert os.environ.pop("WANDB_ERROR_REPORTING") == "false"


def test_wandbs_own_reader_finds_every_round(run_folder: Path, tmp_path: Path) -> None:
    datastore = pytest.importorskip("wandb.sdk.internal.datastore")
    from wandb.proto.wandb_internal_pb2 import Record

    words = ["-m", "fedvl.cli", "log", str(run_folder), "--to", "wandb", "--out", str(tmp_path / "logs")]
    subprocess.run([sys.executable, *words], check=True)  # it would share its threads with the test
    (file,) = (tmp_path / "logs").glob("wandb/offline-run-*/run-*.wandb")
    store, found = datastore.DataStore(), []
    store.open_for_scan(str(file))
    while (content := store.scan_data()) is not None:
        record = Record.FromString(content)
        if record.HasField("history"):
            found.append({item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["_step"], row["accuracy"]) for row in found] == [(line["round"], line["accuracy"]) for line in lines]
