"""Read a run folder into plain values for tables, charts and pages.

All rates in `result.json` (accuracy, macro metrics, recalls) are percentages. Every key except
`method` may be missing or null: older runs and methods without rounds still get a page.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedvl.errors import FedVLError


@dataclass(frozen=True)
class Run:
    """Contents of a run folder; `rounds` holds the readable lines of metrics.jsonl by round."""

    folder: Path
    result: dict[str, Any]
    rounds: list[dict[str, Any]]
    unreadable_lines: int = 0
    examples: dict[str, Any] = field(default_factory=dict)  # test images whose prediction training changed


def read_run(folder: Path) -> Run:
    path = folder / "result.json"
    result = _read_json(path)
    if result is None:
        raise FedVLError(f"There is no result.json in {folder}: finish the run first with `fedvl resume {folder}`.")
    if not isinstance(result, dict) or "method" not in result:
        raise FedVLError(f"{path} is not a result of fedvl: it names no method; give the folder of a finished run.")
    rounds, unreadable = read_metrics(folder / "metrics.jsonl")
    examples = _read_json(folder / "examples.json")
    return Run(folder, result, rounds, unreadable, examples if isinstance(examples, dict) else {})


def read_grid_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of a comparison or recipe in a folder; None for any other folder."""
    for name in ("result.json", "comparison.json"):
        found = _read_json(folder / name)
        if isinstance(found, dict) and "kind" in found:
            return found
    return None


def _read_json(path: Path) -> Any:
    """Return the parsed file, or None if it does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} cannot be read ({error}): run the experiment again to make it anew.") from None


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    if not path.exists():
        return [], 0
    by_round: dict[int, dict[str, Any]] = {}
    unreadable = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            # A round repeated after a crash appears twice: the later line is the committed one.
            by_round[int(entry["round"])] = entry
        except (ValueError, KeyError, TypeError):
            unreadable += 1
    return [by_round[index] for index in sorted(by_round)], unreadable


def number(value: object) -> float | None:
    """Return a finite number as a float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def series(run: Run, result_key: str, metrics_key: str) -> list[tuple[int, float]]:
    """Return (round, value) pairs from result.json or, if it has none, from metrics.jsonl."""
    measured = [entry for entry in run.rounds if metrics_key in entry]
    values = run.result.get(result_key) or [entry[metrics_key] for entry in measured]
    if len(values) == len(measured):
        return _known([int(entry["round"]) for entry in measured], values)
    return _known(evaluated_rounds(run.result, len(values)), values)


def accuracy_series(result: dict[str, Any]) -> list[tuple[int, float]]:
    """Return (round, accuracy) pairs from result.json alone."""
    values = result.get("per_round") or []
    return _known(evaluated_rounds(result, len(values)), values)


def evaluated_rounds(result: dict[str, Any], count: int) -> list[int]:
    """Return the rounds of `count` values: as `evaluation.every` says, or else counted from 1."""
    evaluation = (result.get("config") or {}).get("evaluation") or {}
    every, last = int(number(evaluation.get("every")) or 1), int(number(result.get("rounds")) or 0)
    planned = [index for index in range(1, last + 1) if index % every == 0 or index == last]
    return planned if len(planned) == count else list(range(1, count + 1))


def _known(rounds: Sequence[int], values: Sequence[object]) -> list[tuple[int, float]]:
    pairs = ((index, number(value)) for index, value in zip(rounds, values, strict=True))
    return [(index, value) for index, value in pairs if value is not None]


def difference(result: dict[str, Any]) -> float | None:
    """Return the accuracy above zero-shot in points; None if unknown or itself zero-shot."""
    accuracy, reference = number(result.get("accuracy")), number(result.get("zero_shot_accuracy"))
    if accuracy is None or reference is None or result["method"] == "zero-shot":
        return None
    return accuracy - reference


def count_of(value: object) -> int:
    """Return the length of a list, or a plain count as an integer."""
    return len(value) if isinstance(value, list) else int(number(value) or 0)


def flatten(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield a nested configuration as (dotted key, JSON value) pairs, in order."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
