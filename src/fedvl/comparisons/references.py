"""Reference rows of a comparison, run beside the rows that were asked for: zero-shot and ridge.

They have their methods' own options, share the data, model and protocol of the other rows, and are
not tuned. ``ridge`` uses labels, so it stands beside methods that do. If a dataset or protocol
refuses a reference row, the comparison does not fail: the note says why the row is missing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvl.comparisons.grid import Grid, GridEntry, layered
from fedvl.comparisons.run import AVERAGED, GridOutcome, Place
from fedvl.config import Settings
from fedvl.methods import load_method
from fedvl.methods.base import Method
from fedvl.runs.settings import resolve_experiment

ZERO_SHOT, RIDGE = "zero-shot", "ridge"
SAID = {ZERO_SHOT: "zero-shot (not trained)", RIDGE: "ridge (one exchange of sums over labelled images)"}
SHARED = ("data", "model", "evaluation")  # sections of settings that all rows of a column share

Reasons = dict[tuple[str, str], list[str]]  # columns by row and error


def with_references(grid: Grid, names: Sequence[str] = (ZERO_SHOT, RIDGE), *, given: bool = True) -> Grid:
    """Return the grid with the reference rows that it lacks; only tables of accuracy have any."""
    grid = grid if given else grid.model_copy(update={"references": False})
    measures = {grid.measure_of(row, column).partition("@")[0] for row in grid.rows for column in grid.columns}
    if not grid.references or not measures & {*AVERAGED}:
        return grid
    asked = {method_of(layered(grid.base, row.settings)) for row in grid.rows.values()}
    wanted, told = [name for name in names if name not in {*asked, *grid.rows}], []
    if RIDGE in wanted and not any(map(uses_labels, asked)):
        wanted.remove(RIDGE)
        told.append("ridge is left out as a reference row: it uses labels, and none of these methods does.")
    if wanted:
        told.insert(0, f"Reference rows: {' and '.join(SAID[name] for name in wanted)}.")
    added = {name: reference_row(name) for name in wanted}
    return fitted(noted(grid.model_copy(update={"rows": {**grid.rows, **added}}), told))


def reference_row(name: str) -> GridEntry:
    return GridEntry(reference=True, tune={}, **{"method": {"name": name}, "training": {"start_from": None}})


def uses_labels(name: str) -> bool:
    """Return whether a method trains, or is solved, with labels."""
    method = load_method(name)
    return method.labels != "none" and method.start is not Method.start


def method_of(settings: Settings) -> str:
    return str(settings.get("method", {}).get("name", "linear"))


def fitted(grid: Grid) -> Grid:
    """Give the reference rows the settings that the other rows of a column share."""
    asked: dict[str, list[Settings]] = {}
    references = []
    for case in grid.cases():
        if case.seed == 0:
            settings = resolve_experiment(case.settings).model_dump(mode="json")
            if grid.rows[case.row].reference:
                references.append((case, settings))
            else:
                asked.setdefault(case.column, []).append(settings)
    cells = dict(grid.cells)
    for case, own in references:
        if common := shared(own, asked.get(case.column, ())):
            cells[case.row] = {**cells.get(case.row, {}), case.column: common}
    return grid.model_copy(update={"cells": cells})


def shared(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the settings in which a reference row differs from what all others agree on."""
    found: Settings = {}
    for section in SHARED if others else ():
        for key, value in others[0][section].items():
            if (
                value is not None
                and value != own[section].get(key)
                and all(one[section][key] == value for one in others)
            ):
                found.setdefault(section, {})[key] = value
    return found


def without_refused(outcome: GridOutcome) -> GridOutcome:
    """Make the failures of reference rows sentences of the note; drop those rows if empty."""
    grid, reasons, failures = outcome.grid, Reasons(), []
    for failure in outcome.failures:
        if not grid.rows[failure.row].reference:
            failures.append(failure)
        elif failure.column not in (columns := reasons.setdefault((failure.row, failure.error), [])):
            columns.append(failure.column)
    measured: set[Place] = {*outcome.figures}
    rows = {
        name: row
        for name, row in grid.rows.items()
        if not row.reference or any((name, column) in measured for column in grid.columns)
    }
    outcome.failures = failures
    outcome.grid = noted(grid.model_copy(update={"rows": rows}), missing(grid, reasons))
    return outcome


def missing(grid: Grid, reasons: Reasons) -> list[str]:
    """Say why a reference row is missing, and in which columns unless in all."""
    return [
        f"The reference row {row} is missing{'' if len(columns) == len(grid.columns) else ' in ' + ', '.join(columns)}: {error}"
        for (row, error), columns in reasons.items()
    ]


def noted(grid: Grid, told: list[str]) -> Grid:
    return grid.model_copy(update={"note": " ".join(filter(None, (grid.note, *told)))})
