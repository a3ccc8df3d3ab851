"""Grids of runs, described by TOML files: rows x columns x seeds over common settings.

``fedvl compare`` reads such files. Recipes of the papers' tables and figures are such files with
the paper's values, and with settings that replace its model and data by the embedded ones.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedvl.comparisons.claims import Claim
from fedvl.comparisons.contents import Kind
from fedvl.config import Experiment, Settings, explain, overlay, read_toml
from fedvl.errors import FedVLError
from fedvl.methods import method_names

RECIPES = Path(__file__).parent / "recipes"

# Settings that make any recipe small enough for a test; its own [quick] section comes on top.
QUICK: Settings = {
    "data": {"shots": 4, "test_shots": 5, "clients": 3, "minimum": 0},
    "federation": {"rounds": 1},
    "training": {"local_epochs": 1},
}


class GridEntry(BaseModel):
    """A row or column: its own settings (sections of an experiment), measure and paper values."""

    model_config = ConfigDict(extra="allow", frozen=True)
    measure: str | None = None  # replaces the grid's measure
    paper: list[float] = []  # of a row: the paper's values, one per column; nan if it gives none
    beside: str | None = None  # of an embedded column: the paper's column to compare it with
    embedded: Settings | None = None  # of a row: its settings on the embedded model and data
    tune: dict[str, list[Any]] | None = None  # of a row: replaces the grid's values to try; {}: not tuned
    reference: bool = False  # of a row: a reference, to which [method] of base and columns does not apply

    @property
    def settings(self) -> Settings:
        return dict(self.model_extra or {})

    def with_settings(self, settings: Settings) -> "GridEntry":
        return GridEntry(**{**self.model_dump(include=set(GridEntry.model_fields)), **settings})


class Variant(BaseModel):
    """Changes to a grid for the embedded model and data, or for a quick test."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    settings: Settings = {}
    rows: dict[str, GridEntry] | list[str] | None = None  # other rows, or names of those to keep
    columns: dict[str, GridEntry] | list[str] | None = None
    seeds: int | None = Field(None, ge=1)
    note: str = ""  # caveats printed in the report


class Grid(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    title: str = ""
    shows: str = ""  # what the paper's table or figure shows
    kind: Kind = "table"
    unit: str = "%"
    measure: str = "accuracy"  # a metric of result.json or a measure of measures.py
    seeds: int = Field(3, ge=1)
    base: Settings = {}
    rows: dict[str, GridEntry] = Field(min_length=1)
    columns: dict[str, GridEntry] = {"all": GridEntry()}
    cells: dict[str, dict[str, Settings]] = {}  # of a row in a column, over the settings of both
    left_out: list[tuple[str, str]] = []  # rows and columns of cells that are not run
    over: Settings = {}  # overrides everything else
    tune: dict[str, list[Any]] = {}  # values to try of each section.key; chosen by cell on validation images
    validation: float = Field(0.2, gt=0, lt=1)  # share of each client's training images to choose by
    against: str = ""  # a row that all others are compared with
    references: bool = True  # whether `fedvl compare` adds rows of zero-shot and ridge
    note: str = ""  # caveats printed in the report
    claims: list[Claim] = []  # what is in `shows`, to be computed from our figures
    embedded: Variant = Variant()
    quick: Variant = Variant()

    @model_validator(mode="after")
    def check_names(self) -> "Grid":
        for name, row in self.rows.items():
            if row.paper and len(row.paper) != len(self.columns):
                raise ValueError(
                    f"row '{name}' has {len(row.paper)} values of the paper for {len(self.columns)} columns"
                )
        known = {*self.rows, *self.columns}
        for variant in (self.embedded.rows, self.embedded.columns):
            known |= set(variant or ())
        for claim in self.claims:
            if strange := [name for name in claim.names if name not in known]:
                raise ValueError(f"a claim is about '{strange[0]}', which is not a row or column")
        if self.against and self.against not in self.rows:
            raise ValueError(f"rows are compared with '{self.against}', which is not a row")
        for row_name, cells in self.cells.items():
            if strange := [name for name in (row_name, *cells) if name not in known]:
                raise ValueError(f"cells has '{strange[0]}', which is not a row or column")
        columns = self.embedded.columns
        for name, column in columns.items() if isinstance(columns, dict) else ():
            if column.beside is not None and column.beside not in self.columns:
                raise ValueError(f"column '{name}' is compared with '{column.beside}', which is not a column")
        return self

    def on_embedded(self) -> "Grid":
        """Return the grid with the embedded model and data in place of the paper's."""
        rows = {
            name: row if row.embedded is None else row.with_settings(row.embedded) for name, row in self.rows.items()
        }
        base = layered(self.base, self.embedded.settings)
        return self.model_copy(update={"rows": rows, "base": base}).reduced(self.embedded)

    def under(self, variant: Variant) -> "Grid":
        """Return the grid reduced to a variant, whose settings override everything else."""
        return self.reduced(variant).model_copy(update={"over": layered(self.over, variant.settings)})

    def tuned_by(self, axes: dict[str, list[Any]], validation: float | None) -> "Grid":
        """Return the grid with values to try in each cell; those of a file by default."""
        given = {"validation": validation} if validation is not None else {}
        return self.model_copy(update={"tune": {**self.tune, **axes}, **given})

    def compared_with(self, row: str | None) -> "Grid":
        """Return the grid with the row that all others are compared with; by default its own."""
        if row is not None and row not in self.rows:
            raise FedVLError(f"There is no row '{row}' to compare with; rows are {', '.join(self.rows)}.")
        return self if row is None else self.model_copy(update={"against": row})

    def reduced(self, variant: Variant) -> "Grid":
        """Return the grid with a variant's rows, columns, seeds and note."""
        return self.model_copy(
            update={
                "rows": chosen(self.rows, variant.rows),
                "columns": chosen(self.columns, variant.columns),
                "seeds": variant.seeds or self.seeds,
                "note": " ".join(filter(None, (self.note, variant.note))),
            }
        )

    def paper_figure(self, row: str, column: str) -> float | None:
        """Return the paper's value in a cell, or None."""
        figures = self.rows[row].paper if row in self.rows else []
        found = dict(zip(self.columns, figures, strict=False)).get(column, math.nan)
        return None if math.isnan(found) else found

    def cases(self) -> "Iterator[Case]":
        """Yield every run of the grid, cell by cell."""
        for row_name, row in self.rows.items():
            for column_name, column in self.columns.items():
                if (row_name, column_name) in self.left_out:
                    continue
                own = self.cells.get(row_name, {}).get(column_name, {})
                common = [self.base, column.settings, self.over]
                if row.reference:
                    common = [{key: part for key, part in each.items() if key != "method"} for each in common]
                base, of_column, over = common
                for seed in range(self.seeds):
                    settings = layered(base, of_column, row.settings, own, over, {"seed": seed})
                    yield Case(row_name, column_name, seed, self.measure_of(row_name, column_name), settings)

    def measure_of(self, row: str, column: str) -> str:
        return self.columns[column].measure or self.rows[row].measure or self.measure


class Case(NamedTuple):
    """One run of a grid, and the measure taken of it."""

    row: str
    column: str
    seed: int
    measure: str
    settings: Settings


def layered(*layers: Settings) -> Settings:
    """Merge settings; later layers win."""
    settings: Settings = {}
    for layer in layers:
        overlay(settings, layer)
    return settings


def chosen(entries: dict[str, GridEntry], wanted: dict[str, GridEntry] | list[str] | None) -> dict[str, GridEntry]:
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
    """Return the names of all recipes as PAPER/TABLE."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.toml"))


def read_recipe(name: str) -> Grid:
    """Read a recipe of the package, without rows of methods that this version has not."""
    grid, known = read_grid(RECIPES / f"{name}.toml"), method_names()
    rows = {
        row: entry for row, entry in grid.rows.items() if entry.settings.get("method", {}).get("name") in (None, *known)
    }
    return grid.model_copy(update={"rows": rows})


def folder_name(experiment: Experiment) -> str:
    """Return a readable name per experiment; cells with the same experiment share a folder."""
    words = (
        f"{experiment.method.label}-{Path(experiment.data.dataset).stem}-{experiment.data.partition}-{experiment.seed}"
    )
    digest = hashlib.sha256(experiment.to_toml().encode()).hexdigest()[:10]
    return f"{re.sub(r'[^a-zA-Z0-9.]+', '-', words).strip('-')}-{digest}"
