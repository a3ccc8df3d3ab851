"""Choose settings for each cell of a grid on validation images; only then is its test looked at.

Every setting is tried in every cell with all seeds, by runs that never see the test images: each
client holds out a share of its training images. The setting with the highest mean accuracy on
these after the last round is chosen for all seeds of the cell. The chosen one is trained anew on
all training images and tested once.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvl.comparisons.contents import Failure, TunedCell
from fedvl.comparisons.grid import Grid, GridEntry, layered
from fedvl.comparisons.run import GridOutcome, Place, at_seeds, single
from fedvl.comparisons.sweep import LAST_ROUND, blind, settings_at_edge, settings_to_try
from fedvl.config import Settings, toml_value
from fedvl.errors import FedVLError
from fedvl.files import write_whole
from fedvl.methods import load_method
from fedvl.methods.base import Method


def perform_tuned(grid: Grid, perform: Callable[[Grid], GridOutcome]) -> GridOutcome:
    """Perform a grid, whose tuned cells are first tried and chosen on validation images."""
    trials = trials_of(grid)
    if not trials.rows:
        return perform(grid)
    tried = perform(trials)
    chosen, tuned = with_choices(grid, tried)
    note = " ".join([*filter(None, [grid.note]), *tuning_sentences(tuned, grid.validation)])
    outcome = perform(chosen.model_copy(update={"note": note}))
    outcome.tuned, outcome.failures = tuned, [*failures_of(chosen, tried), *outcome.failures]
    return outcome


def tried_in(grid: Grid) -> dict[str, dict[str, Settings]]:
    """Return the settings to try in each row that is tuned, by name; as many for each row."""
    tried = {}
    for name, row in grid.rows.items():
        axes = grid.tune if row.tune is None else row.tune
        if axes and (row.tune is not None or trains(layered(grid.base, row.settings))):
            tried[name] = settings_to_try(axes, None)
    if len({len(settings) for settings in tried.values()}) > 1:
        counts = ", ".join(f"{len(settings)} for {row}" for row, settings in tried.items())
        raise FedVLError(f"Every tuned row tries as many settings as the others, for a fair comparison, not {counts}.")
    return tried


def trains(settings: Settings) -> bool:
    """Return whether a row's method has tensors to train; zero-shot has none, and is not tuned."""
    method = load_method(str(settings.get("method", {}).get("name", "linear")))
    return method.start is not Method.start or method.first_private is not Method.first_private


def trials_of(grid: Grid) -> Grid:
    """Return the grid of all settings to try, measured on validation images alone."""
    rows, cells = {}, {}
    for row, tried in tried_in(grid).items():
        for setting, settings in tried.items():
            name = trial_name(row, setting)
            rows[name] = GridEntry(**layered(grid.rows[row].settings, settings))
            cells[name] = grid.cells.get(row, {})
    columns = {name: entry.model_copy(update={"measure": None}) for name, entry in grid.columns.items()}
    changes = {"rows": rows, "columns": columns, "cells": cells, "measure": LAST_ROUND, "tune": {}, "claims": []}
    return grid.model_copy(update={**changes, "over": layered(grid.over, blind(grid.validation))})


def trial_name(row: str, setting: str) -> str:
    return f"{row}: {setting}"


def with_choices(grid: Grid, trials: GridOutcome) -> tuple[Grid, list[TunedCell]]:
    """Return the grid with the chosen settings in its cells, and the choices with their margins."""
    cells: dict[str, dict[str, Settings]] = {row: dict(own) for row, own in grid.cells.items()}
    chosen = list[TunedCell]()
    left_out = list[tuple[str, str]]()
    for row, tried in tried_in(grid).items():
        for column in grid.columns:
            means = {name: mean_over_seeds(trials, (trial_name(row, name), column)) for name in tried}
            finished = {name: mean for name, mean in means.items() if mean is not None}
            if not finished:
                left_out.append((row, column))
                continue
            best = max(finished, key=lambda name: finished[name])  # the first of equals
            cells.setdefault(row, {})[column] = layered(cells.get(row, {}).get(column, {}), tried[best])
            if any(
                grid.columns[column].settings == grid.columns[one.column].settings for one in chosen if one.row == row
            ):
                continue  # another measure of the same runs
            place = (trial_name(row, best), column)
            results = trials.results[place]
            chosen.append(
                TunedCell(
                    row=row,
                    column=column,
                    tried=list(means),
                    validation=list(means.values()),
                    chosen=best,
                    images=results[0].validation_images or 0,
                    seeds=len(results),
                    untrained=statistics.mean(result.untrained_validation_accuracy or 0.0 for result in results),
                    at_edge=settings_at_edge(tried, best),
                    ties=[name for name, mean in finished.items() if mean == finished[best] and name != best],
                )
            )
    return grid.model_copy(update={"cells": cells, "tune": {}, "left_out": [*grid.left_out, *left_out]}), chosen


def mean_over_seeds(trials: GridOutcome, place: Place) -> float | None:
    """Return the mean over all seeds; None if one of them failed, as with a rate that diverges."""
    seeds = range(trials.grid.seeds)
    found = at_seeds(trials.seeds.get(place, ()), list(map(single, trials.figures.get(place, ()))), seeds)
    known = [value for value in found if value is not None]
    return statistics.mean(known) if len(known) == len(seeds) else None


def failures_of(grid: Grid, trials: GridOutcome) -> list[Failure]:
    """Return a failure for each cell in which no setting finished with every seed."""
    found = []
    for row, column in grid.left_out:
        reasons = [one for one in trials.failures if one.column == column and one.row.startswith(f"{row}: ")]
        if reasons:
            error = f"No setting finished with every seed; the first: {reasons[0].error}"
            found.append(Failure(row=row, column=column, seed=reasons[0].seed, error=error))
    return found


def write_grid(grid: Grid, path: Path) -> None:
    """Write a grid's settings as TOML that ``fedvl compare`` reads."""
    parts: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [(("base",), grid.base), (("over",), grid.over)]
    rows = {name: entry for name, entry in grid.rows.items() if not entry.reference}  # `fedvl compare` adds the others
    parts += [(("rows", name), entry_of(entry)) for name, entry in rows.items()]
    parts += [(("columns", name), entry_of(entry)) for name, entry in grid.columns.items()]
    parts += [(("cells", row, name), own) for row in rows for name, own in grid.cells.get(row, {}).items()]
    top = {"title": grid.title, "unit": grid.unit, "measure": grid.measure, "seeds": grid.seeds}
    top |= {} if grid.references else {"references": False}
    lines = [f"{key} = {toml_value(value)}" for key, value in top.items()]
    for place, settings in parts:
        lines += ["", f"[{'.'.join([place[0], *map(toml_value, place[1:])])}]"]
        lines += [f"{key} = {inline(value)}" for key, value in settings.items()]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def entry_of(entry: GridEntry) -> Settings:
    return {**entry.settings, **({"measure": entry.measure} if entry.measure else {})}


def inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {inline(part)}" for key, part in value.items()) + " }" if value else "{}"
    return toml_value(value)


def tuning_sentences(chosen: Sequence[TunedCell], validation: float) -> list[str]:
    """Return what a table says of the choice: how many settings, on what, and what may be wrong."""
    if not chosen:
        return []
    one, rows = chosen[0], list(dict.fromkeys(cell.row for cell in chosen))
    seeds = "1 seed" if one.seeds == 1 else f"{one.seeds} seeds"
    told = [
        f"Tuned: {len(one.tried)} settings tried for each of {len(rows)} rows in each column, chosen by the mean of {seeds} "
        f"after the last round on {100 * validation:g} % of each client's training images, then trained on all of them "
        "and tested once."
    ]
    for words, cells in (
        ("The chosen value is at the end of its range (try more)", [cell for cell in chosen if cell.at_edge]),
        ("Several settings are equal, and the first was taken", [cell for cell in chosen if cell.ties]),
        (
            "The untrained model is as good on the validation images as the chosen setting",
            [cell for cell in chosen if cell.untrained >= (cell.best or 0)],
        ),
    ):
        if cells:
            told.append(f"{words}: {'; '.join(f'{cell.row} ({cell.column})' for cell in cells)}.")
    return told
