"""Template values for the page of a comparison or recipe: its table and the figures of its kind."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from fedvl.comparisons.contents import Comparison, GridCell, GridPoints, GridSeries, TunedCell
from fedvl.comparisons.references import ZERO_SHOT
from fedvl.report.charts.comparing import Bar, Spokes, bar_chart, is_logarithmic, radar_chart
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.charts.partition import partition_chart
from fedvl.report.charts.scatter import MODALITIES, Point, bound_chart, map_chart
from fedvl.report.comparison_tables import (
    figure,
    footnote,
    heading_of,
    interval_text,
    missing_text,
    opening,
    with_averages,
    zero_shot,
)
from fedvl.report.run_page import IMAGE_DATA, SIZES, drawn, kind_of, partition_captions
from fedvl.report.svg import COLOURS, colour
from fedvl.report.tables import MISSING, Cell, cell_of, moment, points, spread

OF_NO_PAPER = ("bench/", "privacy/")  # recipes of many papers, or of a remedy
FEWEST_AXES = 3  # a radar with fewer is drawn as bars
MAX_BARS = 40
CLIENT_COUNT = "clients"  # a column in whole numbers
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Picture(NamedTuple):
    image: str
    caption: str
    psnr: str


class PageFigure(NamedTuple):
    """A figure of the page: a chart for wide and one for narrow screens, or pictures."""

    title: str
    charts: Sequence[Markup]
    legend: Sequence[tuple[str, str]] = ()  # colour and name
    caption: str = ""
    pictures: Sequence[Picture] = ()


class PageCell(NamedTuple):
    """A table cell: our value, the paper's value and the difference."""

    cell: Cell
    deviation: str = ""
    interval: str = ""
    star: str = ""
    paper: str | None = None
    change: str = ""
    kind: str = ""
    best: bool = False
    chosen: bool = False


class PageRow(NamedTuple):
    heading: str
    colour: str
    css: str  # by which the page hides it
    cells: Sequence[PageCell]


class RunLine(NamedTuple):
    """A run with its value and its report, where that lies below the comparison."""

    row: str
    column: str
    seed: int
    value: str
    link: str


class Trials(NamedTuple):
    """A line of the table of trials: each setting with its validation accuracy."""

    row: str
    column: str
    chosen: str
    tried: Sequence[str]
    untrained: str


class Paired(NamedTuple):
    """A run against the first, image by image."""

    name: str
    row: int
    told: Sequence[str]


class Shade(NamedTuple):
    cell: Cell
    kind: str
    share: str


class ClassLine(NamedTuple):
    """The recall of a class in the first run, and how others differ."""

    name: str
    images: Cell
    first: Cell
    others: Sequence[Shade]


class ClassTable(NamedTuple):
    members: Sequence[int]
    dataset: str
    lines: Sequence[ClassLine]


class RunDetails(NamedTuple):
    """What the page shows of single runs, where each row is one."""

    titles: Sequence[str]
    figures: Sequence[PageFigure]
    paired: Sequence[Paired]
    class_tables: Sequence[ClassTable]
    costs: Sequence[tuple[str, Sequence[Cell]]]
    same: Sequence[tuple[str, str]]  # settings
    commands: Sequence[str]


@dataclass(frozen=True)
class ComparisonPage:
    """What the page of a comparison shows."""

    grid: Comparison
    title: str
    opening: str
    setting: Sequence[str]
    of_no_paper: bool
    has_paper: bool
    note: str
    columns: Sequence[str]
    rows: Sequence[PageRow]
    figures: Sequence[PageFigure]
    different: Sequence[tuple[str, Sequence[str]]]
    alone: Sequence[tuple[str, str, str]]
    tuned: Sequence[Trials]
    runs: Sequence[RunLine]
    failures: Sequence[tuple[str, str, int, str]]
    facts: Sequence[tuple[str, str]]
    details: RunDetails | None


def css_of(index: int) -> str:
    """Return the CSS class of all elements of a row, by which the page hides them."""
    return f"row-{index}"


def describe_grid(grid: Comparison, details: RunDetails | None = None) -> ComparisonPage:
    """Return what the page of a comparison shows."""
    wide = with_averages(grid)
    cells = wide.places
    shared, alone = ([], []) if grid.recipe else _different(grid)
    tests = {column: {cell.images for cell in wide.cells if cell.column == column} for column in wide.columns}
    return ComparisonPage(
        grid=grid,
        title=grid.title or "Comparison",
        opening=opening(grid),
        setting=_setting(grid),
        of_no_paper=(grid.recipe or "").startswith(OF_NO_PAPER),
        has_paper=any(cell.paper is not None for cell in grid.cells),
        note="In brackets, intervals of 95 %." if details else footnote(grid),
        columns=[heading_of(column, wide) for column in wide.columns],
        rows=[
            PageRow(
                heading_of(row, grid, 0),
                colour(index),
                css_of(index),
                [_place(cells.get((row, column)), len(tests[column]) == 1) for column in wide.columns],
            )
            for index, row in enumerate(grid.rows)
        ],
        figures=details.figures if details else FIGURES[grid.kind](grid),
        different=shared,
        alone=alone,
        tuned=[_trials(one) for one in grid.tuned],
        runs=_runs(grid),
        failures=[(failure.row, failure.column, failure.seed, failure.error) for failure in grid.failures],
        facts=[("Date", moment(grid.date)), ("FedVL version", grid.fedvl_version)] if grid.date else [],
        details=details,
    )


def _setting(grid: Comparison) -> list[str]:
    """Name what all runs share: dataset, model, clients, rounds, seeds and test images."""
    facts = {key: [str(value) for value in values] for key, values in grid.facts.items()}
    if not facts:
        return []
    images = {cell.images for cell in grid.cells if cell.images}
    seeds = max((cell.n for cell in grid.cells), default=0)
    which = "validation image" if any(cell.chosen for cell in grid.cells) else "test image"
    named = [
        ", ".join(facts.get("dataset", ())),
        _named("model", facts.get("model", ())),
        ", ".join(facts.get("partition", ())),
        _counted(facts.get("clients", ()), "client"),
        _counted([rounds for rounds in facts.get("rounds", ()) if rounds != "0"], "round"),
        _named("protocol", facts.get("protocol", ())),
        _counted([str(seeds)], "seed") if seeds else "",
        _counted([f"{count:,}" for count in sorted(images)], which),
    ]
    return [part for part in named if part]


def _named(noun: str, values: Sequence[str]) -> str:
    return f"{noun}{'s' if len(values) > 1 else ''} {', '.join(values)}" if values else ""


def _counted(values: Sequence[str], noun: str) -> str:
    return f"{' or '.join(values)} {noun}{'' if list(values) == ['1'] else 's'}" if values else ""


def _different(grid: Comparison) -> tuple[list[tuple[str, list[str]]], list[tuple[str, str, str]]]:
    """Return the settings in which rows differ, and those that a single row has."""
    shared, alone = [], []
    for one in grid.different:
        values = dict(zip(grid.rows, one.values, strict=False))
        having = [row for row, value in values.items() if value]
        if len(having) == 1:
            alone.append((having[0], one.setting, values[having[0]]))
        else:
            shared.append((one.setting, [values.get(row) or MISSING for row in grid.rows]))
    return shared, alone


def _runs(grid: Comparison) -> list[RunLine]:
    """Return the runs whose reports lie below the comparison."""
    return [
        RunLine(cell.row, cell.column, seed, figure(value), f"runs/{name}/report.html")
        for cell in grid.cells
        for seed, name, value in zip(cell.seeds, cell.runs, cell.values, strict=False)
        if not grid.recipe and RUN_NAME.fullmatch(name)
    ]


def _trials(one: TunedCell) -> Trials:
    tried = [
        f"{name}: {MISSING if value is None else figure(value)}"
        for name, value in zip(one.tried, one.validation, strict=True)
    ]
    return Trials(one.row, one.column, one.chosen, tried, figure(one.untrained))


def _place(cell: GridCell | None, one_test: bool) -> PageCell:
    """Return a table cell; name the images of its interval only where its column differs."""
    if cell is None:
        return PageCell(cell_of(None, figure))
    change = None if cell.paper is None else cell.mean - cell.paper
    interval = spread(cell.interval) if one_test else interval_text(cell)
    return PageCell(
        cell=cell_of(cell.mean, "{:,.0f}".format if cell.measure == CLIENT_COUNT else figure),
        deviation="" if cell.deviation is None else f"± {figure(cell.deviation, cell.mean)}",
        interval=f"({interval})" if cell.interval else missing_text(cell).strip(),
        star="*" if cell.significant else "",
        paper=None if cell.paper is None else figure(cell.paper),
        change=points(change, 1),
        kind=kind_of(change),
        best=cell.best,
        chosen=cell.chosen,
    )


def _figure(title: str, charts: Sequence[str], legend: Sequence[str] = (), caption: str = "") -> PageFigure:
    named = [(colour(index), name) for index, name in enumerate(legend)] if len(legend) <= COLOURS else []
    return PageFigure(title, [drawn(svg) for svg in charts], named, caption)


def _beside_table(grid: Comparison) -> list[PageFigure]:
    """Draw bars for a comparison unless there are too many; a paper's table needs no figure."""
    if grid.recipe:
        return []
    return [*(bars_by_column(grid) if len(grid.cells) <= MAX_BARS else []), *over_rounds(grid)]


def over_rounds(grid: Comparison) -> list[PageFigure]:
    """Draw the accuracy over rounds: a chart for each column, a curve for each row."""
    figures = []
    for column in grid.columns:
        known = {
            one.row: list(zip(one.rounds or range(1, len(one.values) + 1), one.values, strict=True))
            for one in grid.curves
            if one.column == column
        }
        bands = {one.row: _band(one) for one in grid.curves if one.column == column}
        curves = [
            Series(row, known.get(row, []), css_of(index), band=bands.get(row, ()))
            for index, row in enumerate(grid.rows)
        ]
        if any(len(curve.points) > 1 for curve in curves):
            reference = _zero_shot_in(column, grid)
            charts = [line_chart(curves, reference, width, 320, "accuracy, %", form=".1f") for width in SIZES]
            title = ": ".join(filter(None, ("Accuracy over rounds", _heading(column, grid))))
            shaded = " Bands are a standard deviation over seeds." if any(bands.values()) else ""
            figures.append(_figure(title, charts, (), f"{_averaged(grid)}{shaded}".strip()))
    return figures


def _band(one: GridSeries) -> list[tuple[float, float, float]]:
    """Return the deviation over seeds around a curve, where all of its steps have one."""
    steps = zip(one.rounds or range(1, len(one.values) + 1), one.values, one.deviations, strict=False)
    band = [(float(x), mean - spread, mean + spread) for x, mean, spread in steps if spread is not None]
    return band if len(band) == len(one.values) and any(high > low for _, low, high in band) else []


def _zero_shot_in(column: str, grid: Comparison) -> float | None:
    """Return the zero-shot accuracy of a column, by its row of the table or by what runs share."""
    cell = grid.places.get((ZERO_SHOT, column))
    return zero_shot(grid) if cell is None or cell.measure != "accuracy" else cell.mean


def _curves(grid: Comparison) -> list[PageFigure]:
    """Draw a chart per column and a curve per row; the measure "curve" starts before round 1."""
    measures = {(cell.row, cell.column): cell.measure for cell in grid.cells}
    figures = []
    for column in grid.columns:
        known = {one.row: one.values for one in grid.series if one.column == column and one.values}
        first = {row: 0 if measures.get((row, column)) == "curve" else 1 for row in grid.rows}
        curves = [
            Series(row, list(enumerate(known.get(row, ()), first[row]))) for row in grid.rows
        ]  # coloured as the table
        if known:
            charts = [line_chart(curves, None, width, 320, grid.unit or column, form=".3g") for width in SIZES]
            figures.append(_figure(_heading(column, grid), charts, grid.rows, _averaged(grid)))
    return figures


def _lines(grid: Comparison) -> list[PageFigure]:
    """Draw one chart with columns along the x axis and a curve per row."""
    cells = grid.places
    curves = []
    for row in grid.rows:
        known = [
            (place, cells[row, column].mean) for place, column in enumerate(grid.columns) if (row, column) in cells
        ]
        errors = {place: _error(cells[row, grid.columns[place]]) for place, _ in known}
        if known:
            curves.append(Series(row, known, errors={place: ends for place, ends in errors.items() if ends}))
    if not curves:
        return []
    charts = [
        line_chart(curves, None, width, 320, grid.unit, "setting", form=".3g", places=grid.columns) for width in SIZES
    ]
    caption = f"{_averaged(grid)}{_error_caption(grid.cells).replace(' Points are seeds.', '')}".strip()
    return [_figure("", charts, [one.name for one in curves], caption)]


def bars_by_column(grid: Comparison) -> list[PageFigure]:
    """Draw horizontal bars grouped by column; different measures get separate scales."""
    cells = grid.places
    groups = []
    for column in grid.columns:
        bars = [
            Bar(
                row,
                cells[row, column].mean,
                index,
                cells[row, column].paper,
                css_of(index),
                values=cells[row, column].values,
                error=_error(cells[row, column]),
            )
            for index, row in enumerate(grid.rows)
            if (row, column) in cells
        ]
        if bars:
            groups.append((column, bars))
    one_scale = len({cell.measure for cell in grid.cells}) == 1
    charts = []
    for together in [groups] if one_scale and groups else [[group] for group in groups]:
        figures = [
            value for _, bars in together for bar in bars for value in (bar.value, bar.mark) if value is not None
        ]
        caption = "The scale is logarithmic." if is_logarithmic(figures) else ""
        caption += _error_caption([cells[bar.name, column] for column, bars in together for bar in bars])
        caption += (
            " The tick marks the paper's value."
            if any(bar.mark is not None for _, bars in together for bar in bars)
            else ""
        )
        charts.append(
            _figure(
                "",
                [bar_chart(together, width, figure, "paper", axis=_axis(grid, together)) for width in SIZES],
                (),
                caption.strip(),
            )
        )
    return charts


def _axis(grid: Comparison, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Return what the bars of some columns measure, with its unit."""
    measures = {cell.measure for cell in grid.cells if cell.column in {column for column, _ in groups}}
    name = measures.pop().replace("_", " ") if len(measures) == 1 else ""
    return grid.unit if name in grid.unit else ", ".join(filter(None, (name, grid.unit)))


def _error(cell: GridCell) -> tuple[float, float] | None:
    """Return the ends of a whisker: an interval or, where there is none, a deviation over seeds."""
    if cell.interval:
        return cell.interval
    return None if cell.deviation is None else (cell.mean - cell.deviation, cell.mean + cell.deviation)


def _error_caption(cells: Sequence[GridCell]) -> str:
    if not any(map(_error, cells)):
        return ""
    points = " Points are seeds." if any(cell.deviation is not None for cell in cells) else ""
    exact = any(cell.interval for cell in cells)
    return f"{points} Whiskers are {'intervals of 95 %' if exact else 'a standard deviation over seeds'}."


def radar(grid: Comparison) -> list[PageFigure]:
    cells = grid.places
    if len(grid.columns) < FEWEST_AXES:
        return bars_by_column(grid)
    polygons = []
    for row in grid.rows:
        values = [cells[row, column].mean if (row, column) in cells else None for column in grid.columns]
        if any(value is not None for value in values):
            polygons.append(Spokes(row, values))
    if not polygons:
        return []
    caption = "The rings are labelled; the centre is not zero."
    return [
        _figure(
            "",
            [radar_chart(grid.columns, polygons, size) for size in (440, 280)],
            [one.name for one in polygons],
            caption,
        )
    ]


def _entropies(grid: Comparison) -> list[PageFigure]:
    return [
        _figure(
            _heading(f"{one.row}, {one.column}", grid),
            [bound_chart(one.y, one.bound, width, 240, "entropy, bits", "upper bound") for width in SIZES],
        )
        for one in grid.points
    ]


def _maps(grid: Comparison) -> list[PageFigure]:
    """Draw samples by class and modality, or by prediction without and with prototypes."""
    return [figure for one in grid.points for figure in (_predictions(one) if one.by_text else [_samples(one)])]


def _samples(one: GridPoints) -> PageFigure:
    names = one.class_names or [f"class {number}" for number in range(max(one.label) + 1)]
    shapes = [MODALITIES[modality] for modality in one.present or ["both"] * len(one.label)]
    caption = "Colour: class. Circles have text and image, triangles text only, squares image only."
    return _figure(f"{one.row}, {one.column}", _map_charts(one, one.label, shapes, names), names, caption)


def _predictions(one: GridPoints) -> list[PageFigure]:
    figures = []
    for answers, words in (
        (one.by_text, "class texts only"),
        (one.with_prototypes, "class texts and prototypes"),
    ):
        correct = [label == predicted for label, predicted in zip(one.label, answers, strict=True)]
        charts = _map_charts(one, answers, ["circle" if hit else "cross" for hit in correct], one.class_names)
        share = 100 * sum(correct) / len(correct)
        caption = f"Colour: predicted class; crosses are wrong. {share:.1f} % are correct."
        figures.append(_figure(f"{one.row}, {one.column}: {words}", charts, one.class_names, caption))
    return figures


def _map_charts(one: GridPoints, labels: Sequence[int], shapes: Sequence[str], names: Sequence[str]) -> list[str]:
    samples = [Point(*values) for values in zip(one.x, one.y, labels, shapes, strict=True)]
    return [map_chart(samples, names, width, 0.55 * width) for width in SIZES]


def _bubbles(grid: Comparison) -> list[PageFigure]:
    figures = []
    for one in grid.points:
        names = one.partition_class_names
        chart = partition_chart(np.asarray(one.partition_counts, dtype=np.int64), names)
        captions = partition_captions(len(one.partition_counts), len(names), one.partition_note)
        figures.append(_figure(_heading(f"{one.row}, {one.column}", grid), [chart], (), " ".join(captions)))
    return figures


def _panels(grid: Comparison) -> list[PageFigure]:
    """Show the image and what gradient inversion recovers after each number of steps."""
    figures = []
    for one in grid.points:
        captions = ["original", *(f"step {step}" for step in one.steps)]
        likeness = [None, *one.psnr]
        pictures = [
            Picture(image, caption, "" if dB is None else f"{dB:.1f} dB")
            for image, caption, dB in zip(one.panels, captions, likeness, strict=True)
            if IMAGE_DATA.fullmatch(image)
        ]
        sentences = [f"The attack {'recovers' if one.label_found else 'does not recover'} the class."]
        if one.feature_cosine is not None:
            sentences.append(
                f"But the update reveals the image's feature without any attack, with cosine {one.feature_cosine:.4f}"
                f"{', and its class too' if one.label_from_keys else ''}."
            )
        figures.append(PageFigure(f"{one.row}, {one.column}", [], (), " ".join(sentences), pictures))
    return figures


def _averaged(grid: Comparison) -> str:
    return "Mean over seeds." if any(cell.n > 1 for cell in grid.cells) else ""


def _heading(name: str, grid: Comparison) -> str:
    """Return the name, or nothing for a single column, which needs no heading."""
    return "" if len(grid.columns) == 1 and name == grid.columns[0] else name


FIGURES: dict[str, Callable[[Comparison], list[PageFigure]]] = {
    "table": _beside_table,
    "curves": _curves,
    "lines": _lines,
    "bars": bars_by_column,
    "radar": radar,
    "scatter": _entropies,
    "map": _maps,
    "bubbles": _bubbles,
    "panels": _panels,
}
