"""Whole experiments on the embedded images, in this process and without files: what tests of claims on real images share."""

from typing import Any

from fedvl.config import overlay
from helpers.runs import run


def accuracy(method: str, settings: dict[str, Any] | None = None, **options: Any) -> tuple[float, float]:
    """Final and zero-shot accuracy of one run on cifar10-mini."""
    layered: dict[str, Any] = {"method": {"name": method, **options}}
    overlay(layered, settings or {})
    finished = run(layered)
    return finished.accuracy, finished.zero_shot_accuracy
