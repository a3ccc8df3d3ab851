"""Plain values of a run for tables, charts and pages.

All rates in `result.json` (accuracy, macro metrics, recalls) are percentages. Every key except
`method` may be missing or null: older runs and methods without rounds still get a page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedvl.evaluation.metrics import fairness
from fedvl.evaluation.statistics import (
    Interval,
    Paired,
    bootstrap_figures,
    bootstrap_macro,
    bootstrap_mean,
    mcnemar,
    wilson,
)
from fedvl.runs.contents import Result
from fedvl.runs.folder import RunFolder

LARGEST = 1e100
NEWCOMERS = ("newcomers_", "newcomers_trained_", "newcomers_zero_shot_")
MAX_RESAMPLED_IMAGES = 10**9  # of a test that can be drawn again


def number(value: object) -> float | None:
    """Return a number that can be drawn as a float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return float(value)


def series(run: RunFolder, result_key: str, metrics_key: str) -> list[tuple[int, float]]:
    """Return (round, value) pairs from result.json or, if it has none, from metrics.jsonl."""
    measured = [record for record in run.rounds if metrics_key in record.model_fields_set]
    values = getattr(run.result, result_key) or [getattr(record, metrics_key) for record in measured]
    if len(values) == len(measured):
        return _known([record.round for record in measured], values)
    return _known(evaluated_rounds(run.result, len(values)), values)


def evaluated_rounds(result: Result, count: int) -> list[int]:
    """Return the rounds of `count` values: as `evaluation.every` says, or else counted from 1."""
    every, last = int(number(result.setting("evaluation", "every")) or 1), result.rounds or 0
    planned = [index for index in range(1, last + 1) if index % every == 0 or index == last]
    return planned if len(planned) == count else list(range(1, count + 1))


def _known(rounds: Sequence[int], values: Sequence[object]) -> list[tuple[int, float]]:
    pairs = ((index, number(value)) for index, value in zip(rounds, values, strict=True))
    return [(index, value) for index, value in pairs if value is not None]


def difference(result: Result) -> float | None:
    """Return the accuracy above zero-shot in points; None if unknown or itself zero-shot."""
    accuracy, reference = number(result.accuracy), number(result.zero_shot_accuracy)
    if accuracy is None or reference is None or result.method == "zero-shot":
        return None
    return accuracy - reference


def images_tested(result: Result) -> int:
    """Return how many test images were asked; 0 if that is not known."""
    return sum(map(sum, result.confusion))


def intervals(result: Result) -> dict[str, Interval]:
    """Return the intervals of a result's percentages that can be known, by their names.

    Shares of the test images are binomial; means over clients or classes are resampled.
    """
    count, found = images_tested(result), {}
    if 0 < count < MAX_RESAMPLED_IMAGES:
        confusion = np.asarray(result.confusion, dtype=np.int64)
        macros = bootstrap_macro(confusion)
        found = {name: macros[name] for name in macros if number(getattr(result, name)) is not None}
    for prefix in ("", "zero_shot_", *NEWCOMERS):
        by_client = [
            value for value in map(number, getattr(result, f"{prefix}per_client_accuracy") or ()) if value is not None
        ]
        value = number(getattr(result, f"{prefix}accuracy"))
        if by_client:
            found[f"{prefix}accuracy"] = bootstrap_mean(by_client)
        elif value is not None and count and prefix not in NEWCOMERS:
            found[f"{prefix}accuracy"] = wilson(value, count)
        if by_client and not prefix:
            found |= fairness_intervals(by_client, result)
    for name in ("ece", "uncalibrated_ece", "zero_shot_ece"):
        if bounds := getattr(result, f"{name}_interval"):
            found[name] = Interval(*bounds)
    turned = number(result.backdoor_success)
    if turned is not None and result.backdoor_images:
        found["backdoor_success"] = wilson(turned, result.backdoor_images)
    for row in result.base_to_new:
        if row.name == "own":  # the accuracy of this protocol; its images are drawn again
            found["accuracy"] = Interval(*row.interval)
            if row.zero_shot_interval:
                found["zero_shot_accuracy"] = Interval(*row.zero_shot_interval)
    return found


def fairness_intervals(by_client: list[float], result: Result) -> dict[str, Interval]:
    """Return intervals of the differences between clients: clients are drawn again."""
    values = np.array(by_client)
    found = bootstrap_figures((len(values),), lambda rows: fairness(values[rows]))
    return {name: found[name] for name in found if number(getattr(result, name)) is not None}


def gain(result: Result) -> Paired | None:
    """Return the run against zero-shot on its own test images; None where it is not known."""
    if difference(result) is None or result.per_client_accuracy:
        return None
    return paired(result.zero_shot_right, result.right)


def against(first: Result, second: Result) -> Paired | None:
    """Return the second run against the first; None unless both had the same test images."""
    same = first.test_sha256 and first.test_sha256 == second.test_sha256
    return paired(first.right, second.right) if same else None


def paired(first: str | None, second: str | None) -> Paired | None:
    return mcnemar(first, second) if first and second and len(first) == len(second) else None


def flatten(config: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield a nested configuration as (dotted key, JSON value) pairs, in order."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
