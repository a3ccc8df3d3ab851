"""Whole experiments on the embedded images, in this process and without files: what tests of claims on real images share."""

from functools import cache
from typing import Any

import fedvl.preparation as preparation
from fedvl.config import overlay
from fedvl.display import TerminalDisplay
from fedvl.evaluation.metrics import summary
from fedvl.experiment import resolve_experiment
from fedvl.federation.round import Federation
from fedvl.seeding import torch_generator


@cache
def _open(name: str, root: Any = None) -> Any:
    return _open_dataset(name, root)


_open_dataset, _load_model = preparation.open_dataset, cache(preparation.load_model)


def accuracy(method: str, settings: dict[str, Any] | None = None, **options: Any) -> tuple[float, float]:
    """Final and zero-shot accuracy of one run on cifar10-mini."""
    layered: dict[str, Any] = {"method": {"name": method, **options}}
    overlay(layered, settings or {})
    preparation.open_dataset, preparation.load_model = _open, _load_model  # opened once for all tests of a process
    prepared = preparation.prepare(resolve_experiment(layered), TerminalDisplay(quiet=True))
    config, seed = prepared.experiment.federation, prepared.experiment.seed
    federation = Federation(
        prepared.method, prepared.engine, config, seed, prepared.method.start(torch_generator(seed, "start"))
    )
    federation.run(lambda shared, kept, number: {}, lambda record: None)
    found = summary(prepared.confusion(federation.shared, federation.kept))["accuracy"]
    return found, summary(prepared.zero_shot_confusion())["accuracy"]
