"""What tests of grid pages share: made-up results of grids of every kind, shaped as fedvl compare and fedvl reproduce write them."""

from typing import Any

from fedvl.comparisons.grid import Grid
from fedvl.comparisons.run import GridOutcome

NOTHING: dict[str, Any] = {}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def make_grid(kind: str = "table", **more: Any) -> dict[str, Any]:
    """Two rows and three columns; ours are 10 row + column + 60, the paper's 2 more in the first row."""
    rows, columns = ["mine", "theirs"], ["pets", "food", "cars"]
    cells = [
        {
            "row": row,
            "column": column,
            "measure": "curve" if kind == "curves" else "accuracy",
            "mean": 60.0 + 10 * i + j,
            "deviation": 0.5,
            "n": 3,
            "best": i == 1,
            "significant": i == 1,
            "paper": 62.0 + j if i == 0 else None,
        }
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
    series = [
        {"row": row, "column": "pets", "values": [50.0, 55.0 + i, 60.0 + i], "deviations": [None] * 3, "n": 1}
        for i, row in enumerate(rows)
    ]
    grid: dict[str, Any] = {
        "kind": kind,
        "recipe": "paper/table1",
        "title": "A table",
        "shows": "What to look for",
        "findings": ["What was found"],
        "label": "Embedded model and data, not the paper's.",
        "note": "A note.",
        "unit": "accuracy, %",
        "test": "paired t-test",
        "rows": rows,
        "columns": columns,
        "cells": cells,
        "series": series if kind == "curves" else [],
        "points": [],
        "failures": [],
        "date": "2026-01-05T10:00:00+00:00",
        "fedvl_version": "0.1.0",
        "command": "fedvl reproduce paper/table1 --on embedded",
    }
    return grid | more


def make_points(kind: str) -> list[dict[str, Any]]:
    place = {"row": "mine", "column": "pets"}
    return {
        "scatter": [place | {"y": [3.30, 3.31], "bound": 3.3219, "value": 99.0}],
        "map": [
            place
            | {"x": [0.0, 1.0, 2.0], "y": [0.0, 1.0, 0.0], "label": [0, 1, 1], "by_text": [0, 0, 1]}
            | {"with_prototypes": [0, 1, 1], "class_names": ["cat", "dog"]}
        ],
        "bubbles": [
            place
            | {
                "partition_counts": [[3, 0], [1, 4]],
                "partition_class_names": ["cat", "dog"],
                "partition_note": "By hand.",
            }
        ],
        "panels": [
            place
            | {"panels": [PICTURE, PICTURE, "http://outside/x.png"], "steps": [0, 20], "psnr": [5.0, 31.25]}
            | {"label_found": True, "feature_cosine": 0.99999, "label_from_keys": True}
        ],
    }[kind]


def grid_of(**fields: Any) -> Grid:
    return Grid.model_validate({"rows": {"a": {}}, **fields})


def outcome_of(figures: dict[tuple[str, str], list[Any]], **fields: Any) -> GridOutcome:
    rows, columns = (dict.fromkeys((place[axis] for place in figures), NOTHING) for axis in (0, 1))
    grid = grid_of(rows=rows, columns=columns, **fields)
    seeds = {place: list(range(len(found))) for place, found in figures.items()}
    return GridOutcome(grid, figures, {place: ["folder"] * len(found) for place, found in figures.items()}, seeds=seeds)
