"""Run whole experiments in one process without files, for tables of many runs.

Each dataset and model is opened once.
"""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import fedvl.runs.preparation as preparation
from fedvl.config import Experiment
from fedvl.data.sources import Opener
from fedvl.display import Display, Silent
from fedvl.evaluation.judge import Judge
from fedvl.federation.records import RoundFigures
from fedvl.federation.round import Federation
from fedvl.runs.contents import Result
from fedvl.runs.experiment import complete, local_engine, make_judge
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared
from fedvl.runs.result import pseudo_label_figures
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

OPENER = Opener.once()


class Finished(NamedTuple):
    prepared: Prepared
    federation: Federation
    judge: Judge
    seconds: float  # of training

    @property
    def accuracy(self) -> float:
        return float(self.judge.judge(self.federation.shared, self.federation.last).figures["accuracy"])

    @property
    def zero_shot_accuracy(self) -> float:
        judged = self.judge.judge_zero_shot()
        assert judged is not None, "this model answers nothing without training"
        return float(judged.figures["accuracy"])


def prepare(settings: dict[str, Any]) -> Prepared:
    """Prepare an experiment, described as in a TOML file, up to its first round."""
    return preparation.prepare(resolve_experiment(settings), Silent(), OPENER)


def run(settings: dict[str, Any]) -> Finished:
    """Run all rounds of an experiment; the records include the accuracy of any pseudo-labels."""
    prepared = prepare(settings)
    seed, engine = prepared.experiment.seed, local_engine(prepared)
    start = prepared.method.start(torch_generator(seed, "start"))
    federation = Federation(prepared.method, engine, prepared.experiment.federation, seed, start)
    began = time.perf_counter()
    if federation.trains:
        federation.run(lambda shared, last, number: RoundFigures().joined(pseudo_label_figures(prepared, federation)))
    return Finished(prepared, federation, make_judge(prepared, engine), time.perf_counter() - began)


def run_experiment(experiment: Experiment, folder: Path, display: Display, opener: Opener = OPENER) -> Result:
    """Run, or go on with, an experiment in a folder that is there; its result."""
    run_folder = RunFolder(folder)
    run_folder.describe(experiment)
    return complete(run_folder, display, opener)


def norm(tensors: Tensors) -> float:
    """Return the norm of all tensors as one vector."""
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()))
