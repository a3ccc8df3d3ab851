"""Template values for the page that compares several runs."""

from collections.abc import Sequence
from typing import Any

from fedvl.report.charts.comparing import Bar, Spokes, bar_chart, is_logarithmic, radar_chart
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.reading import against, difference, flatten, images_tested, intervals, number, series
from fedvl.report.run_page import SIZES, drawn, kind_of
from fedvl.report.svg import colour
from fedvl.report.tables import (
    MISSING,
    Cell,
    cell_of,
    cost_rows,
    human_bytes,
    human_count,
    human_seconds,
    p_value,
    points,
    spread,
)
from fedvl.runs.contents import Result, Seconds
from fedvl.runs.folder import RunFolder

FEWEST_DATASETS = 3  # for a radar
STRONGEST = 30.0  # points of difference shown in full colour
COSTS = (
    ("bytes_up_per_client_round", "Upload per client and round", human_bytes),
    ("local_flops", "Local training of the largest client, FLOPs per round", human_count),
    ("seconds", "Training, all rounds", human_seconds),
)


def describe_runs(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the template values of the page that compares runs."""
    names = run_names(runs)
    return {
        "runs": [
            {"name": name, "colour": colour(index), "css": css_of(index), "title": _title(run.result)}
            for index, (name, run) in enumerate(zip(names, runs, strict=True))
        ],
        "summary": [_summary(run.result) for run in runs],
        "paired": _paired(names, runs),
        "curves": _curves(names, runs),
        **_radar(runs),
        "class_tables": _class_tables(runs),
        "cost_charts": _cost_charts(names, runs),
        "costs": _costs(runs),
        **_settings(runs),
        "commands": [run.result.command or "" for run in runs],
    }


def css_of(index: int) -> str:
    """Return the CSS class of all elements of a run, by which the page hides them."""
    return f"run-{index}"


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the shortest ends of the folders' paths that are all different."""
    parts = [run.path.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # the same folder twice


def _title(result: Result) -> str:
    return f"{result.method} on {result.dataset or MISSING}"


def _summary(result: Result) -> dict[str, Any]:
    change, known = difference(result), intervals(result)

    def with_interval(key: str) -> Cell:
        text = spread(known.get(key))
        return cell_of(getattr(result, key), lambda value: f"{value:.2f} ({text})" if text else f"{value:.2f}")

    return {
        "words": [result.method, result.dataset or MISSING, result.partition or MISSING],
        "cells": [
            with_interval("accuracy"),
            with_interval("zero_shot_accuracy"),
            cell_of(change, points),
            with_interval("macro_f1"),
            cell_of(images_tested(result) or None, "{:,.0f}".format),
        ],
        "kind": kind_of(change),
    }


def paired_sentences(runs: Sequence[RunFolder]) -> list[str]:
    """Say how each run compares with the first, for a terminal."""
    names = run_names(runs)
    told = []
    for row in _paired(names, runs):
        difference, interval, p, *_ = row["told"]
        sureness = f" points (95 %: {interval}), McNemar {p}" if interval else ""
        told.append(f"{row['name']} against {names[0]}: {difference}{sureness}.")
    return told


def _paired(names: Sequence[str], runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return each run against the first, image by image, where both had the same test images."""
    rows = []
    for index, run in enumerate(runs[1:], 1):
        test = against(runs[0].result, run.result)
        told = (
            [points(test.difference), spread(test.interval), p_value(test.p), f"{test.gained:,}", f"{test.lost:,}"]
            if test
            else ["other test images, or not recorded: no paired test", "", "", "", ""]
        )
        rows.append({"name": names[index], "css": css_of(index), "told": told})
    return rows


def _curves(names: Sequence[str], runs: Sequence[RunFolder]) -> list[Any]:
    """Draw a curve per run; a run without rounds is a horizontal line."""
    known: list[list[tuple[float, float]]] = [[*series(run, "per_round", "accuracy")] for run in runs]
    rounds = [x for curve in known for x, _ in curve]
    if not rounds:
        return []
    for curve, run in zip(known, runs, strict=True):
        if not curve and (accuracy := number(run.result.accuracy)) is not None:
            curve += [(min(rounds), accuracy), (max(rounds), accuracy)]
    curves = [Series(names[index], curve, css_of(index)) for index, curve in enumerate(known)]
    return [drawn(line_chart(curves, None, width, 320, "accuracy, %", unit=" %")) for width in SIZES]


def _radar(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Draw a radar of methods over datasets; runs of the same method and dataset are averaged."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        accuracy = number(run.result.accuracy)
        if accuracy is not None:
            method, dataset = run.result.method, run.result.dataset or MISSING
            found.setdefault(method, {}).setdefault(dataset, []).append(accuracy)
    datasets = list(dict.fromkeys(dataset for places in found.values() for dataset in places))
    if len(datasets) < FEWEST_DATASETS:
        return {"radar": [], "radar_methods": []}
    polygons = [
        Spokes(method, [sum(places[name]) / len(places[name]) if name in places else None for name in datasets])
        for method, places in found.items()
    ]
    return {
        "radar": [drawn(radar_chart(datasets, polygons, size)) for size in (440, 280)],
        "radar_methods": [(colour(index), method) for index, method in enumerate(found)],
    }


def _class_tables(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return a table per set of shared classes: the first run's recall, then differences."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, run in enumerate(runs):
        names = tuple(run.result.class_names)
        if names and len(run.result.per_class_recall) == len(names):
            groups.setdefault(names, []).append(index)
    tables = []
    for names, members in groups.items():
        if len(members) > 1:
            recalls = [[number(value) for value in runs[index].result.per_class_recall] for index in members]
            counts = [sum(row) for row in runs[members[0]].result.confusion]
            rows = [
                {
                    "name": name,
                    "count": cell_of(counts[place] if counts else None, "{:.0f}".format),
                    "first": cell_of(recalls[0][place], "{:.1f}".format),
                    "others": _against(recalls, place),
                }
                for place, name in enumerate(names)
            ]
            tables.append({"members": members, "rows": rows})
    return tables


def _against(recalls: Sequence[Sequence[float | None]], place: int) -> list[dict[str, Any]]:
    cells = []
    for own in recalls[1:]:
        recall, first = own[place], recalls[0][place]
        change = None if recall is None or first is None else recall - first
        share = min(1.0, abs(change or 0.0) / STRONGEST)
        cells.append(
            {
                "cell": cell_of(change, lambda value: points(value, 1)),
                "kind": kind_of(change),
                "share": f"{70 * share:.0f}%",
            }
        )
    return cells


def _cost_charts(names: Sequence[str], runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    charts = []
    for key, title, human in COSTS:
        bars = []
        for index, run in enumerate(runs):
            value = getattr(run.result, key)
            cost = number(value.train if isinstance(value, Seconds) else value)
            if cost is not None:
                bars.append(Bar(names[index], cost, index, css=css_of(index)))
        if any(bar.value for bar in bars):
            scale = " (logarithmic)" if is_logarithmic([bar.value for bar in bars]) else ""
            both = [drawn(bar_chart([(title + scale, bars)], width, human)) for width in SIZES]
            charts.append({"charts": both})
    return charts


def _costs(runs: Sequence[RunFolder]) -> list[tuple[str, list[Cell]]]:
    """Return every recorded cost, in the order of the first run that has it."""
    tables = [{row.label: row for row in cost_rows(run.result, run.rounds)} for run in runs]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [
        (
            label,
            [Cell(table[label].text, table[label].exact) if label in table else Cell(MISSING, "") for table in tables],
        )
        for label in labels
    ]


def _settings(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Split settings into those that differ, those shared, and those of a single run."""
    flat = [dict(flatten(run.result.config)) for run in runs]
    different, same, alone = [], [], []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key, MISSING) for settings in flat]
        owners = [index for index, settings in enumerate(flat) if key in settings]
        if len(owners) == 1 < len(runs):
            alone.append((owners[0], key, values[owners[0]]))
        elif len(set(values)) == 1:
            same.append((key, values[0]))
        else:
            different.append((key, [(value, value != values[0]) for value in values]))
    return {"different": different, "same": same, "alone": alone}
