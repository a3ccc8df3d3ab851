"""A grid of runs as a TOML file describes it: rows x columns x seeds, laid over common settings.

``fedvl compare`` reads such files, and the recipes of the papers' tables and figures are such files that also say what the
paper found, and what stands in for its model and data where only the embedded ones are at hand.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedvl.config import Experiment, explain, overlay, read_toml
from fedvl.errors import FedVLError

Settings = dict[str, Any]
Kind = Literal["table", "curves", "lines", "bars", "radar", "scatter", "map", "bubbles", "panels"]

RECIPES = Path(__file__).parent / "recipes"

# What makes any recipe small enough for a test, unless it says otherwise
QUICK: Settings = {
    "data": {"shots": 4, "test_shots": 5, "clients": 3, "minimum": 0},
    "federation": {"rounds": 1},
    "training": {"local_epochs": 1},
}


class Entry(BaseModel):
    """A row or a column: settings of its own (sections of an experiment), and how it is measured and compared."""

    model_config = ConfigDict(extra="allow", frozen=True)
    measure: str | None = None  # instead of the grid's
    paper: list[float] = []  # of a row: the paper's figures, one a column; nan where it gives none
    beside: str | None = None  # of an embedded column: the paper's column whose figures are shown beside it
    embedded: Settings | None = None  # of a row: its settings where the embedded model and data stand in

    @property
    def settings(self) -> Settings:
        return dict(self.model_extra or {})

    def with_settings(self, settings: Settings) -> "Entry":
        return Entry(**{**self.model_dump(include=set(Entry.model_fields)), **settings})


class Stand(BaseModel):
    """What changes where the embedded model and data stand in for the paper's, or where it must be quick."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    settings: Settings = {}
    rows: dict[str, Entry] | list[str] | None = None  # instead of the paper's, or these of them alone
    columns: dict[str, Entry] | list[str] | None = None
    seeds: int | None = Field(None, ge=1)
    note: str = ""  # what the reader must know


class Grid(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    title: str = ""
    shows: str = ""  # what to look for
    kind: Kind = "table"
    unit: str = "%"
    measure: str = "accuracy"  # a figure of result.json or a measure of measures.py
    seeds: int = Field(3, ge=1)
    base: Settings = {}
    rows: dict[str, Entry] = Field(min_length=1)
    columns: dict[str, Entry] = {"all": Entry()}
    over: Settings = {}  # laid over everything
    note: str = ""  # what the reader must know
    embedded: Stand = Stand()
    quick: Stand = Stand()

    @model_validator(mode="after")
    def check_names(self) -> "Grid":
        for name, row in self.rows.items():
            if row.paper and len(row.paper) != len(self.columns):
                raise ValueError(
                    f"row '{name}' has {len(row.paper)} figures of the paper for {len(self.columns)} columns"
                )
        columns = self.embedded.columns
        for name, column in columns.items() if isinstance(columns, dict) else ():
            if column.beside is not None and column.beside not in self.columns:
                raise ValueError(f"column '{name}' stands beside '{column.beside}', which there is not")
        return self

    def on_embedded(self) -> "Grid":
        """Where the embedded model and data stand in for the paper's."""
        rows = {
            name: row if row.embedded is None else row.with_settings(row.embedded) for name, row in self.rows.items()
        }
        base = layered(self.base, self.embedded.settings)
        return self.model_copy(update={"rows": rows, "base": base}).reduced(self.embedded)

    def under(self, stand: Stand) -> "Grid":
        """With its settings laid over everything."""
        return self.reduced(stand).model_copy(update={"over": layered(self.over, stand.settings)})

    def reduced(self, stand: Stand) -> "Grid":
        """With its rows, columns and seeds."""
        return self.model_copy(
            update={
                "rows": chosen(self.rows, stand.rows),
                "columns": chosen(self.columns, stand.columns),
                "seeds": stand.seeds or self.seeds,
                "note": " ".join(filter(None, (self.note, stand.note))),
            }
        )

    def paper_figure(self, row: str, column: str) -> float | None:
        """What the paper found in this place."""
        figures = self.rows[row].paper if row in self.rows else []
        found = dict(zip(self.columns, figures, strict=False)).get(column, math.nan)
        return None if math.isnan(found) else found

    def cases(self) -> "Iterator[Case]":
        """Every run of the grid, seed by seed last, so that each place is finished before the next."""
        for row_name, row in self.rows.items():
            for column_name, column in self.columns.items():
                for seed in range(self.seeds):
                    settings = layered(self.base, column.settings, row.settings, self.over, {"seed": seed})
                    yield Case(row_name, column_name, seed, self.measure_of(row_name, column_name), settings)

    def measure_of(self, row: str, column: str) -> str:
        return self.columns[column].measure or self.rows[row].measure or self.measure


class Case(NamedTuple):
    """One run of a grid, and what is measured of it."""

    row: str
    column: str
    seed: int
    measure: str
    settings: Settings


def layered(*layers: Settings) -> Settings:
    """Settings laid over each other, later ones winning."""
    settings: Settings = {}
    for layer in layers:
        overlay(settings, layer)
    return settings


def chosen(entries: dict[str, Entry], wanted: dict[str, Entry] | list[str] | None) -> dict[str, Entry]:
    if wanted is None or isinstance(wanted, dict):
        return wanted or entries
    if strange := [name for name in wanted if name not in entries]:
        raise FedVLError(f"There is no row or column '{strange[0]}'; there are {', '.join(entries)}.")
    return {name: entries[name] for name in wanted}


def read_grid(path: Path) -> Grid:
    try:
        return Grid.model_validate(read_toml(path))
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "value_error":
            raise FedVLError(f"{path}: {problem['msg'].removeprefix('Value error, ')}.") from error
        raise FedVLError(f"{path}: {explain(error, Grid)}") from error


def recipe_names() -> list[str]:
    """All recipes of the package, as PAPER/TABLE."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.toml"))


def read_recipe(name: str) -> Grid:
    return read_grid(RECIPES / f"{name}.toml")


def folder_name(experiment: Experiment) -> str:
    """Readable, and different for different experiments: two places of a grid that are the same run share its folder."""
    words = (
        f"{experiment.method.label}-{Path(experiment.data.dataset).stem}-{experiment.data.partition}-{experiment.seed}"
    )
    digest = hashlib.sha256(experiment.to_toml().encode()).hexdigest()[:10]
    return f"{re.sub(r'[^a-zA-Z0-9.]+', '-', words).strip('-')}-{digest}"
