"""Run a grid, one ordinary run folder per case, and summarise it over seeds.

In each column the best row is compared with the second best on the seeds that all rows of the
column have. The lead of an accuracy is beyond chance if its interval of 95 % over seeds and test
images is above 0; other measures have a paired t-test over seeds alone. One seed claims nothing.
"""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fedvl.comparisons.contents import (
    COMPARISON_SCHEMA,
    AgainstRow,
    Averaged,
    Comparison,
    Different,
    Failure,
    GridCell,
    GridPoints,
    GridSeries,
    Points,
    TunedCell,
)
from fedvl.comparisons.grid import Case, Grid, folder_name, layered
from fedvl.comparisons.measures import Figure, MeasuredRun, measure_run
from fedvl.config import MethodConfig, Settings, toml_value
from fedvl.data.catalogue import is_own
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay
from fedvl.errors import FedVLError
from fedvl.evaluation.base_to_new import mean_intervals
from fedvl.evaluation.statistics import (
    SIGNIFICANT,
    Interval,
    bootstrap_clients,
    bootstrap_lead,
    bootstrap_lead_of_clients,
    bootstrap_right,
    holm,
    near_chance,
    paired_p,
    wilson,
)
from fedvl.files import Scalar, no_link
from fedvl.methods import load_method
from fedvl.runs.contents import Result
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment
from fedvl.version import __version__

TEST = (
    "the best row of a column leads the next beyond chance: by the interval of 95 % over seeds and test images, "
    "where there is none by a two-sided paired t-test over seeds (p < 0.05)"
)
# Measures of which smaller is better.
COST_MEASURES = ("bytes", "flops", "seconds", "parameters", "trainable", "loss", "drift", "cosine_distance")

# Measures that are shares of the test images, and so have a chance level.
SHARE_MEASURES = ("accuracy", "curve", "rounds.accuracy")

# Measures in percent, whose averages over datasets papers give.
AVERAGED = ("accuracy", "macro_precision", "macro_recall", "macro_f1")

# What a comparison's page tells of its runs
FACTS = ("dataset", "model", "partition", "clients", "rounds", "protocol", "zero_shot_accuracy")
KEPT = {
    *FACTS,
    *("method", "per_round", "config", "base_to_new", "base_to_new_right"),
    *("per_client_accuracy", "per_client_test_images", "class_names", "class_lists"),
    *("validation_images", "untrained_validation_accuracy"),
}
APART = ("seed", "method.name", "method.sha256")  # settings that differ by themselves

Place = tuple[str, str]  # row and column
Value = TypeVar("Value")


@dataclass
class GridOutcome:
    """Results of a grid: values per cell and seed, run folders, and failures."""

    grid: Grid
    figures: dict[Place, list[Figure]] = field(default_factory=dict)
    runs: dict[Place, list[str]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    tests: dict[Place, list[tuple[str, str]]] = field(
        default_factory=dict
    )  # the test's hash, and which images are right
    results: dict[Place, list[Result]] = field(default_factory=dict)  # what KEPT names of each
    seeds: dict[Place, list[int]] = field(default_factory=dict)  # of the figures, in the same order
    tuned: list[TunedCell] = field(default_factory=list)
    sets: dict[tuple[str, ...], dict[str, Interval]] = field(default_factory=dict)  # of base-to-new, by runs


def perform_grid(grid: Grid, runs: Path, display: GridDisplay, opener: Opener) -> GridOutcome:
    """Run what is not finished and measure all; failures are collected and do not stop the rest."""
    outcome = GridOutcome(grid)
    cases = list(grid.cases())
    for number, case in enumerate(cases):
        began = time.perf_counter()
        title = ", ".join((case.row, case.column, f"seed {case.seed}"))
        display.begin(title, number, len(cases))
        try:
            folder, fresh = perform_case(case, runs, display, opener)
            run = MeasuredRun(folder, opener)
            figure = finite(case.measure, measure_run(case.measure, run))
        except (FedVLError, OSError, ArithmeticError, RuntimeError, ValueError, KeyError) as error:
            reason = str(error) if isinstance(error, FedVLError) else f"{type(error).__name__}: {error}"
            outcome.failures.append(Failure(row=case.row, column=case.column, seed=case.seed, error=reason))
            display.end(f"failed: {reason}", number + 1, len(cases))
            continue
        place = (case.row, case.column)
        outcome.figures.setdefault(place, []).append(figure)
        outcome.seeds.setdefault(place, []).append(case.seed)
        outcome.runs.setdefault(place, []).append(folder.path.name)
        kept = Result.model_validate(run.result.model_dump(include=KEPT, exclude_unset=True))
        outcome.results.setdefault(place, []).append(kept)
        outcome.tests.setdefault(place, []).append((run.result.test_sha256 or "", run.result.right or ""))
        seconds = f"{time.perf_counter() - began:.1f} s" if fresh else "had been run"
        display.end(f"{short(figure)} ({seconds})", number + 1, len(cases))
    return outcome


def perform_case(case: Case, runs: Path, display: GridDisplay, opener: Opener) -> tuple[RunFolder, bool]:
    """Return the finished run, and whether it ran now."""
    folder = folder_of(case, runs)
    with folder.lock(waits=display.waiting):
        fresh = not write_settings(folder).finished
        complete(folder, display, opener)
    return folder, fresh


def folder_of(case: Case, runs: Path) -> RunFolder:
    experiment = resolve_experiment(case.settings)
    folder = RunFolder(no_link(runs / folder_name(experiment)))
    folder.experiment = experiment  # what is asked for, whatever the folder says
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def write_settings(folder: RunFolder) -> RunFolder:
    """Write the settings that were asked for into the run's folder; refuse a folder with others."""
    if not folder.exists:
        folder.describe(folder.experiment)
    elif folder.settings_sha256 != asked_sha256(folder):
        raise FedVLError(
            f"{folder.path / 'config.toml'} is not of the settings that this command asks for; delete {folder.path}, or "
            "choose another --out."
        )
    if folder.federation is not None:
        raise FedVLError(f"{folder.path} is a run between machines, not of this comparison; choose another --out.")
    return folder


def asked_sha256(folder: RunFolder) -> str:
    """Return the SHA-256 of the settings that were asked for, whatever the folder says."""
    return hashlib.sha256(folder.experiment.to_toml().encode()).hexdigest()


def finite(name: str, figure: Figure) -> Figure:
    numbers = figure if isinstance(figure, list) else [single(figure)]
    if not all(map(math.isfinite, (number for number in numbers if number is not None))):
        raise FedVLError(f"'{name}' is not finite in this run; lower training.learning_rate.")
    return figure


def short(figure: Figure) -> str:
    if isinstance(figure, Points):
        return "drawn"
    return f"{figure:.4g}" if isinstance(figure, float) else f"{len(figure)} values"


def summarise(outcome: GridOutcome, command: str, asked: Grid | None = None) -> Comparison:
    """Return everything that tables and figures need, as written to comparison.json.

    ``asked`` is the grid before its cells were tuned.
    """
    grid = outcome.grid
    return Comparison(
        schema=COMPARISON_SCHEMA,
        fedvl_version=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        title=grid.title,
        kind=grid.kind,
        unit=grid.unit,
        seeds=grid.seeds,
        test=TEST,
        rows=list(grid.rows),
        columns=list(grid.columns),
        cells=cells_of_outcome(outcome),
        averages=averaged_columns(grid),
        series=[
            mean_series(place, lists) for place, figures in outcome.figures.items() if (lists := lists_of(figures))
        ],
        points=[
            GridPoints(row=row, column=column, **figures[0].model_dump(exclude_unset=True))
            for (row, column), figures in outcome.figures.items()
            if isinstance(figures[0], Points)  # of the first seed: points cannot be averaged
        ],
        note=grid.note,
        failures=outcome.failures,
        tuned=outcome.tuned,
        facts=facts_of_outcome(outcome),
        curves=curves_of_outcome(outcome),
        different=differing_settings(outcome),
        settings={
            "base": layered(grid.base, grid.over),
            "rows": {name: entry.settings for name, entry in grid.rows.items()},
            "columns": {name: entry.settings for name, entry in grid.columns.items()},
            "cells": grid.cells,
        },
        against=rows_against(outcome) if asked else [],
        grid=asked.model_dump(mode="json", exclude_defaults=True) if asked else {},
    )


def rows_against(outcome: GridOutcome) -> list[AgainstRow]:
    """Compare rows with the one that the grid names, on common seeds; correct p by column."""
    reference, found = outcome.grid.against, list[AgainstRow]()
    numbers: dict[Place, dict[int, float]] = {}
    for place, figures in outcome.figures.items():
        values = zip(outcome.seeds[place], map(single, figures), strict=True)
        numbers[place] = {seed: value for seed, value in values if value is not None}
    for column in outcome.grid.columns if reference else ():
        theirs, rows = numbers.get((reference, column), {}), list[AgainstRow]()
        for row in outcome.grid.rows:
            ours = numbers.get((row, column), {})
            seeds = sorted(ours.keys() & theirs.keys())
            if row == reference or not seeds:
                continue
            pair = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
            difference = statistics.mean(pair[0]) - statistics.mean(pair[1])
            known = AgainstRow(row=row, column=column, reference=reference, difference=difference, seeds=seeds)
            rows.append(known.model_copy(update={"p": paired_p(*pair)}))
        adjusted = iter(holm([one.p for one in rows if one.p is not None]))
        found += [one if one.p is None else one.model_copy(update={"holm": next(adjusted)}) for one in rows]
    return found


def portable(grid: Grid) -> Grid:
    """Return a grid whose cells name what would follow from the files and devices of a machine."""
    cells = {row: dict(own) for row, own in grid.cells.items()}
    for case in grid.cases():
        if case.seed == 0:
            experiment, known = resolve_experiment(case.settings), dict[str, Any]()
            if is_own(experiment.data.dataset):
                known["data"] = {"clients": experiment.data.clients, "partition": experiment.data.partition}
            if case.settings.get("training", {}).get("precision") == "auto":
                known["training"] = {"precision": experiment.training.precision}
            if known:
                own = cells.setdefault(case.row, {})
                own[case.column] = layered(own.get(case.column, {}), known)
    return grid.model_copy(update={"cells": cells})


def averaged_columns(grid: Grid) -> list[Averaged]:
    """Return the columns of several datasets that are alike otherwise, which a table averages."""
    groups: dict[tuple[str, str], list[str]] = {}
    datasets: dict[str, str] = {}
    for name, column in grid.columns.items():
        data = dict(column.settings.get("data", {}))
        datasets[name] = data.pop("dataset", "")
        measure = grid.measure_of(next(iter(grid.rows)), name)
        if datasets[name] and measure.partition("@")[0] in AVERAGED:
            rest = json.dumps({**column.settings, "data": data}, sort_keys=True, default=str)
            groups.setdefault((measure, rest), []).append(name)
    found = []
    for columns in groups.values():
        if len({datasets[name] for name in columns}) == len(columns) > 1:
            ends = {name.partition(", ")[2] for name in columns}
            name = ", ".join(filter(None, ("average", *(ends if len(ends) == 1 else ()))))
            found.append(Averaged(name=name, columns=columns))
    return found


def cells_of_outcome(outcome: GridOutcome) -> list[GridCell]:
    """Return a cell per row and column with a single number, as `single` defines it."""
    cells = list[GridCell]()
    for place, figures in outcome.figures.items():
        numbers = zip(outcome.seeds[place], map(single, figures), strict=True)
        known = {seed: value for seed, value in numbers if value is not None}
        if not known:
            continue
        values = list(known.values())
        cells.append(
            GridCell(
                row=place[0],
                column=place[1],
                measure=outcome.grid.measure_of(*place),
                mean=statistics.mean(values),
                deviation=statistics.stdev(values) if len(values) > 1 else None,
                n=len(values),
                values=values,
                seeds=list(known),
                runs=outcome.runs[place],
                interval=interval_of(outcome, place, values),
                images=images_of(outcome, place),
                protocol=next((one.protocol for one in outcome.results.get(place, ())), None),
                near_chance=guesses(outcome, place),
                best=False,
                p=None,
                against=None,
                ahead=None,
                compared=[],
                significant=False,
            )
        )
    best = [best_of([cell for cell in cells if cell.column == column]) for column in outcome.grid.columns]
    marked = {cell.place: with_lead(outcome, cell) for cell in best if cell}
    return [marked.get(cell.place, cell) for cell in cells]


def with_lead(outcome: GridOutcome, cell: GridCell) -> GridCell:
    """Return the best cell of a column with the interval of its lead, where it is an accuracy."""
    if cell.against is None or cell.measure != "accuracy":
        return cell
    lead = lead_of(outcome, cell.place, (cell.against, cell.column), cell.compared)
    sure = cell.significant if lead is None else lead.low > 0 and len(cell.compared) > 1
    return cell.model_copy(update={"lead": lead, "significant": sure})


def facts_of_outcome(outcome: GridOutcome) -> dict[str, list[Scalar]]:
    """Return the different values of what all runs should share, in their order."""
    runs = [result for results in outcome.results.values() for result in results]
    found = {key: [getattr(run, key) for run in runs] for key in FACTS if runs}
    return {key: list(dict.fromkeys(value for value in values if value is not None)) for key, values in found.items()}


def curves_of_outcome(outcome: GridOutcome) -> list[GridSeries]:
    """Return the accuracy over rounds, as the mean over seeds, of runs that have one."""
    found = {place: [result.per_round for result in results] for place, results in outcome.results.items()}
    return [
        mean_series(place, lists)
        for place, known in found.items()
        if (lists := lists_of(known)) and flat_settings(outcome.results[place][0]).get("evaluation.every") == 1
    ]


def flat_settings(result: Result) -> Settings:
    """Return the settings of a run by section.key."""
    parts = {section: part for section, part in (result.config or {}).items() if isinstance(part, dict)}
    return {f"{section}.{key}": value for section, part in parts.items() for key, value in part.items()}


def differing_settings(outcome: GridOutcome) -> list[Different]:
    """Return the settings in which rows differ, with a text for each row; "" where it has none."""
    flat: dict[str, dict[str, str]] = {}
    for (row, _), results in outcome.results.items():
        if row not in flat:
            flat[row] = {key: shown_setting(value) for key, value in flat_settings(results[0]).items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings if key not in APART)
    texts = {key: [flat.get(row, {}).get(key, "") for row in outcome.grid.rows] for key in keys}
    return [Different(setting=key, values=values) for key, values in texts.items() if len(set(values)) > 1]


def shown_setting(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(value)


def images_of(outcome: GridOutcome, place: Place) -> int | None:
    """Return the test images that were asked, where all seeds asked as many."""
    counts = {len(right.replace("-", "")) for _, right in outcome.tests.get(place, ())}
    return counts.pop() or None if len(counts) == 1 else None


def guesses(outcome: GridOutcome, place: Place) -> bool:
    """Return whether the pretrained model is near chance level where a cell is measured."""
    key, results = outcome.grid.measure_of(*place).partition("@")[0], outcome.results.get(place, ())
    known = [result.zero_shot_accuracy for result in results if result.zero_shot_accuracy is not None]
    if key not in SHARE_MEASURES or not known:
        return False
    chance = statistics.mean(chance_of(result) for result in results)
    images = statistics.mean(len((right or "").replace("-", "")) or 1 for _, right in outcome.tests[place])
    return near_chance(statistics.mean(known), images, chance)


def chance_of(result: Result) -> float:
    """Return the accuracy of guessing, in percent: one of the classes that are asked among."""
    lists = result.class_lists or [result.class_names or []]
    return statistics.mean(100 / len(names) for names in lists if len(names))


def interval_of(outcome: GridOutcome, place: Place, values: Sequence[float]) -> Interval | None:
    """Return the interval of an accuracy over test images and, of several runs, over seeds."""
    key, _, part = outcome.grid.measure_of(*place).partition("@")
    results, tests = outcome.results.get(place, []), outcome.tests.get(place, [])
    if key != "accuracy":
        return None
    if part:
        return interval_of_set(outcome, place, part)
    right = [right.replace("-", "") for _, right in tests]
    shares = [100 * run.count("1") / len(run) if run else math.nan for run in right]
    if len(right) == len(values) and all(map(math.isclose, shares, values)):  # not means over clients
        if len(values) == 1:
            return wilson(values[0], len(right[0]))
        return bootstrap_right(right) if len({(test, len(run)) for test, run in tests}) == 1 else None
    clients = [accuracy_by_client(result) for result in results]
    if len(values) < 2 or len(clients) != len(values) or not all(map(len, (run[0] for run in clients))):
        return None
    return bootstrap_clients(clients)


def accuracy_by_client(result: Result) -> tuple[list[float], list[int]]:
    """Return the accuracy and the test images of each client that has some."""
    pairs = zip(result.per_client_accuracy or (), result.per_client_test_images or (), strict=False)
    known = [(accuracy, images) for accuracy, images in pairs if accuracy is not None and images]
    return [accuracy for accuracy, _ in known], [images for _, images in known]


def interval_of_set(outcome: GridOutcome, place: Place, part: str) -> Interval | None:
    """Return the interval of a figure of the base-to-new protocol."""
    results = outcome.results.get(place, [])
    if len(results) == 1:
        return next((Interval(*row.interval) for row in results[0].base_to_new or () if row.name == part), None)
    right = [result.base_to_new_right for result in results]
    known = [one for one in right if one is not None]
    if not known or len(known) < len(right) or len({(len(one.base), len(one.new)) for one in known}) > 1:
        return None
    runs = tuple(outcome.runs[place])
    if runs not in outcome.sets:  # several columns show figures of the same runs
        outcome.sets[runs] = mean_intervals(known)
    return outcome.sets[runs].get(part)


def lead_of(outcome: GridOutcome, ours: Place, theirs: Place, seeds: Sequence[int]) -> Interval | None:
    """Return the interval of a lead on common seeds; None unless all runs had the same images."""
    places = (ours, theirs)
    tests = [at_seeds(outcome.seeds[place], outcome.tests.get(place, ()), seeds) for place in places]
    images = {(sha256, len(right)) for sha256, right in (*tests[0], *tests[1])}
    if len(images) == 1 and all(sha256 and right and "-" not in right for sha256, right in (*tests[0], *tests[1])):
        return bootstrap_lead(*([right for _, right in found] for found in tests))
    clients = [
        [accuracy_by_client(result) for result in at_seeds(outcome.seeds[place], outcome.results.get(place, ()), seeds)]
        for place in places
    ]
    if len(seeds) > 1 and all(len(found) == len(seeds) and all(own for own, _ in found) for found in clients):
        return bootstrap_lead_of_clients(*clients)
    return None


def beyond_chance(outcome: GridOutcome) -> list[str]:
    """Say, by column, which rows differ significantly from the row that all are compared with."""
    reference, told = outcome.grid.against, []
    for column in outcome.grid.columns if reference else ():
        ours, found = (reference, column), dict[str, list[str]]()
        rows = [row for row in outcome.grid.rows if row != reference and (row, column) in outcome.seeds]
        if ours not in outcome.seeds or outcome.grid.measure_of(*ours) != "accuracy" or guesses(outcome, ours):
            continue
        for row in rows:
            seeds = sorted({*outcome.seeds[row, column]} & {*outcome.seeds[ours]})
            lead = lead_of(outcome, (row, column), ours, seeds) if len(seeds) > 1 else None
            which = (
                "not compared" if lead is None else "above" if lead.low > 0 else "below" if lead.high < 0 else "equal"
            )
            found.setdefault(which, []).append(row)
        parts = [f"{which} it: {', '.join(found[which])}" for which in ("above", "below") if which in found]
        rest = len(found.get("equal", ()))
        parts += [f"no difference is shown for {rest} row{'' if rest == 1 else 's'}"] if rest else []
        if parts:
            told.append(f"{column}, against {reference}, beyond chance in {len(rows)} comparisons: {'; '.join(parts)}.")
    return told


def at_seeds(known: Sequence[int], values: Sequence[Value], seeds: Sequence[int]) -> list[Value]:
    """Return the values of some seeds, in their order."""
    found = dict(zip(known, values, strict=False))
    return [found[seed] for seed in seeds if seed in found]


def single(figure: Figure) -> float | None:
    """Return the number that represents a measured value in a table."""
    if isinstance(figure, list):
        return figure[-1] if figure else None
    return figure.value if isinstance(figure, Points) else figure


def lists_of(figures: Sequence[object]) -> list[list[float]]:
    """Return the figures if each is a list with values; an empty list otherwise."""
    lists = [figure for figure in figures if isinstance(figure, list) and figure]
    return lists if len(lists) == len(figures) else []


def mean_series(place: Place, lists: Sequence[Sequence[float]]) -> GridSeries:
    """Return mean and standard deviation over seeds of each step."""
    steps = list(zip(*lists, strict=False))
    return GridSeries(
        row=place[0],
        column=place[1],
        values=[statistics.mean(step) for step in steps],
        deviations=[statistics.stdev(step) if len(step) > 1 else None for step in steps],
        n=len(lists),
    )


def best_of(cells: Sequence[GridCell]) -> GridCell | None:
    """Return the best cell of a column on the seeds that all have, with its lead."""
    seeds = sorted(set.intersection(*(set(cell.seeds) for cell in cells))) if cells else []
    if len(cells) < 2 or not seeds:
        return None
    values = {cell.row: at_seeds(cell.seeds, cell.values, seeds) for cell in cells}
    sign = -1 if any(word in cells[0].measure for word in COST_MEASURES) else 1
    best, second = sorted(cells, key=lambda cell: -sign * statistics.mean(values[cell.row]))[:2]
    ahead = statistics.mean(values[best.row]) - statistics.mean(values[second.row])
    p = paired_p(values[best.row], values[second.row])
    found = {"best": ahead != 0, "p": p, "against": second.row, "ahead": ahead, "compared": seeds}
    return best.model_copy(update={**found, "significant": p is not None and p < SIGNIFICANT})


def flags_grid(
    methods: Sequence[str], datasets: Sequence[str], partitions: Sequence[str], seeds: int, base: Settings
) -> Grid:
    """Return a grid of methods (rows) by datasets and partitions (columns)."""
    columns: Settings = {}
    for dataset in datasets or [""]:
        for partition in partitions or [""]:
            data = {key: value for key, value in (("dataset", dataset), ("partition", partition)) if value}
            columns[", ".join(data.values()) or "accuracy"] = {"data": data}
    common, own, note = options_by_method(methods, base)
    rows = {method: {"method": {"name": method, **own[method]}} for method in methods}
    return Grid.model_validate({"seeds": seeds, "base": common, "rows": rows, "columns": columns, "note": note})


def options_by_method(methods: Sequence[str], base: Settings) -> tuple[Settings, dict[str, Settings], str]:
    """Give a method's option to the methods that have it, and say which; the rest stays common."""
    known = {method: set(load_method(method).options_type.model_fields) for method in methods}
    options = {key: value for key, value in base.get("method", {}).items() if key not in MethodConfig.model_fields}
    told = []
    for key in options:
        having = [method for method in methods if key in known[method]]
        if not having:
            raise FedVLError(
                f"None of {', '.join(methods)} has an option '{key}'; fedvl methods NAME lists those of a method."
            )
        if len(having) < len(methods):
            told.append(
                f"method.{key}={shown_setting(options[key])} is for {', '.join(having)}; the other methods have no {key}."
            )
    own = {method: {key: value for key, value in options.items() if key in known[method]} for method in methods}
    rest = {key: value for key, value in base.get("method", {}).items() if key not in options}
    common = {key: value for key, value in base.items() if key != "method"} | ({"method": rest} if rest else {})
    return common, own, " ".join(told)
