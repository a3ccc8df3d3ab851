"""Write the documentation's page of reproduced tables from the result files in docs/results/reproduced.

fedvl reproduce all --on embedded --out FOLDER
python -m tools.reproduced_page FOLDER COMMIT    takes in what was run in FOLDER, at a commit
python -m tools.reproduced_page                  writes the page again

Tables that were not run in FOLDER are kept. A recipe may be run in several parts, each with its own rows
(--rows) and --out. Words are those of the recipe now, figures those of the run; what a table says about the
recipe's claims is computed from its figures.
"""

import copy
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedvl.comparisons.claims import TableFigures, findings, quoted, shown_figure
from fedvl.comparisons.contents import TunedCell
from fedvl.comparisons.grid import Grid, layered, read_recipe, recipe_names
from fedvl.comparisons.tuning import tuning_sentences
from fedvl.config import Settings

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduced.md"
RESULTS = ROOT / "docs" / "results" / "reproduced"
FOUND = "This table: "
NEAR_CHANCE = "†"  # after a figure: zero-shot is near chance level, so that claims do not count it
HEAD = """# The papers' tables and figures on the embedded model

`fedvl reproduce all --on embedded`: every recipe on the embedded model and images, in the reduced form that its
note describes. **None of these numbers is from CLIP or from the papers' datasets**; the paper's number is in brackets
where the recipe has one, to compare the order of rows, never their values. `±` is the standard deviation over seeds;
"a to b" is the interval of 95 % over seeds and test images ([comparisons](compare.md)). `†` marks figures where zero-shot
is near chance level, which are not counted.
What the paper shows is in words before a table. Whether our table shows it too is counted after it, from its figures;
[the papers' claims](claims.md) has all of them in one table. Each recipe also writes a `report.html` with its figure.
"""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(Model):
    """One figure: a mean over `n` seeds."""

    row: str
    column: str
    mean: float
    deviation: float | None = None  # standard deviation over seeds
    interval: tuple[float, float] | None = None  # of 95 %, over seeds and test images
    n: int = 1
    near_chance: bool = False


class Series(Model):
    """The values of a row in a column over rounds, as means over seeds."""

    row: str
    column: str
    values: list[float]


class Table(Model):
    """Figures of one recipe, and where they come from."""

    recipe: str
    command: str
    commit: str  # "" if it was not recorded
    version: str
    date: str
    seeds: int
    settings_sha256: str  # of what was run, so that a changed recipe is noticed; "" if it was not recorded
    rows: list[str]
    columns: list[str]
    cells: list[Cell] = []
    series: list[Series] = []
    told: list[str] = []  # how rows were tuned, and which differ beyond chance

    @property
    def figures(self) -> TableFigures:
        """The table as it is printed, for claims."""
        cells = {(cell.row, cell.column): cell.mean for cell in self.cells}
        return TableFigures(self.rows, self.columns, cells, [(c.row, c.column) for c in self.cells if c.near_chance])


def read_tables(folder: Path = RESULTS) -> dict[str, Table]:
    """Return all stored tables by recipe."""
    found = [Table.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("*/*.json"))]
    return {table.recipe: table for table in found}


def store(table: Table) -> None:
    path = RESULTS / f"{table.recipe}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.model_dump_json(indent=1, exclude_defaults=True) + "\n", encoding="utf-8")


def taken_in(folder: Path, commit: str) -> list[Table]:
    """Return the tables of all comparison.json below a folder; parts of one recipe become one table."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("comparison.json")):
        if "runs" not in path.relative_to(folder).parts:
            result = json.loads(path.read_bytes())
            parts.setdefault(result["recipe"], []).append(result)
    return [one_table(name, found, commit) for name, found in parts.items()]


def one_table(name: str, parts: Sequence[dict[str, Any]], commit: str) -> Table:
    recipe = read_recipe(name).on_embedded()
    cells = {(cell["row"], cell["column"]): cell for part in parts for cell in part["cells"]}
    series = {(one["row"], one["column"]): one for part in parts for one in part["series"]}
    rows: Settings = {}
    for part in parts:
        rows |= part["settings"]["rows"]
    other = {key: parts[0]["settings"][key] for key in ("columns", "base", "cells")}
    if parts[0]["tuned"]:
        other["cells"] = recipe.cells  # without what was chosen
    return Table(
        recipe=name,
        command=f"fedvl reproduce {name} --on embedded",
        commit=commit,
        version=parts[0]["fedvl_version"],
        date=max(part["date"] for part in parts),
        seeds=max(part["seeds"] for part in parts),
        settings_sha256=settings_sha256(rows, **other),
        rows=[row for row in recipe.rows if any(row in part["rows"] for part in parts)],
        columns=parts[0]["columns"],
        cells=[Cell(**{key: cell[key] for key in Cell.model_fields if key in cell}) for cell in cells.values()],
        told=[sentence for part in parts for sentence in told(part, recipe)],
        series=[Series(row=one["row"], column=one["column"], values=rounded(one["values"])) for one in series.values()],
    )


def told(part: dict[str, Any], recipe: Grid) -> list[str]:
    """Return what a comparison says of its tuning, and of differences beyond chance from one row."""
    tuned = tuning_sentences([TunedCell.model_validate(cell) for cell in part["tuned"]], recipe.validation)
    start = f", against {recipe.against}, beyond chance"
    return [*tuned, *(sentence for sentence in part["findings"] if recipe.against and start in sentence)]


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def settings_sha256(rows: Settings, columns: Settings, base: Settings, cells: Settings) -> str:
    """Return the SHA-256 of the settings of all cells; how many processor threads there are does not count."""
    kept = copy.deepcopy(base)
    kept.get("federation", {}).pop("threads", None)
    settings = {
        f"{row}, {column}": layered(kept, columns[column], rows[row], cells.get(row, {}).get(column, {}))
        for row in rows
        for column in columns
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def asked_sha256(recipe: Grid) -> str:
    """Return the same of a recipe as it is now."""
    rows, columns = ({name: one.settings for name, one in found.items()} for found in (recipe.rows, recipe.columns))
    return settings_sha256(rows, columns, recipe.base, recipe.cells)


def page(tables: dict[str, Table]) -> str:
    return "\n".join([HEAD, *(section(tables[name]) for name in recipe_names() if name in tables)])


def section(table: Table) -> str:
    """Return a table with its command, texts and sentences."""
    recipe = read_recipe(table.recipe)
    ours = table.recipe.startswith(("privacy/", "bench/"))  # of no paper
    source = f"commit `{table.commit[:9]}`" if table.commit else f"version {table.version}"
    about = (
        f"`{table.command}`, {table.seeds} {'seed' if table.seeds == 1 else 'seeds'}, {source}, {table.date[:10]}. "
        f"{'' if ours else 'The paper: '}{recipe.shows} {recipe.on_embedded().note}"
    )
    parts = [f"## {recipe.title}", about.rstrip(), markdown(table, recipe).rstrip()]
    for words, lines in (
        ("", difference(table, recipe.on_embedded())),
        ("", table.told),
        (FOUND, findings(recipe.claims, table.figures)),
    ):
        parts += [words + " ".join(lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def difference(table: Table, recipe: Grid) -> list[str]:
    """Return in what the recipe differs from what was measured."""
    found = []
    for words, asked, had in (("rows", recipe.rows, table.rows), ("columns", recipe.columns, table.columns)):
        if missing := [name for name in asked if name not in had]:
            found.append(f"Not measured, {words}: {', '.join(map(quoted, missing))}.")
    if table.settings_sha256 and table.settings_sha256 != asked_sha256(recipe) and not found:
        found.append("The recipe's settings have changed since this was measured.")
    return found


def markdown(table: Table, recipe: Grid) -> str:
    cells = {(cell.row, cell.column): cell for cell in table.cells}
    if not cells:
        return "Only a figure: the command draws it.\n"
    unit = f", {recipe.unit}" if recipe.unit else ""
    lines = [f"| {recipe.kind}{unit} | {' | '.join(table.columns)} |", "|" + "---|" * (len(table.columns) + 1)]
    columns = recipe.on_embedded().columns
    for row in table.rows:
        texts = []
        for column in table.columns:
            beside = columns[column].beside if column in columns else None
            texts.append(text(cells.get((row, column)), recipe.paper_figure(row, beside or column)))
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def text(cell: Cell | None, paper: float | None) -> str:
    if cell is None:
        return ""
    deviation = f" ± {cell.deviation:.1f}" if cell.deviation is not None else ""
    deviation += f", {cell.interval[0]:.1f} to {cell.interval[1]:.1f}" if cell.interval else ""
    beside = f" ({paper:g})" if paper is not None else ""
    return f"{shown_figure(cell.mean)}{deviation}{beside}{f' {NEAR_CHANCE}' if cell.near_chance else ''}"


if __name__ == "__main__":
    if len(sys.argv) == 3:
        for new in taken_in(Path(sys.argv[1]), sys.argv[2]):
            store(new)
    elif len(sys.argv) != 1:
        sys.exit(__doc__)
    PAGE.write_text(page(read_tables()), encoding="utf-8")
