"""A comparison of runs that exist, and what its page shows of single runs beside it."""

from collections.abc import Mapping, Sequence

from fedvl.comparisons.contents import Comparison, Different, GridCell, GridSeries
from fedvl.evaluation.statistics import Paired as PairedRuns
from fedvl.evaluation.statistics import mcnemar, wilson
from fedvl.report.comparison_page import (
    CLIENT_COUNT,
    FEWEST_AXES,
    ClassLine,
    ClassTable,
    ComparisonPage,
    PageFigure,
    Paired,
    RunDetails,
    Shade,
    bars_by_column,
    describe_grid,
    over_rounds,
    radar,
)
from fedvl.report.reading import against, difference, flatten, images_tested, intervals, number, series
from fedvl.report.run_page import kind_of
from fedvl.report.tables import MISSING, Cell, cell_of, cost_rows, p_value, points, spread
from fedvl.runs.answers import ANSWERS, read_answers
from fedvl.runs.contents import Result
from fedvl.runs.folder import RunFolder

STRONGEST = 30.0  # points of difference shown in full colour
ACCURACY = "accuracy, %"
MEASURES = {"accuracy": ACCURACY, "zero_shot_accuracy": "zero-shot, %", "macro_f1": "macro F1, %"}
GAIN = "above zero-shot, points"
COSTS = {
    "bytes_up_per_client_round": "upload per client and round, bytes",
    "local_flops": "local training of the largest client, FLOPs per round",
    "seconds": "training, all rounds, seconds",
}
FACTS = ("dataset", "model", "partition", "clients", "rounds", "protocol")


def describe_runs(runs: Sequence[RunFolder]) -> ComparisonPage:
    """Return what the page that compares runs shows."""
    names, results = run_names(runs), [run.result for run in runs]
    settings = [dict(flatten(result.config)) for result in results]
    keys = dict.fromkeys(key for each in settings for key in each)
    shared = {key for key in keys if len({each.get(key) for each in settings}) == 1}
    several = len({result.clients for result in results}) > 1
    table = Comparison(
        kind="table",
        title=f"{len(runs)} runs side by side",
        rows=names,
        columns=[
            ACCURACY,
            MEASURES["zero_shot_accuracy"],
            GAIN,
            MEASURES["macro_f1"],
            *([CLIENT_COUNT] if several else []),
        ],
        cells=[cell for name, run in zip(names, runs, strict=True) for cell in cells_of(name, run)],
        facts={
            fact: list(dict.fromkeys(value for each in results if (value := getattr(each, fact)) is not None))
            for fact in FACTS
        },
        curves=curves_of(names, runs),
        different=[
            Different(setting=key, values=[each.get(key, "") for each in settings]) for key in keys if key not in shared
        ],
    )
    accuracy = table.model_copy(update={"columns": [ACCURACY]})
    return describe_grid(
        table,
        RunDetails(
            titles=[f"{result.method} on {result.dataset or MISSING}" for result in results],
            figures=[
                *bars_by_column(accuracy),
                *over_rounds(accuracy),
                *by_dataset(results),
                *bars_by_column(costs_of(names, results)),
            ],
            paired=paired(names, runs),
            class_tables=class_tables(results),
            costs=costs(runs),
            same=[(key, settings[0][key]) for key in keys if key in shared],
            commands=[result.command or "" for result in results],
        ),
    )


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the shortest ends of the folders' paths that are all different."""
    parts = [run.path.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # the same folder twice


def cell(row: str, column: str, value: float, **more: object) -> GridCell:
    """Return the cell of a single run."""
    found = {"row": row, "column": column, "measure": column, "mean": value, "deviation": None, "n": 1}
    return GridCell.model_validate({**found, "best": False, "significant": False, **more})


def cells_of(name: str, run: RunFolder) -> list[GridCell]:
    """Return the figures of a run, with their intervals."""
    known, images = intervals(run.result), images_tested(run.result) or None
    values = {(key, column): number(getattr(run.result, key)) for key, column in MEASURES.items()}
    found = [
        cell(name, column, value, interval=known.get(key), images=images)
        for (key, column), value in values.items()
        if value is not None
    ]
    further = {GAIN: difference(run.result), CLIENT_COUNT: number(run.result.clients)}
    return [*found, *(cell(name, column, value) for column, value in further.items() if value is not None)]


def curves_of(names: Sequence[str], runs: Sequence[RunFolder]) -> list[GridSeries]:
    """Return a curve per run; a run without rounds is a horizontal line."""
    known = [series(run, "per_round", "accuracy") for run in runs]
    rounds = [x for curve in known for x, _ in curve]
    found = []
    for name, run, curve in zip(names, runs, known, strict=True):
        accuracy = number(run.result.accuracy)
        if rounds and not curve and accuracy is not None:
            curve = [(min(rounds), accuracy), (max(rounds), accuracy)]
        steps, values = [x for x, _ in curve], [y for _, y in curve]
        found.append(GridSeries(row=name, column=ACCURACY, rounds=steps, values=values))
    return found


def by_dataset(results: Sequence[Result]) -> list[PageFigure]:
    """Draw a radar of methods over datasets; runs of the same method and dataset are averaged."""
    found: dict[tuple[str, str], list[float]] = {}
    for result in results:
        if (accuracy := number(result.accuracy)) is not None:
            found.setdefault((result.method, result.dataset or MISSING), []).append(accuracy)
    methods, datasets = (list(dict.fromkeys(place[axis] for place in found)) for axis in (0, 1))
    if len(datasets) < FEWEST_AXES:
        return []
    cells = [cell(*place, sum(values) / len(values)) for place, values in found.items()]
    (figure,) = radar(Comparison(kind="radar", rows=methods, columns=datasets, cells=cells))
    return [figure._replace(title="Accuracy by dataset", caption=f"Accuracy, %. {figure.caption}")]


def costs_of(names: Sequence[str], results: Sequence[Result]) -> Comparison:
    """Return a column for each cost that some run has."""
    cells = []
    for name, result in zip(names, results, strict=True):
        spent: dict[str, float | None] = {key: getattr(result, key) for key in COSTS if key != "seconds"}
        spent["seconds"] = result.seconds.train if result.seconds else None
        cells += [cell(name, COSTS[key], value) for key, cost in spent.items() if (value := number(cost)) is not None]
    columns = [column for column in COSTS.values() if any(one.mean for one in cells if one.column == column)]
    return Comparison(kind="bars", rows=list(names), columns=columns, cells=cells)


def paired_sentences(runs: Sequence[RunFolder]) -> list[str]:
    """Say how each run compares with the first, for a terminal."""
    names = run_names(runs)
    told = []
    for one in paired(names, runs):
        difference, interval, p, *_, images = one.told
        sureness = f" points (95 %: {interval}), McNemar {p}, on {images}" if interval else ""
        told.append(f"{one.name} against {names[0]}: {difference}{sureness}.")
    return told


def paired(names: Sequence[str], runs: Sequence[RunFolder]) -> list[Paired]:
    """Return each run against the first, image by image, on the test images that both had."""
    rows = []
    for index, run in enumerate(runs[1:], 1):
        test, images = against(runs[0].result, run.result), ""
        if test:
            images = f"all {test.images:,} test images"
        elif test := on_common_images(runs[0], run):
            counts = [f"{images_tested(each.result):,}" for each in (runs[0], run)]
            images = f"the {test.images:,} test images that both have (of {counts[0]} and {counts[1]})"
        told = (
            [points(test.difference), spread(test.interval), p_value(test.p), f"{test.gained:,}", f"{test.lost:,}"]
            if test
            else ["other test images, or not recorded: no paired test", "", "", "", ""]
        )
        told.append(images)
        rows.append(Paired(names[index], index, told))
    return rows


def on_common_images(first: RunFolder, second: RunFolder) -> PairedRuns | None:
    """Compare two runs on the images that both tests have; None if there are none.

    Images are found by their content. Labels are those of the second run.
    """
    if not all(run.file(ANSWERS).is_file() for run in (first, second)):
        return None
    before, after = ({row.sha256: row for row in read_answers(run) if row.sha256} for run in (first, second))
    common = [key for key, row in after.items() if key in before and row.truth]
    right = ("".join(str(int(rows[key].prediction == after[key].truth)) for key in common) for rows in (before, after))
    return mcnemar(*right) if common else None


def class_tables(results: Sequence[Result]) -> list[ClassTable]:
    """Return a table per set of shared classes: the first run's recall, then differences."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, result in enumerate(results):
        names = tuple(result.class_names)
        if names and len(result.per_class_recall) == len(names):
            groups.setdefault(names, []).append(index)
    return [class_table(names, members, results) for names, members in groups.items() if len(members) > 1]


def class_table(names: Sequence[str], members: Sequence[int], results: Sequence[Result]) -> ClassTable:
    recalls = [list(map(number, results[index].per_class_recall)) for index in members]
    counts = [sum(row) for row in results[members[0]].confusion]
    lines = [
        ClassLine(
            name,
            cell_of(counts[place] if counts else None, "{:.0f}".format),
            cell_of(recalls[0][place], "{:.1f}".format),
            [shade(recalls[0][place], own[place], counts[place] if counts else 0) for own in recalls[1:]],
        )
        for place, name in enumerate(names)
    ]
    return ClassTable(members, results[members[0]].dataset or MISSING, lines)


def shade(first: float | None, recall: float | None, images: int) -> Shade:
    """Return a difference of recalls and how strong its colour is.

    One that is within the intervals of both, as of a class with few images, has no colour.
    """
    change = None if recall is None or first is None else recall - first
    share = min(1.0, abs(change or 0.0) / STRONGEST)
    if images and recall is not None and first is not None:
        low, high = sorted((first, recall))
        share = 0.0 if wilson(low, images).high >= wilson(high, images).low else share
    return Shade(cell_of(change, lambda value: points(value, 1)), kind_of(change), f"{70 * share:.0f}%")


def costs(runs: Sequence[RunFolder]) -> list[tuple[str, list[Cell]]]:
    """Return every recorded cost, in the order of the first run that has it."""
    tables: list[Mapping[str, Cell]] = [
        {row.label: Cell(row.text, row.exact) for row in cost_rows(run.result, run.rounds)} for run in runs
    ]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [(label, [table.get(label, Cell(MISSING, "")) for table in tables]) for label in labels]
