"""Run whole experiments in one process without files, for tables of many runs.

Each dataset and model is opened once.
"""

import math
import time
from typing import Any, NamedTuple

import fedvl.preparation as preparation
from fedvl.experiment import resolve_experiment
from fedvl.federation.round import Federation
from fedvl.preparation import Opener, Prepared, Silent
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

OPENER = Opener.once()


class Finished(NamedTuple):
    prepared: Prepared
    federation: Federation
    seconds: float  # of training

    @property
    def accuracy(self) -> float:
        return float(self.prepared.judge(self.federation.shared, self.federation.kept).figures["accuracy"])

    @property
    def zero_shot_accuracy(self) -> float:
        judged = self.prepared.judge_zero_shot()
        assert judged is not None, "this model answers nothing without training"
        return float(judged.figures["accuracy"])


def prepare(settings: dict[str, Any]) -> Prepared:
    """Prepare an experiment, described as in a TOML file, up to its first round."""
    return preparation.prepare(resolve_experiment(settings), Silent(), OPENER)


def run(settings: dict[str, Any]) -> Finished:
    """Run all rounds of an experiment; the records include the accuracy of any pseudo-labels."""
    prepared = prepare(settings)
    seed = prepared.experiment.seed
    start = prepared.method.start(torch_generator(seed, "start"))
    federation = Federation(prepared.method, prepared.engine, prepared.experiment.federation, seed, start)
    began = time.perf_counter()
    if federation.trains:
        federation.run(lambda shared, kept, number: prepared.label_figures(), lambda record: None)
    return Finished(prepared, federation, time.perf_counter() - began)


def norm(tensors: Tensors) -> float:
    """Return the norm of all tensors as one vector."""
    return math.sqrt(sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()))
