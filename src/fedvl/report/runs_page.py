"""What the page of several runs shows, as plain values for its template."""

from collections.abc import Sequence
from typing import Any

from fedvl.report.charts.comparing import Bar, Spokes, bar_chart, is_logarithmic, radar_chart
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.charts.parts import colour
from fedvl.report.reading import Run, difference, flatten, number, series
from fedvl.report.run_page import SIZES, drawn, kind_of
from fedvl.report.tables import (
    MISSING,
    Cell,
    cell_of,
    cost_rows,
    human_bytes,
    human_count,
    human_seconds,
    points,
)

FEWEST_DATASETS = 3  # of which a radar can be drawn
STRONGEST = 30.0  # points of difference at which the colour is full
COSTS = (
    ("bytes_up_per_client_round", "Sent by a client in a round", human_bytes),
    ("local_flops", "Local training of the largest client, FLOPs a round", human_count),
    ("seconds", "Training, all rounds", human_seconds),
)


def describe_runs(runs: Sequence[Run]) -> dict[str, Any]:
    names = run_names(runs)
    return {
        "runs": [
            {"name": name, "colour": colour(index), "css": css_of(index), "title": _title(run.result)}
            for index, (name, run) in enumerate(zip(names, runs, strict=True))
        ],
        "summary": [_summary(run.result) for run in runs],
        "curves": _curves(names, runs),
        **_radar(runs),
        "class_tables": _class_tables(runs),
        "cost_charts": _cost_charts(names, runs),
        "costs": _costs(runs),
        **_settings(runs),
        "commands": [str(run.result.get("command") or "") for run in runs],
    }


def css_of(index: int) -> str:
    """The class by which all that belongs to a run is hidden."""
    return f"run-{index}"


def run_names(runs: Sequence[Run]) -> list[str]:
    """As little of each folder's path as tells them apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # the same folder twice


def _title(result: dict[str, Any]) -> str:
    return f"{result['method']} on {result.get('dataset', MISSING)}"


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    change = difference(result)
    return {
        "words": [str(result.get(key, MISSING)) for key in ("method", "dataset", "partition")],
        "cells": [
            cell_of(result.get("accuracy"), "{:.2f}".format),
            cell_of(result.get("zero_shot_accuracy"), "{:.2f}".format),
            cell_of(change, points),
            cell_of(result.get("macro_f1"), "{:.2f}".format),
        ],
        "kind": kind_of(change),
    }


def _curves(names: Sequence[str], runs: Sequence[Run]) -> list[Any]:
    """One curve a run; of a run without rounds, a level line."""
    known: list[list[tuple[float, float]]] = [[*series(run, "per_round", "accuracy")] for run in runs]
    rounds = [x for curve in known for x, _ in curve]
    if not rounds:
        return []
    for curve, run in zip(known, runs, strict=True):
        if not curve and (accuracy := number(run.result.get("accuracy"))) is not None:
            curve += [(min(rounds), accuracy), (max(rounds), accuracy)]
    curves = [Series(names[index], curve, css_of(index)) for index, curve in enumerate(known)]
    return [drawn(line_chart(curves, None, width, 320, "accuracy, %", unit=" %")) for width in SIZES]


def _radar(runs: Sequence[Run]) -> dict[str, Any]:
    """Methods over datasets, where there are datasets enough; several runs of one place are averaged."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        accuracy = number(run.result.get("accuracy"))
        if accuracy is not None:
            method, dataset = str(run.result["method"]), str(run.result.get("dataset", MISSING))
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


def _class_tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each set of classes that two runs or more were asked about: recall of the first, differences of the others."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, run in enumerate(runs):
        names = tuple(str(name) for name in run.result.get("class_names") or ())
        if names and len(run.result.get("per_class_recall") or ()) == len(names):
            groups.setdefault(names, []).append(index)
    tables = []
    for names, members in groups.items():
        if len(members) > 1:
            recalls = [[number(value) for value in runs[index].result["per_class_recall"]] for index in members]
            rows = [
                {"name": name, "first": cell_of(recalls[0][place], "{:.1f}".format), "others": _against(recalls, place)}
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


def _cost_charts(names: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    charts = []
    for key, title, human in COSTS:
        bars = []
        for index, run in enumerate(runs):
            value = run.result.get(key)
            cost = number(value.get("train") if isinstance(value, dict) else value)
            if cost is not None:
                bars.append(Bar(names[index], cost, index, css=css_of(index)))
        if any(bar.value for bar in bars):
            by_powers = " (by powers of ten)" if is_logarithmic([bar.value for bar in bars]) else ""
            both = [drawn(bar_chart([(title + by_powers, bars)], width, human)) for width in SIZES]
            charts.append({"charts": both})
    return charts


def _costs(runs: Sequence[Run]) -> list[tuple[str, list[Cell]]]:
    """Every cost that a run knows, in the order of the first that has it."""
    tables = [{row.label: row for row in cost_rows(run.result, run.rounds)} for run in runs]
    labels = dict.fromkeys(label for table in tables for label in table)
    return [
        (
            label,
            [Cell(table[label].text, table[label].exact) if label in table else Cell(MISSING, "") for table in tables],
        )
        for label in labels
    ]


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Settings in which the runs differ, those that they share, and options that only one of them has."""
    flat = [dict(flatten(run.result.get("config") or {})) for run in runs]
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
