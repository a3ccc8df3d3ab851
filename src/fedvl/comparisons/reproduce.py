"""Reproduce the papers' tables and figures: list what a recipe needs and compare with the paper."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvl.comparisons.claims import TableFigures, findings
from fedvl.comparisons.contents import Comparison
from fedvl.comparisons.grid import QUICK, Grid, Variant
from fedvl.comparisons.run import GridOutcome, beyond_chance, summarise
from fedvl.data.catalogue import catalogue, find
from fedvl.data.sources import dataset_path, default_data_root, how_to_get
from fedvl.errors import FedVLError
from fedvl.methods.parts.synthetic import HELD_OUT, PIPELINE
from fedvl.models import EMBEDDED

EMBEDDED_LABEL = "Embedded model and data, not the paper's."
EMBEDDED_SETS = tuple(name for name, entry in catalogue().items() if entry.embedded)
QUICK_LABEL = "Reduced to a smoke test: the values mean nothing."


def arranged(
    recipe: Grid,
    embedded: bool,
    quick: bool,
    seeds: int | None = None,
    rows: Sequence[str] = (),
    settings: Mapping[str, Any] = {},
) -> Grid:
    """Return the recipe as it will be run: on which data, at which size, and which rows."""
    grid = recipe.on_embedded() if embedded else recipe
    if quick:
        grid = grid.under(Variant(settings=QUICK, seeds=1)).under(recipe.quick)
    chosen = [name for name in grid.rows if any(part.lower() in name.lower() for part in rows)] if rows else None
    if chosen == []:
        raise FedVLError(
            f"No row of this recipe contains {' or '.join(map(repr, rows))}; it has {', '.join(grid.rows)}."
        )
    return grid.under(Variant(settings=dict(settings), rows=chosen, seeds=seeds))


def missing_requirements(grid: Grid) -> list[str]:
    """Return a sentence for each dataset, model or file that is not on this machine."""
    needs: dict[tuple[str, str], Path | None] = {}
    for case in grid.cases():
        data, root = case.settings.get("data", {}), case.settings.get("data", {}).get("root")
        needs["dataset", data.get("dataset", "cifar10-mini")] = Path(root) if root else None
        needs["model", case.settings.get("model", {}).get("name", "fedvl-tiny")] = None
        method = case.settings.get("method", {})
        if weights := method.get("weights"):
            needs["weights", weights] = None
        if method.get("name") == "cachefl" and data.get("dataset", "cifar10-mini") not in EMBEDDED_SETS:
            needs["synthetic", method.get("synthetic") or ""] = None
    sentences = [
        missing_dataset(name, root) if kind == "dataset" else missing_file(kind, name)
        for (kind, name), root in needs.items()
    ]
    return [sentence for sentence in sentences if sentence]


def missing_dataset(name: str, root: Path | None) -> str:
    if Path(name).exists():
        return ""
    if "+" in name:
        return " ".join(filter(None, (missing_dataset(part, root) for part in name.split("+"))))
    entry, root = find(name), root or default_data_root()
    return "" if entry.embedded or dataset_path(entry, root) else how_to_get(entry, root)


def missing_images(source: str) -> str:
    """Return how to provide CacheFL's generated images if they are missing."""
    if source == HELD_OUT or source.startswith(PIPELINE) or (source and Path(source).expanduser().exists()):
        return ""
    return (
        "CacheFL's generated images are missing: give a folder with a folder of images for each class with "
        "--set method.synthetic=FOLDER, generate them with --set method.synthetic=diffusers:MODEL, or take training images "
        "that no client holds with --set method.synthetic=held-out (each with --rows CacheFL)."
    )


def missing_file(kind: str, name: str) -> str:
    if kind == "synthetic":
        return missing_images(name)
    if name in EMBEDDED or Path(name).expanduser().exists():
        return ""
    if kind == "weights":
        return (
            f"{name} is missing: ImageNet's ResNet-18 with torchvision's names, as safetensors; put it there, give another "
            f"with --set method.weights=FILE, or leave these rows out with --rows."
        )
    return (
        ""
        if in_hub_cache(name)
        else (
            f"The model {name} is missing; fetch it with `hf download {name}`, or give its folder with --set model.name=FOLDER."
        )
    )


def in_hub_cache(name: str) -> bool:
    """Return whether the Hugging Face cache has the model, without using the network."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return bool(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError):
        return False


def against_paper(name: str, recipe: Grid, outcome: GridOutcome, labels: Sequence[str], command: str) -> Comparison:
    """Return the summary with the paper's values beside ours, and what became of its claims."""
    summary = summarise(outcome, command)
    cells = []
    for cell in summary.cells:
        paper = recipe.paper_figure(cell.row, outcome.grid.columns[cell.column].beside or cell.column)
        difference = None if paper is None else cell.mean - paper
        cells.append(cell.model_copy(update={"paper": paper, "ours": cell.mean, "difference": difference}))
    guessing = [cell.place for cell in cells if cell.near_chance]
    table = TableFigures(summary.rows, summary.columns, {cell.place: cell.mean for cell in cells}, guessing)
    found = [*findings(recipe.claims, table), *beyond_chance(outcome)]
    details = {"recipe": name, "shows": recipe.shows, "label": " ".join(labels), "findings": found, "cells": cells}
    return summary.model_copy(update=details)
