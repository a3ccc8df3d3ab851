"""Verify a comparison: its summary follows from its runs, and its runs give the same again.

The summary, the tables and the page are made anew from the runs' results; all of the runs, or a
sample drawn at random, are executed again.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import computed_field

from fedvl.comparisons.contents import Comparison
from fedvl.comparisons.grid import Grid
from fedvl.comparisons.references import without_refused
from fedvl.comparisons.run import GridOutcome, perform_grid, summarise
from fedvl.comparisons.tuning import perform_tuned
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay, SilentLine
from fedvl.errors import FedVLError
from fedvl.files import Content, read_file, read_json, validated
from fedvl.runs.folder import RunFolder
from fedvl.runs.repeat import Difference, Repeated, Verdict, content_differences, repeat
from fedvl.runs.settings import resolve_experiment
from fedvl.version import __version__

COMPARISON = "comparison.json"
WRITTEN = 1e-9  # share by which a mean of the same numbers may differ between versions of NumPy
OF_WRITING = ("date", "fedvl_version", "command", "style")
MAX_PAGE = 2**26  # bytes
LEFT = shutil.ignore_patterns("journal", "report.html", ".lock", "*.log")


class Verified(Content):
    """What was found of a comparison."""

    runs: list[Repeated]
    """Runs that were executed again."""
    left: int
    """Runs that were not."""
    summary: list[Difference] = []
    """Figures of the summary that do not follow from the runs, and files that do not show it."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Verdict:
        verdicts = {run.verdict for run in self.runs} | ({"different"} if self.summary else set())
        ranked: Sequence[Verdict] = ("different", "within rounding")
        return next((verdict for verdict in ranked if verdict in verdicts), "same bits")


def read_comparison(folder: Path) -> Comparison:
    path = folder / COMPARISON
    found = read_json(path)
    if found is None:
        raise FedVLError(f"There is no comparison in {folder}; give the folder of one, or of a run.")
    return validated(Comparison, found, path)


def verify_comparison(
    folder: Path,
    sample: int | None,
    scratch: Path,
    display: GridDisplay,
    opener: Opener,
    pages: Callable[[Comparison], Mapping[str, bytes]],
    trust_method: bool = False,
    packed: bool = False,
) -> Verified:
    """Verify a comparison below ``scratch``; ``pages`` are the files that show a summary.

    Of a pack, paths of method files lead to them from the current folder.
    """
    claimed = read_comparison(folder)
    if not claimed.grid:
        raise FedVLError(
            f"The comparison in {folder} does not name its grid: a recipe's or an older version's; verify its runs one by one."
        )
    grid, copies = Grid.model_validate(claimed.grid), scratch / "claimed"
    shutil.copytree(folder / "runs", copies, symlinks=True, ignore=LEFT)
    asked, outcome = performed_again(grid, copies, opener)
    summary = [*unclaimed_failures(claimed, outcome)]
    summary += [] if summary else differing_summary(claimed, summarise(outcome, claimed.command, grid))
    summary += differing_pages(folder, claimed, pages)
    names = sorted(name for name in asked if (folder / "runs" / name / "result.json").is_file())
    chosen = names if sample is None else sorted(random.SystemRandom().sample(names, min(sample, len(names))))
    repeated = []
    for number, name in enumerate(chosen):
        display.begin(name, number, len(chosen))
        run = RunFolder(folder / "runs" / name, trust_method)
        experiment = resolve_experiment(run.settings) if packed else None
        repeated.append(repeat(run, scratch / "again", display, opener, experiment))
        display.end(repeated[-1].verdict, number + 1, len(chosen))
    return Verified(runs=repeated, left=len(names) - len(chosen), summary=summary)


def performed_again(grid: Grid, runs: Path, opener: Opener) -> tuple[set[str], GridOutcome]:
    """Perform a grid on copies of its runs, and return their names; what is missing is executed."""
    names, display = set[str](), GridDisplay(SilentLine())

    def perform(part: Grid) -> GridOutcome:
        outcome = perform_grid(part, runs, display, opener)
        names.update(name for own in outcome.runs.values() for name in own)
        return outcome

    return names, without_refused(perform_tuned(grid, perform))


def unclaimed_failures(claimed: Comparison, outcome: GridOutcome) -> Iterator[Difference]:
    """Yield the runs that the comparison states figures of, and that cannot be used."""
    for failure in outcome.failures:
        if failure not in claimed.failures:
            run = f"{failure.row}, {failure.column}, seed {failure.seed}"
            reason = failure.error.partition(";")[0]
            yield Difference(file="runs", figure=run, claimed="finished", repeated=reason, share=1.0)


def differing_summary(claimed: Comparison, found: Comparison) -> Iterator[Difference]:
    """Yield the figures of a summary that do not follow from its runs."""
    theirs, ours = (
        {key: value for key, value in one.model_dump(mode="json", exclude_unset=True).items() if key not in OF_WRITING}
        for one in (claimed, found)
    )
    for key in dict.fromkeys([*theirs, *ours]):
        if key == "cells":
            yield from content_differences(COMPARISON, by_place(claimed), by_place(found), WRITTEN)
        else:
            yield from content_differences(COMPARISON, {key: theirs.get(key)}, {key: ours.get(key)}, WRITTEN)


def by_place(summary: Comparison) -> dict[str, Any]:
    return {", ".join(cell.place): cell.model_dump(mode="json", exclude_unset=True) for cell in summary.cells}


def differing_pages(
    folder: Path, claimed: Comparison, pages: Callable[[Comparison], Mapping[str, bytes]]
) -> Iterator[Difference]:
    """Yield the files that do not show the summary; those of another version are not compared."""
    for name, content in pages(claimed).items() if claimed.fedvl_version == __version__ else ():
        path = folder / name
        if path.is_file() and read_file(path, MAX_PAGE) != content:
            yield Difference(
                file=name, figure="content", claimed="other than of comparison.json", repeated="not the same", share=1.0
            )
