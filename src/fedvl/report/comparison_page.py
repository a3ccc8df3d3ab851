"""What the page of a comparison or of a reproduced recipe shows: its table, and the figure that its kind asks for."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedvl.report.charts.comparing import Bar, Spokes, bar_chart, is_logarithmic, radar_chart
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.charts.partition import partition_chart
from fedvl.report.charts.parts import COLOURS, colour
from fedvl.report.charts.scatter import MODALITIES, Place, bound_chart, map_chart
from fedvl.report.comparison_tables import by_place, figure, footnote
from fedvl.report.run_page import IMAGE_DATA, SIZES, drawn, kind_of, partition_captions
from fedvl.report.tables import MISSING, cell_of, points

FEWEST_AXES = 3  # of a radar; fewer make bars
MOST_BARS = 40

Grid = dict[str, Any]
Figure = dict[str, Any]  # title, charts (for a wide and for a narrow screen) or pictures, caption, legend


def describe_grid(grid: Grid) -> dict[str, Any]:
    cells = by_place(grid)
    return {
        "title": str(grid.get("title") or "Comparison"),
        "recipe": grid.get("recipe"),
        "shows": grid.get("shows"),
        "label": grid.get("label"),
        "note": footnote({**grid, "label": ""}),
        "unit": grid.get("unit", ""),
        "columns": grid["columns"],
        "rows": [(row, [_place(cells.get((row, column))) for column in grid["columns"]]) for row in grid["rows"]],
        "has_paper": any(cell.get("paper") is not None for cell in grid["cells"]),
        "figures": FIGURES[grid["kind"]](grid),
        "failures": [(f["row"], f["column"], f["seed"], f["error"]) for f in grid.get("failures") or []],
        "facts": [("Date", grid.get("date", MISSING)), ("FedVL version", grid.get("fedvl_version", MISSING))],
        "command": str(grid.get("command") or ""),
    }


def _place(cell: Any) -> dict[str, Any]:
    """One place of the table: ours, what the paper has, and the difference."""
    if cell is None:
        return {"cell": cell_of(None, figure), "star": "", "deviation": "", "paper": None, "best": False}
    paper = cell.get("paper")
    change = None if paper is None else cell["mean"] - paper
    return {
        "cell": cell_of(cell["mean"], figure),
        "deviation": "" if cell["deviation"] is None else f"± {figure(cell['deviation'], cell['mean'])}",
        "star": "*" if cell["significant"] else "",
        "paper": None if paper is None else figure(paper),
        "change": points(change, 1),
        "kind": kind_of(change),
        "best": cell["best"],
    }


def _figure(title: str, charts: Sequence[str], legend: Sequence[str] = (), caption: str = "") -> Figure:
    named = [(colour(index), name) for index, name in enumerate(legend)] if len(legend) <= COLOURS else []
    return {
        "title": title,
        "charts": [drawn(svg) for svg in charts],
        "pictures": [],
        "legend": named,
        "caption": caption,
    }


def _beside_table(grid: Grid) -> list[Figure]:
    """A paper's table needs no figure; a comparison gets bars, unless they would be too many to look at."""
    return _bars(grid) if not grid.get("recipe") and len(grid["cells"]) <= MOST_BARS else []


def _curves(grid: Grid) -> list[Figure]:
    """A chart a column, a curve a row; "curve" begins with the model before the first round."""
    measures = {(cell["row"], cell["column"]): cell["measure"] for cell in grid["cells"]}
    figures = []
    for column in grid["columns"]:
        known = {one["row"]: one["values"] for one in grid["series"] if one["column"] == column and one["values"]}
        rows = [row for row in grid["rows"] if row in known]
        first = {row: 0 if measures.get((row, column)) == "curve" else 1 for row in rows}
        curves = [Series(row, list(enumerate(known[row], first[row]))) for row in rows]
        if curves:
            charts = [line_chart(curves, None, width, 320, grid["unit"] or column, form=".3g") for width in SIZES]
            figures.append(_figure(_heading(column, grid), charts, rows, _averaged(grid)))
    return figures


def _lines(grid: Grid) -> list[Figure]:
    """One chart: columns run from left to right, a curve a row."""
    cells = by_place(grid)
    curves = []
    for row in grid["rows"]:
        known = [
            (place, cells[row, column]["mean"])
            for place, column in enumerate(grid["columns"])
            if (row, column) in cells
        ]
        if known:
            curves.append(Series(row, known))
    if not curves:
        return []
    charts = [
        line_chart(curves, None, width, 320, grid["unit"], "setting", form=".3g", places=grid["columns"])
        for width in SIZES
    ]
    return [_figure("", charts, [one.name for one in curves], _averaged(grid))]


def _bars(grid: Grid) -> list[Figure]:
    """Lying bars, a group a column; columns may measure different things, and then each has a scale of its own."""
    cells = by_place(grid)
    groups = []
    for column in grid["columns"]:
        bars = [
            Bar(row, cells[row, column]["mean"], index, cells[row, column].get("paper"))
            for index, row in enumerate(grid["rows"])
            if (row, column) in cells
        ]
        if bars:
            groups.append((column, bars))
    one_scale = len({cell["measure"] for cell in grid["cells"]}) == 1
    charts = []
    for together in [groups] if one_scale and groups else [[group] for group in groups]:
        figures = [
            value for _, bars in together for bar in bars for value in (bar.value, bar.mark) if value is not None
        ]
        caption = "Bars grow by powers of ten." if is_logarithmic(figures) else ""
        caption += (
            " The tick is the paper's figure."
            if any(bar.mark is not None for _, bars in together for bar in bars)
            else ""
        )
        charts.append(
            _figure("", [bar_chart(together, width, figure, "paper") for width in SIZES], (), caption.strip())
        )
    return charts


def _radar(grid: Grid) -> list[Figure]:
    cells = by_place(grid)
    if len(grid["columns"]) < FEWEST_AXES:
        return _bars(grid)
    polygons = []
    for row in grid["rows"]:
        values = [cells[row, column]["mean"] if (row, column) in cells else None for column in grid["columns"]]
        if any(value is not None for value in values):
            polygons.append(Spokes(row, values))
    if not polygons:
        return []
    caption = "Rings say how much; the centre is not nought."
    return [
        _figure(
            "",
            [radar_chart(grid["columns"], polygons, size) for size in (440, 280)],
            [one.name for one in polygons],
            caption,
        )
    ]


def _entropies(grid: Grid) -> list[Figure]:
    return [
        _figure(
            _heading(f"{one['row']}, {one['column']}", grid),
            [bound_chart(one["y"], one["bound"], width, 240, "entropy, bits", "upper bound") for width in SIZES],
        )
        for one in grid["points"]
    ]


def _maps(grid: Grid) -> list[Figure]:
    """Samples in the plane: by class and by what they lack, or twice by what is answered without and with prototypes."""
    return [figure for one in grid["points"] for figure in (_answers(one) if "by_text" in one else [_samples(one)])]


def _samples(one: dict[str, Any]) -> Figure:
    names = one.get("class_names") or [f"class {number}" for number in range(max(one["label"]) + 1)]
    shapes = [MODALITIES[modality] for modality in one.get("present") or ["both"] * len(one["label"])]
    caption = "Colour: the class. Circles have text and image, triangles text alone, squares image alone."
    return _figure(f"{one['row']}, {one['column']}", _map_charts(one, one["label"], shapes, names), names, caption)


def _answers(one: dict[str, Any]) -> list[Figure]:
    figures = []
    for key, words in (("by_text", "texts alone"), ("with_prototypes", "texts and prototypes")):
        right = [label == answer for label, answer in zip(one["label"], one[key], strict=True)]
        charts = _map_charts(one, one[key], ["circle" if known else "cross" for known in right], one["class_names"])
        share = 100 * sum(right) / len(right)
        caption = f"Colour: the class that is answered; crosses are wrong. {share:.1f} % are right."
        figures.append(_figure(f"{one['row']}, {one['column']}: {words}", charts, one["class_names"], caption))
    return figures


def _map_charts(one: dict[str, Any], labels: Sequence[int], shapes: Sequence[str], names: Sequence[str]) -> list[str]:
    places = [Place(*place) for place in zip(one["x"], one["y"], labels, shapes, strict=True)]
    return [map_chart(places, names, width, 0.55 * width) for width in SIZES]


def _bubbles(grid: Grid) -> list[Figure]:
    figures = []
    for one in grid["points"]:
        names = [str(name) for name in one["partition_class_names"]]
        chart = partition_chart(np.asarray(one["partition_counts"], dtype=np.int64), names)
        captions = partition_captions(len(one["partition_counts"]), len(names), one.get("partition_note"))
        figures.append(_figure(_heading(f"{one['row']}, {one['column']}", grid), [chart], (), " ".join(captions)))
    return figures


def _panels(grid: Grid) -> list[Figure]:
    """The image, and what a search for its gradient finds after so many steps."""
    figures = []
    for one in grid["points"]:
        captions = ["the image", *(f"step {step}" for step in one["steps"])]
        likeness = [None, *one["psnr"]]
        pictures = [
            {"image": image, "caption": caption, "psnr": "" if dB is None else f"{dB:.1f} dB"}
            for image, caption, dB in zip(one["panels"], captions, likeness, strict=True)
            if IMAGE_DATA.fullmatch(image)
        ]
        said = [f"The search {'finds' if one['label_found'] else 'does not find'} the class."]
        if one.get("feature_cosine") is not None:
            said.append(
                f"But no search is needed for the image's feature: the update gives it away with cosine {one['feature_cosine']:.4f}"
                f"{', and the class too' if one.get('label_from_keys') else ''}."
            )
        drawn_here = _figure(f"{one['row']}, {one['column']}", [], (), " ".join(said))
        figures.append({**drawn_here, "pictures": pictures})
    return figures


def _averaged(grid: Grid) -> str:
    return "Mean over seeds." if any(cell["n"] > 1 for cell in grid["cells"]) else ""


def _heading(name: str, grid: Grid) -> str:
    """A column that is alone needs no name."""
    return "" if len(grid["columns"]) == 1 and name == grid["columns"][0] else name


FIGURES: dict[str, Callable[[Grid], list[Figure]]] = {
    "table": _beside_table,
    "curves": _curves,
    "lines": _lines,
    "bars": _bars,
    "radar": _radar,
    "scatter": _entropies,
    "map": _maps,
    "bubbles": _bubbles,
    "panels": _panels,
}
