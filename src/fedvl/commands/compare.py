"""fedvl compare, fedvl sweep and fedvl reproduce: many runs in one go."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvl.commands.flags import with_flags
from fedvl.commands.run import Quiet
from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from fedvl.comparisons.contents import Comparison
    from fedvl.comparisons.grid import Grid
    from fedvl.comparisons.run import GridOutcome
    from fedvl.config import Settings
    from fedvl.data.sources import Opener

COMPARE_EXAMPLES = """
Examples:

  fedvl compare --methods linear,fst-cbdg,ridge,zero-shot

  fedvl compare --methods linear,fedprox --partition iid,dirichlet:0.1 --seeds 5

  fedvl compare --methods linear,./mine.py --set federation.rounds=20

  fedvl compare --methods linear,fedprox --jobs 4       four runs at once

  fedvl compare grid.toml                               rows and columns

  fedvl compare --methods linear,fedprox --tune training.learning_rate=0.01,0.1

The same command resumes where it was stopped; finished runs are not repeated.
"""
SWEEP_EXAMPLES = """
Examples:

  fedvl sweep --method linear --set training.learning_rate=0.01,0.1,1

  fedvl sweep --method fedprox --set method.mu=0.001..1:log --random 20

  fedvl sweep experiment.toml --set training.learning_rate=0.01,0.1 --seeds 3

The same command resumes where it was stopped; finished runs are not repeated.
"""
REPRODUCE_EXAMPLES = """
Examples:

  fedvl reproduce --list                                    tables and figures

  fedvl reproduce fst-cbdg/table2                           says what to fetch

  fedvl reproduce fst-cbdg/table2 --on embedded             fetches nothing

  fedvl reproduce bench/base-to-new --on embedded --jobs 8  eight runs at once

  fedvl reproduce all --on embedded

The same command resumes where it was stopped; finished runs are not repeated.
"""

RunAssignments = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting of every run, as section.key=value; repeatable.")
]
Jobs = Annotated[int, typer.Option(min=1, help="Runs at once, each on federation.threads cores and a GPU.")]


def compare(
    grid: Annotated[Path | None, typer.Argument(help="TOML file with rows, columns, base and seeds.")] = None,
    methods: Annotated[str, typer.Option(help="Methods, comma-separated; a row each.")] = "",
    dataset: Annotated[str, typer.Option(help="Datasets, comma-separated.")] = "",
    partition: Annotated[str, typer.Option(help="Partitions, comma-separated.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs per cell; 3 unless the file says otherwise.")] = None,
    settings: RunAssignments = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(help="section.key=A,B,C to choose from for each cell, on validation images; repeatable."),
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.9, help="Share of training images to tune by; 0.2 unless the file says."),
    ] = None,
    references: Annotated[
        bool, typer.Option("--references/--no-references", help="Add rows of zero-shot and ridge.")
    ] = True,
    against: Annotated[
        str | None, typer.Option(help="Row to compare all others with: p-values by column, with Holm's correction.")
    ] = None,
    style: Annotated[str, typer.Option(help="Cells of table.tex: mean-std or interval.")] = "mean-std",
    out: Annotated[Path, typer.Option(help="Folder of the comparison and its runs.")] = Path("comparisons/comparison"),
    jobs: Jobs = 1,
    slurm: Annotated[
        Path | None, typer.Option(help="Write a Slurm array of the runs to this file, and run nothing.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compare methods over datasets, partitions and seeds: mean, deviation, significance."""
    from fedvl.comparisons.contents import table_style
    from fedvl.comparisons.grid import Variant, read_grid
    from fedvl.comparisons.references import with_references, without_refused
    from fedvl.comparisons.run import flags_grid, portable, summarise
    from fedvl.comparisons.sweep import listed_axes
    from fedvl.comparisons.tuning import trials_of, write_grid
    from fedvl.data.sources import Opener
    from fedvl.report.page import write_comparison
    from fedvl.runs.settings import resolve_experiment

    base, style = assigned(settings), table_style(style)
    if (grid is None) == (not methods):
        raise FedVLError("Name the methods (--methods linear,fst-cbdg), or give a TOML file of rows and columns.")
    if grid is None:
        wanted = flags_grid(listed(methods), listed(dataset), listed(partition), seeds or 3, base)
    else:
        wanted = read_grid(grid).under(Variant(settings=base, seeds=seeds))
    wanted = wanted.tuned_by(listed_axes(tune or []), validation)
    wanted = portable(with_references(wanted, given=references)).compared_with(against)
    for case in (
        *wanted.cases(),
        *trials_of(wanted).cases(),
    ):  # so that a mistake in the last shows before the first is run
        resolve_experiment(case.settings)
    if slurm is not None:
        write_array(wanted, out / "runs", slurm)
        return
    outcome = without_refused(run_grid(wanted, out / "runs", jobs, quiet, Opener.once()))
    summary = summarise(outcome, command_line(), wanted).model_copy(update={"style": style})
    write_comparison(summary, out)
    if outcome.tuned:
        write_grid(outcome.grid, out / "tuned.toml")
    show(summary, out / "report.html")


def run_grid(grid: "Grid", runs: Path, jobs: int, quiet: bool, opener: "Opener") -> "GridOutcome":
    """Run a grid with a display of its progress."""
    from fedvl.comparisons.jobs import perform_side_by_side
    from fedvl.display import GridDisplay, TerminalDisplay

    with keeping_finished_runs(), TerminalDisplay(quiet) as display:
        return perform_side_by_side(grid, runs, jobs, GridDisplay(display), opener)


def write_array(grid: "Grid", runs: Path, script: Path) -> None:
    """Write the runs that are not finished as a Slurm array; say how to go on."""
    from fedvl.comparisons.jobs import unfinished, write_slurm_array
    from fedvl.comparisons.run import perform_grid
    from fedvl.comparisons.tuning import trials_of, with_choices
    from fedvl.data.sources import Opener
    from fedvl.display import GridDisplay, SilentLine

    trials = trials_of(grid)
    folders = unfinished(trials, runs)
    if trials.rows and not folders:
        grid, _ = with_choices(grid, perform_grid(trials, runs, GridDisplay(SilentLine()), Opener.once()))
    folders = folders or unfinished(grid, runs)
    if not folders:
        raise FedVLError("All runs are finished; leave --slurm out to compare them.")
    write_slurm_array(folders, script)
    count = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    again = "repeat this command, for the tests" if trials.rows else "repeat this command without --slurm"
    print(f"{script}: {count}; start them with sbatch {script}, then {again}.")


@with_flags("method", "dataset", "model")
def sweep(
    experiment: Annotated[Path | None, typer.Argument(help="TOML file of settings that all runs share.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=A,B,C to choose from, or LOW..HIGH or LOW..HIGH:log to draw from."),
    ] = None,
    random: Annotated[int | None, typer.Option(min=1, help="Draw so many settings instead of trying all.")] = None,
    validation: Annotated[
        float, typer.Option(min=0.01, max=0.9, help="Share of each client's training images to choose by.")
    ] = 0.2,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the sweep and its runs.")] = Path("comparisons/sweep"),
    quiet: Quiet = False,
    **flags: Any,
) -> None:
    """Choose settings on validation images; look at the test once, for the chosen one."""
    from fedvl.comparisons.sweep import chosen_grid, perform_sweep, read_axes, sweep_grid
    from fedvl.comparisons.tuning import write_grid
    from fedvl.config import gather_settings
    from fedvl.data.sources import Opener
    from fedvl.display import GridDisplay, TerminalDisplay
    from fedvl.report.page import write_comparison
    from fedvl.runs.settings import new_experiment

    base = gather_settings(experiment, flags)
    grid = sweep_grid(base, read_axes(settings or []), random, validation, seeds)
    for case in grid.cases():
        new_experiment(case.settings)
    with keeping_finished_runs(), TerminalDisplay(quiet) as display:
        summary = perform_sweep(grid, out / "runs", GridDisplay(display), Opener.once(), command_line())
    write_comparison(summary, out)
    if chosen := chosen_grid(grid, summary):
        write_grid(chosen, out / "chosen.toml")
    show(summary, out / "report.html")


def reproduce(
    recipe: Annotated[str | None, typer.Argument(help="PAPER/TABLE, a paper, or all.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    on: Annotated[str, typer.Option(help="paper: its models and data; embedded: what is in the package.")] = "paper",
    quick: Annotated[bool, typer.Option("--quick", help="A tiny smoke test.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds, if not as many as the recipe has.")] = None,
    rows: Annotated[str, typer.Option(help="Only rows whose names contain one of these, comma-separated.")] = "",
    settings: RunAssignments = None,
    out: Annotated[Path, typer.Option(help="Folder of results and runs.")] = Path("reproductions"),
    jobs: Jobs = 1,
    quiet: Quiet = False,
) -> None:
    """Reproduce a table or figure of the five papers, and compare it with the paper."""
    from fedvl.comparisons.grid import recipe_names

    if on not in ("paper", "embedded"):
        raise FedVLError(f"--on is paper or embedded, not '{on}'.")
    if list_all or recipe is None:
        show_recipes()
        return
    chosen = [name for name in recipe_names() if recipe in (name, "all", name.split("/")[0])]
    if not chosen:
        raise FedVLError(f"There is no recipe '{recipe}'; fedvl reproduce --list shows all.")
    reproduce_all(chosen, on, quick, seeds, listed(rows), assigned(settings), out, jobs, quiet)


def reproduce_all(
    names: list[str],
    on: str,
    quick: bool,
    seeds: int | None,
    rows: list[str],
    settings: "Settings",
    out: Path,
    jobs: int,
    quiet: bool,
) -> None:
    """Reproduce recipes one after the other; runs that they share are run once."""
    from fedvl.comparisons.grid import read_recipe
    from fedvl.comparisons.reproduce import (
        EMBEDDED_LABEL,
        QUICK_LABEL,
        against_paper,
        arranged,
        missing_requirements,
    )
    from fedvl.data.sources import Opener
    from fedvl.report.page import write_comparison

    labels = [*([EMBEDDED_LABEL] if on == "embedded" else []), *([QUICK_LABEL] if quick else [])]
    recipes = {name: read_recipe(name) for name in names}
    grids = {name: arranged(recipe, on == "embedded", quick, seeds, rows, settings) for name, recipe in recipes.items()}
    if missing := list(dict.fromkeys(sentence for grid in grids.values() for sentence in missing_requirements(grid))):
        needs = "\n".join(f"  - {sentence}" for sentence in missing)
        raise FedVLError(f"These requirements are not on this machine:\n{needs}\nOr try --on embedded.")
    folder, opener, failed = out / (f"{on}-quick" if quick else on), Opener.once(), 0
    for name, wanted in grids.items():
        outcome = run_grid(wanted, folder / "runs", jobs, quiet, opener)
        summary = against_paper(name, recipes[name], outcome, labels, command_line(name))
        write_comparison(summary, folder / name)
        failed += len(summary.failures)
        show(summary, folder / name / "report.html", stop=False)
    if failed:
        raise typer.Exit(1)


@contextmanager
def keeping_finished_runs() -> Iterator[None]:
    """On Ctrl-C, say that finished runs are kept."""
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped; finished runs are kept: go on with the same command.", file=sys.stderr)
        raise typer.Exit(130) from None


def show(summary: "Comparison", written: Path, stop: bool = True) -> None:
    """Print the table, the failures and the report's path; exit with 1 after a failure."""
    from fedvl.display import Console, visible
    from fedvl.report.comparison_page import OF_NO_PAPER
    from fedvl.report.comparison_tables import footnote, heading, opening, terminal_tables

    console = Console()
    if title := heading(summary):
        console.print(title, style="bold", highlight=False)
    for table in terminal_tables(summary, console.width):
        console.print(table)
    console.print(footnote(summary), highlight=False)
    if first := opening(summary):
        console.print(first, highlight=False)
    if summary.findings:
        source = "" if (summary.recipe or "").startswith(OF_NO_PAPER) else "The paper: "
        console.print(f"{source}{summary.shows}", highlight=False)
        console.print(f"This table: {' '.join(summary.findings)}", highlight=False)
    console.print(f"Written: {written}\n", soft_wrap=True, highlight=False)
    for failure in summary.failures:
        run = f"{failure.row}, {failure.column}, seed {failure.seed}"
        print(visible(f"Failed: {run}: {failure.error}"), file=sys.stderr)
    if summary.failures and stop:
        raise typer.Exit(1)


def show_recipes() -> None:
    from rich.table import Table

    from fedvl.comparisons.grid import read_recipe, recipe_names
    from fedvl.display import Console

    table = Table("recipe", "kind", "what it is", box=None, pad_edge=False)
    for name in recipe_names():
        recipe = read_recipe(name)
        table.add_row(name, recipe.kind, recipe.title)
    Console().print(table)


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def assigned(assignments: list[str] | None) -> "Settings":
    from fedvl.comparisons.grid import layered
    from fedvl.config import parse_assignment

    return layered(*map(parse_assignment, assignments or []))


def command_line(recipe: str | None = None) -> str:
    """Return the command as typed, or with one recipe in place of several."""
    words = ["fedvl", *sys.argv[1:]]
    if recipe is not None and len(words) > 2:
        words[2] = recipe
    return shlex.join(words)
