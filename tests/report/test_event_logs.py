"""Runs for TensorBoard, MLflow and Weights & Biases: what is read of a folder, and what each program is given."""

import json
import math
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fedvl.errors import FedVLError
from fedvl.files import Content
from fedvl.report.event_logs import EXPORTERS, Log, numeric_items, read_log, to_mlflow, to_tensorboard, to_wandb
from fedvl.version import install_command

LOG = Log(
    "one",
    {"data.clients": "2", "seed": "0"},
    [("accuracy", 50.0, 1), ("loss", 2.0, 1), ("accuracy", 60.0, 3)],
    {"accuracy": 60.0},
)


def test_finite_numbers_are_read_but_for_the_round():
    record = {"round": 1, "schema": 2, "accuracy": 50, "loss": math.nan, "speed": math.inf, "done": True, "void": ""}
    record |= {"bytes_up": 3, "list": [1], "a/b": 1.0, "x" * 80: 1, "y" * 81: 1, "a.b@c-d_e": 2.5, "": 1}
    assert dict(numeric_items(Content.model_validate(record))) == {
        "accuracy": 50.0,
        "bytes_up": 3.0,
        "x" * 80: 1.0,
        "a.b@c-d_e": 2.5,
    }
    assert isinstance(dict(numeric_items(Content.model_validate(record)))["accuracy"], float)


def test_a_run_in_progress_has_settings_and_rounds_and_no_final_figures(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.toml").write_text('seed = 3\n[data]\nclients = 2\ndataset = "cifar10-mini"\n')
    rounds = [{"round": 1, "accuracy": 50.0, "loss": 1.5}, {"round": 2, "accuracy": None, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    log = read_log(folder)
    assert log.name == "one"
    assert log.settings == {"seed": "3", "data.clients": "2", "data.dataset": "cifar10-mini"}
    assert [each for each in log.scalars if each[0] in ("accuracy", "loss")] == [
        ("loss", 1.5, 1),
        ("accuracy", 50.0, 1),
        ("loss", 1.0, 2),
    ]
    assert log.final == {}


def test_tensorboard_reads_rounds_and_the_end_once(tmp_path):
    read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):
        assert to_tensorboard(LOG, tmp_path) == f"tensorboard --logdir {tmp_path}"
    found = read.EventAccumulator(str(tmp_path / "one"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("rounds/accuracy")] == [(1, 50.0), (3, 60.0)]
    assert [(event.step, event.value) for event in found.Scalars("final/accuracy")] == [(3, 60.0)]
    (text,) = found.Tensors("settings/text_summary")
    assert (
        text.tensor_proto.string_val[0].decode() == "| setting | value |\n|---|---|\n| data.clients | 2 |\n| seed | 0 |"
    )


def test_mlflow_has_one_run_of_a_name(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    many = LOG._replace(scalars=[("loss", float(step), step) for step in range(1001)])
    for log in (LOG, LOG._replace(name="other"), many):
        store = f"sqlite:///{tmp_path / 'mlflow.db'}"
        assert to_mlflow(log, tmp_path) == f"mlflow ui --backend-store-uri {store}"
    client = mlflow.MlflowClient(tracking_uri=store)
    runs = {
        run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("fedvl").experiment_id])
    }
    assert sorted(runs) == ["one", "other"]
    run = runs["one"]
    assert run.data.params == LOG.settings
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(step, float(step)) for step in range(1001)]
    assert run.data.metrics["final_accuracy"] == 60.0


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float] = {}
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_an_offline_run_whose_id_is_its_name(tmp_path, monkeypatch):
    began: list[dict[str, Any]] = []
    run = Run()
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)

    def begin(**given: Any) -> Run:
        began.append(given)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=begin))
    assert to_wandb(LOG, tmp_path / "out") == f"wandb sync {tmp_path / 'out' / 'wandb'}/offline-run-*"
    to_wandb(LOG, tmp_path / "out")
    to_wandb(LOG._replace(name="other"), tmp_path / "out")
    first, again, other = (given["id"] for given in began)
    assert first == again != other
    assert (began[0]["mode"], began[0]["name"], began[0]["config"]) == ("offline", "one", LOG.settings)
    assert run.logged[:2] == [(1, {"accuracy": 50.0, "loss": 2.0}), (3, {"accuracy": 60.0})]
    assert run.summary == {"final_accuracy": 60.0}
    assert run.finished
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"


@pytest.mark.parametrize(
    "program, module", [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_program_that_is_not_installed_is_named_with_its_extra(program, module, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FedVLError, match=re.escape(install_command(program))):
        EXPORTERS[program](LOG, tmp_path)
