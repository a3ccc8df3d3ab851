"""Fill the tables of the documentation from the result files in docs/results.

python -m tools.results_page

A result file holds the figures of one grid or benchmark, with the commit, command, seeds and machine that
they come from. tools/measure_results.py writes it. A page asks for a table between two markers:

    <!-- results: supervised -->
    <!-- end of results -->

Titles, notes and claims come from benchmarks/results/NAME.toml, figures from docs/results/NAME.json, and the
sentences below a table are computed from its figures. `choices` in place of a name is the table of
docs/which-method.md.
"""

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from fedvl.comparisons.claims import TableFigures, findings
from fedvl.comparisons.grid import read_grid

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
GRIDS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "methods").glob("*.md"))]
BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
TIMED = ("rounds", "flute", "memory", "scale", "scale-gpu", "prompts-gpu", "precision-gpu")  # benchmarks of speed
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cell(Model):
    """One figure: a mean over `n` seeds, or one measurement."""

    row: str
    column: str
    mean: float
    deviation: float | None = None  # standard deviation over seeds
    interval: tuple[float, float] | None = None  # of 95 %, over seeds and test images
    n: int = 1
    near_chance: bool = False  # zero-shot is, so that the cell is marked and not counted in sentences


class Result(Model):
    """Figures of one command, and where they come from."""

    name: str
    kind: Literal["grid", "benchmark"]
    command: str
    commit: str
    version: str
    date: str
    machine: str
    load: float  # processes at work on the machine beside the command, when it began
    seconds: float  # how long the command took
    seeds: int
    dataset: str
    model: str
    settings_sha256: str = ""  # of the grid's settings, so that a changed grid is noticed
    rows: list[str]
    columns: list[str]
    cells: list[Cell]

    def figure(self, row: str, column: str) -> Cell:
        """Return the figure of a row and column."""
        return next(cell for cell in self.cells if (cell.row, cell.column) == (row, column))


class Choice(NamedTuple):
    """A row of docs/which-method.md: a situation, what to use, and the figures behind it."""

    situation: str
    advice: str
    result: str
    column: str
    rows: tuple[str, ...]


CHOICES = (
    Choice(
        "Many labelled images",
        "`linear`",
        "labels",
        "128 shots",
        ("linear", "CacheFL, tip-adapter", "zero-shot"),
    ),
    Choice(
        "Few labelled images (4 of each class)",
        "`linear`, or [CacheFL](methods/cachefl.md)",
        "labels",
        "4 shots",
        ("linear", "CacheFL, tip-adapter", "zero-shot"),
    ),
    Choice(
        "No labels, one model for all",
        "[FST-CBDG](methods/fst-cbdg.md)",
        "unlabelled",
        "dirichlet:0.1",
        ("FST-CBDG", "zero-shot"),
    ),
    Choice(
        "No labels, a model for each client",
        "[FedPP](methods/fedpp.md)",
        "personal",
        "dirichlet:0.1",
        ("FedPP, without labels", "zero-shot"),
    ),
    Choice(
        "Labels, clients with different classes",
        "`linear`",
        "supervised",
        "disjoint",
        ("linear", "CacheFL, tip-adapter", "PromptFL", "zero-shot"),
    ),
    Choice(
        "Labels, and one exchange with the server",
        "`ridge`",
        "training-free",
        "disjoint",
        ("ridge", "linear", "zero-shot"),
    ),
    Choice(
        "Classes that no client has",
        "[Fed-MP](methods/fed-mp.md)",
        "new-classes",
        "cifar10-mini",
        ("Fed-MP", "FedCLIP", "zero-shot"),
    ),
    Choice("Many clients (100)", "`linear`", "clients", "100 clients", ("linear", "FST-CBDG")),
    Choice(
        "The server may see sums only",
        "`linear --secure-sum`",
        "privacy",
        "secure aggregation",
        ("linear", "FST-CBDG"),
    ),
    Choice(
        "Client-level differential privacy, epsilon 3, 100 clients",
        "`linear --privacy client:eps=3`",
        "privacy",
        "epsilon 3",
        ("linear", "FST-CBDG"),
    ),
    Choice(
        "Samples without their text or image",
        "[Fed-PRIME](methods/fed-prime.md)",
        "missing",
        "as trained",
        ("Fed-PRIME", "FedAvg-P"),
    ),
    Choice(
        "Weak devices or links: bytes sent in a round",
        "`linear`, [FST-CBDG](methods/fst-cbdg.md)",
        "cost",
        "bytes up a round",
        ("linear", "FST-CBDG", "CacheFL, paper", "PromptFL", "Fed-MP", "Fed-PRIME"),
    ),
)


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return all result files by name."""
    return {path.stem: Result.model_validate_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))}


def settings_sha256(path: Path) -> str:
    """Return the SHA-256 of what decides the figures of a grid; titles, notes and claims do not."""
    words = ("title", "shows", "note", "claims", "unit", "kind")
    described = {key: value for key, value in tomllib.loads(path.read_text("utf-8")).items() if key not in words}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def filled(page: str, results: dict[str, Result]) -> str:
    """Return a page with the tables between its markers as the result files have them."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name == "choices":
            return f"{match[1]}{choices(results)}{match[3]}"
        if name not in results and name not in TIMED and not (GRIDS / f"{name}.toml").is_file():
            raise SystemExit(f"A page asks for results '{name}', which is neither a grid nor a benchmark.")
        shown = section(results[name]) if name in results else f"{absent(name)}.\n"
        return f"{match[1]}{shown}{match[3]}"

    return BLOCK.sub(block, page)


def absent(name: str) -> str:
    return f"Not measured for this version: `python -m tools.measure_results --only {name}`"


def section(result: Result) -> str:
    """Return a table with its command, sentences and source."""
    parts = [table(result)]
    if result.kind == "grid":
        grid = read_grid(GRIDS / f"{result.name}.toml")
        figures = TableFigures(
            result.rows,
            result.columns,
            {(cell.row, cell.column): round(cell.mean, 1) for cell in result.cells},
            [(cell.row, cell.column) for cell in result.cells if cell.near_chance],
        )
        counted = " ".join(findings(grid.claims, figures)).replace("that the recipe names for this", "compared here")
        parts.append(f"{grid.note} {counted}".rstrip())
    parts.append(source(result))
    return "\n\n".join(parts) + "\n"


def source(result: Result) -> str:
    seeds = "1 seed" if result.seeds == 1 else f"{result.seeds} seeds"
    about = [f"{result.dataset}, {result.model}, {seeds}"] if result.kind == "grid" else []
    busy = f" (load {result.load:.0f} before)" if result.load >= 1 else ""
    about += [f"commit `{result.commit[:9]}`", result.machine, result.date[:10], f"{result.seconds:.0f} s{busy}"]
    return f"`{result.command}` *({'; '.join(about)})*"


def table(result: Result) -> str:
    cells = {(cell.row, cell.column): cell for cell in result.cells}
    lines = [f"| | {' | '.join(result.columns)} |", "|" + "---|" * (len(result.columns) + 1)]
    for row in result.rows:
        lines.append(f"| {row} | {' | '.join(text(cells.get((row, column))) for column in result.columns)} |")
    return "\n".join(lines)


def text(cell: Cell | None) -> str:
    """Return a figure as tables show it: with its deviation and interval, or scaled with a unit prefix."""
    if cell is None:
        return ""
    deviation = "" if cell.deviation is None else f" ± {cell.deviation:.1f}"
    interval = "" if cell.interval is None else f" ({cell.interval[0]:.1f} to {cell.interval[1]:.1f})"
    interval = interval.replace(" to ", "\u00a0to\u00a0")  # so that a line breaks before the bracket
    return f"{number(cell.mean)}{'†' if cell.near_chance else ''}{deviation}{interval}"


def number(value: float) -> str:
    """Return a number with three digits or, from 1,000,000, a prefix."""
    for size, prefix in UNITS:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 or value == 0 else f"{value:.3g}"


def choices(results: dict[str, Result]) -> str:
    """Return the table of docs/which-method.md."""
    lines = ["| situation | method | figures |", "|---|---|---|"]
    for choice in CHOICES:
        result = results.get(choice.result)
        if result is None:
            lines.append(f"| {choice.situation} | {choice.advice} | {absent(choice.result)} |")
            continue
        shown = [f"{row} {text(result.figure(row, choice.column))}" for row in choice.rows]
        link = f"[{choice.result}, {choice.column}](results.md#{anchor(choice.result)})"
        lines.append(f"| {choice.situation} | {choice.advice} | {link}: {'; '.join(shown)} |")
    return "\n".join(lines) + "\n"


def anchor(name: str) -> str:
    """Return the anchor of a grid's heading in docs/results.md."""
    return re.sub(r"[^\w-]", "", read_grid(GRIDS / f"{name}.toml").title.lower().replace(" ", "-"))


def main() -> int:
    results = read_results()
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        if (new := filled(old, results)) != old:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
