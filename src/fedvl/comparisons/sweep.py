"""Choose settings on validation images: all combinations or random ones, then one look at the test.

Every setting is an ordinary run that never sees the test images; it is measured after its last
round. The chosen one is trained anew on all training images, and tested once. With
``federation.patience`` a run keeps its best round instead, and the chosen one holds out the same
images.
"""

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from fedvl.comparisons.contents import Comparison, GridCell
from fedvl.comparisons.grid import Grid, layered
from fedvl.comparisons.references import RIDGE, with_references, without_refused
from fedvl.comparisons.run import GridOutcome, perform_grid, shown_setting, single, summarise
from fedvl.config import BY_CLIENT, Settings, nested, parse_assignment
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import wilson
from fedvl.runs.folder import RunFolder
from fedvl.seeding import numpy_generator

LAST_ROUND = "rounds.validation"
COLUMN = "validation accuracy"
MAX_SETTINGS = 10_000  # settings
RANGE = re.compile(r"(?P<low>-?[\d.]+(e-?\d+)?)\.\.(?P<high>-?[\d.]+(e-?\d+)?)(?P<log>:log)?")


class Range(NamedTuple):
    """Numbers that a random draw takes one of: whole ones if both ends are."""

    low: float
    high: float
    logarithmic: bool


Axis = Range | list[Any]


def read_axes(assignments: Sequence[str]) -> dict[str, Axis]:
    """Return the values of each ``section.key=A,B`` or ``section.key=LOW..HIGH[:log]``."""
    axes: dict[str, Axis] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        found = RANGE.fullmatch(text.strip())
        if found:
            parse_assignment(f"{key}=0")  # that it is a key
            axes[key.strip()] = as_range(assignment, found)
        else:
            parts = [text] if text.lstrip().startswith("[") else text.split(",")
            axes[key.strip()] = [value_of(parse_assignment(f"{key}={part.strip()}")) for part in parts]
    return axes


def listed_axes(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values to try of each setting; every row tries all of them, so none are drawn."""
    axes = {}
    for key, axis in read_axes(assignments).items():
        if isinstance(axis, Range):
            raise FedVLError(f"--tune takes values to try, as in {key}=0.001,0.01,0.1; {key} has a range.")
        axes[key] = axis
    return axes


def as_range(assignment: str, found: re.Match[str]) -> Range:
    try:
        low, high = (float(found[end]) for end in ("low", "high"))
    except ValueError as error:
        raise FedVLError(f"A range is LOW..HIGH, for example 0.001..1:log, not '{assignment}'.") from error
    if not low < high or (found["log"] and low <= 0):
        raise FedVLError(f"A range goes from a lower to a higher number, above 0 with :log; '{assignment}' does not.")
    return Range(low, high, bool(found["log"]))


def value_of(settings: Mapping[str, Any]) -> Any:
    """Return the only value in nested settings."""
    while isinstance(settings, Mapping):
        (settings,) = settings.values()
    return settings


def settings_to_try(axes: Mapping[str, Axis], random: int | None) -> dict[str, Settings]:
    """Return all combinations, or so many random ones, by name; a key of one value is no choice."""
    choices = {key: axis for key, axis in axes.items() if isinstance(axis, Range) or len(axis) > 1}
    if not choices:
        raise FedVLError(
            "Nothing to choose from; give a setting several values, as in --set training.learning_rate=0.01,0.1."
        )
    if random is None:
        if ranges := [key for key, axis in choices.items() if isinstance(axis, Range)]:
            raise FedVLError(f"{ranges[0]} is a range; say how many settings to draw with --random.")
        drawn = list(itertools.islice(itertools.product(*(list(axis) for axis in choices.values())), MAX_SETTINGS + 1))
    else:
        generator = numpy_generator(0, "sweep")
        drawn = [tuple(draw(axis, generator) for axis in choices.values()) for _ in range(random)]
    if len(drawn) > MAX_SETTINGS:
        raise FedVLError(f"These are more than {MAX_SETTINGS:,} settings; give fewer values, or use --random.")
    lasts = [key.rpartition(".")[2] for key in choices]
    words = [key if lasts.count(last) > 1 else last for key, last in zip(choices, lasts, strict=True)]
    return {
        ", ".join(f"{word} {shown_setting(value)}" for word, value in zip(words, values, strict=True)): layered(
            *(nested(key, value) for key, value in zip(choices, values, strict=True))
        )
        for values in drawn
    }


def draw(axis: Axis, generator: Any) -> Any:
    if not isinstance(axis, Range):
        return axis[int(generator.integers(len(axis)))]
    low, high, logarithmic = axis
    ends = (math.log(low), math.log(high)) if logarithmic else (low, high)
    drawn = float(generator.uniform(*ends))
    drawn = math.exp(drawn) if logarithmic else drawn
    return round(drawn) if low.is_integer() and high.is_integer() else float(f"{drawn:.3g}")


def sweep_grid(base: Settings, axes: Mapping[str, Axis], random: int | None, share: float, seeds: int) -> Grid:
    """Return the grid of a sweep: a row for each setting, judged by validation images alone."""
    fixed = [nested(key, axis[0]) for key, axis in axes.items() if not isinstance(axis, Range) and len(axis) == 1]
    common = layered(base, *fixed)
    patient = common.get("federation", {}).get("patience") is not None
    return Grid.model_validate(
        {
            "title": "Sweep",
            "unit": "%",
            "measure": "validation_accuracy" if patient else LAST_ROUND,
            "seeds": seeds,
            "base": common,
            "rows": settings_to_try(axes, random),
            "columns": {COLUMN: {}},
            "over": blind(share),
        }
    )


def blind(share: float) -> Settings:
    """Return settings that hold out images for validation and leave the test alone."""
    return {"evaluation": {"validation": share, "test": False}}


def tested_settings(grid: Grid) -> Settings:
    """Return the overrides of the chosen run: the test, and all images unless it chooses rounds."""
    evaluation = {
        key: value for key, value in grid.over.get("evaluation", {}).items() if key not in blind(0)["evaluation"]
    }
    held = {"validation": grid.over["evaluation"]["validation"]} if grid.measure != LAST_ROUND else {}
    return {**grid.over, "evaluation": {**evaluation, **held}}


def perform_sweep(grid: Grid, runs: Path, display: GridDisplay, opener: Opener, command: str) -> Comparison:
    """Run all settings, choose one, run it with the test, and return the summary of all."""
    outcome = perform_grid(grid, runs, display, opener)
    summary = summarise(outcome, command)
    cells = [validated_on(outcome, cell) for cell in summary.cells]
    whole = [cell for cell in cells if cell.n == grid.seeds]
    if not whole:
        return summary.model_copy(update={"cells": cells})
    best = max(whole, key=lambda cell: cell.mean)  # the first of equals
    cells = [cell.model_copy(update={"best": cell is best, "chosen": cell is best}) for cell in cells]
    summary = summary.model_copy(update={"cells": cells})
    (chosen,) = (cell for cell in cells if cell.chosen)
    tested = grid.model_copy(
        update={
            "rows": {chosen.row: grid.rows[chosen.row]},
            "measure": "accuracy",
            "over": tested_settings(grid),
        }
    )
    final = without_refused(perform_grid(with_references(tested, (RIDGE,)), runs, display, opener))
    told = [choice_sentence(summary, chosen, final, runs), *doubts(grid, chosen, outcome, whole), final.grid.note]
    failures = [*summary.failures, *final.failures]
    return summary.model_copy(update={"failures": failures, "opening": " ".join(filter(None, told))})


def validated_on(outcome: GridOutcome, cell: GridCell) -> GridCell:
    """Return a cell with its validation images and, of a single run, the interval over them."""
    result = outcome.results[cell.place][0]
    images, known = result.validation_images, {}
    if cell.n == 1 and images and result.protocol not in BY_CLIENT:  # there it is a mean over clients
        known = {"interval": wilson(cell.mean, images)}
    return cell.model_copy(update={"images": images, **known})


def doubts(grid: Grid, chosen: GridCell, outcome: GridOutcome, whole: Sequence[GridCell]) -> list[str]:
    """Return doubts about a choice: the end of a range, equal settings, an untrained model."""
    tried = {name: entry.settings for name, entry in grid.rows.items()}
    told = [f"{key} is at the end of its range; try more values." for key in settings_at_edge(tried, chosen.row)]
    equal = [cell.row for cell in whole if cell.mean == chosen.mean and cell.row != chosen.row]
    told += [f"Equally good: {'; '.join(equal)}."] if equal else []
    untrained = [result.untrained_validation_accuracy for result in outcome.results[chosen.place]]
    known = [accuracy for accuracy in untrained if accuracy is not None]
    if len(known) == len(untrained) and statistics.mean(known) >= chosen.mean:
        told.append("The untrained model is as good on the validation images.")
    return told


def chosen_grid(grid: Grid, summary: Comparison) -> Grid | None:
    """Return a grid of the chosen settings, as ``fedvl compare`` reads it; None if nothing was."""
    rows = [cell.row for cell in summary.cells if cell.chosen]
    if not rows:
        return None
    settings = layered(grid.base, grid.rows[rows[0]].settings)
    name = str(settings.get("method", {}).get("name", "linear"))
    return Grid.model_validate({"base": tested_settings(grid), "rows": {name: settings}, "columns": {"accuracy": {}}})


def settings_at_edge(tried: Mapping[str, Settings], chosen: str) -> list[str]:
    """Return the settings whose chosen value is at the edge of the values tried."""
    found = []
    for section, part in tried[chosen].items():
        for key in part if isinstance(part, Mapping) else ():
            numbers = [value_of({key: settings[section][key]}) for settings in tried.values()]
            mine = part[key]
            if len(set(map(str, numbers))) > 1 and all(isinstance(value, Real) for value in numbers):
                found += [f"{section}.{key}"] if mine in (min(numbers), max(numbers)) else []
    return found


def choice_sentence(summary: Comparison, chosen: GridCell, final: GridOutcome, runs: Path) -> str:
    """Say what was chosen, how close others were, and what it is worth on the test."""
    others = [cell for cell in summary.cells if cell is not chosen]
    text = f"Of {len(summary.rows)} settings, {chosen.row} is the best on {chosen.images:,} validation images"
    text += f" ({chosen.mean:.1f} %)"
    if chosen.interval is not None:
        near = sum(cell.mean >= chosen.interval.low for cell in others)
        which = "the other lies" if len(others) == 1 else f"{near} of the other {len(others)} lie"
        text += f"; {which} within its interval of 95 %" if near else ""
    place = chosen.place
    if place not in final.runs:
        return text + "."
    result = final.results[place][0]
    mean = statistics.mean(single(figure) or 0.0 for figure in final.figures[place])
    count = sum(map(sum, RunFolder(runs / final.runs[place][0]).result.confusion))
    text += f". On {count:,} test images, looked at once, it has {mean:.1f} %"
    if len(final.runs[place]) == 1 and result.protocol not in BY_CLIENT:
        low, high = wilson(mean, count)
        text += f" ({low:.1f} to {high:.1f})"
    reference, solved = result.zero_shot_accuracy, final.figures.get((RIDGE, COLUMN))
    text += f", zero-shot {reference:.1f} %" if reference is not None else ""
    return text + (f", ridge {statistics.mean(single(figure) or 0.0 for figure in solved):.1f} %." if solved else ".")
