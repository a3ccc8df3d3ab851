"""Export a run folder to TensorBoard, MLflow or Weights & Biases.

A run in progress can be exported too; exporting it again replaces the earlier export. Only W&B's
offline runs stay: they have the same id, and W&B takes them for one run.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedvl.errors import FedVLError
from fedvl.files import Content
from fedvl.runs.folder import RunFolder
from fedvl.version import install_command


class Log(NamedTuple):
    name: str
    settings: dict[str, str]  # section.key -> value
    scalars: list[tuple[str, float, int]]  # name, value, round
    final: dict[str, float]  # metrics of the finished run; empty before


def read_log(folder: Path) -> Log:
    """Read the settings, the rounds and, once finished, the result of a run folder."""
    run = RunFolder.open(folder)
    settings = {
        f"{section}.{key}": str(value)
        for section, part in run.settings.items()
        if isinstance(part, dict)
        for key, value in part.items()
    }
    settings |= {key: str(value) for key, value in run.settings.items() if not isinstance(value, dict)}
    scalars = [(name, value, record.round) for record in run.rounds for name, value in numeric_items(record)]
    return Log(folder.resolve().name, settings, scalars, dict(numeric_items(run.result)) if run.finished else {})


def numeric_items(content: Content) -> Iterator[tuple[str, float]]:
    for name, value in content.to_dict().items():
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if known and name not in ("round", "schema") and re.fullmatch(r"[\w.@-]{1,80}", name):
            yield name, float(value)


def to_tensorboard(log: Log, folder: Path) -> str:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise FedVLError(f"This needs TensorBoard: {install_command('tensorboard')}.") from error
    place = folder / log.name
    for old in place.glob("events.out.tfevents.*"):  # they are append-only: a second export would duplicate every point
        old.unlink()
    with SummaryWriter(str(place)) as writer:
        for name, value, step in log.scalars:
            writer.add_scalar(f"rounds/{name}", value, step)
        last = max((step for _, _, step in log.scalars), default=0)
        for name, value in log.final.items():
            writer.add_scalar(f"final/{name}", value, last)
        table = "\n".join(f"| {key} | {value} |" for key, value in log.settings.items())
        writer.add_text("settings", f"| setting | value |\n|---|---|\n{table}")
    return f"tensorboard --logdir {folder}"


def to_mlflow(log: Log, folder: Path) -> str:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # send no usage data
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
    except ImportError as error:
        raise FedVLError(f"This needs MLflow: {install_command('mlflow')}.") from error
    folder.mkdir(parents=True, exist_ok=True)
    store = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=store)
    found = client.get_experiment_by_name("fedvl")
    experiment = (
        found.experiment_id if found else client.create_experiment("fedvl", artifact_location=folder.resolve().as_uri())
    )
    for old in client.search_runs([experiment]):  # not by a filter, in which a name could be more than a name
        if old.info.run_name == log.name:
            client.delete_run(old.info.run_id)
    run = client.create_run(experiment, run_name=log.name).info.run_id
    metrics = [Metric(name, value, 0, step) for name, value, step in log.scalars]
    metrics += [Metric(f"final_{name}", value, 0, 0) for name, value in log.final.items()]
    client.log_batch(run, params=[Param(key, value) for key, value in log.settings.items()])
    for first in range(0, len(metrics), 1000):  # MLflow's limit per call
        client.log_batch(run, metrics=metrics[first : first + 1000])
    client.set_terminated(run)
    return f"mlflow ui --backend-store-uri {store}"


def to_wandb(log: Log, folder: Path) -> str:
    """Write an offline run, which nothing but the user's own ``wandb sync`` sends anywhere."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # W&B would tell its makers of each use, offline too
    try:
        import wandb
    except ImportError as error:
        raise FedVLError(f"This needs Weights & Biases: {install_command('wandb')}.") from error
    folder.mkdir(parents=True, exist_ok=True)
    identity = hashlib.sha256(log.name.encode()).hexdigest()[:16]
    run = wandb.init(
        project="fedvl", name=log.name, id=identity, dir=str(folder), mode="offline", config=dict(log.settings)
    )
    rounds: dict[int, dict[str, float]] = {}
    for name, value, step in log.scalars:
        rounds.setdefault(step, {})[name] = value
    for step, values in rounds.items():
        run.log(values, step=step)
    run.summary.update({f"final_{name}": value for name, value in log.final.items()})
    run.finish()
    return f"wandb sync {folder / 'wandb'}/offline-run-*"


EXPORTERS = {"tensorboard": to_tensorboard, "mlflow": to_mlflow, "wandb": to_wandb}
