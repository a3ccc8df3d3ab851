"""fedvl verify, fedvl pack and fedvl leaderboard: results that others can check."""

import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvl.commands.run import Quiet
from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedvl.comparisons.contents import Comparison
    from fedvl.comparisons.verification import Verified
    from fedvl.display import GridDisplay

EXAMPLES = """
Examples:

  fedvl verify runs/linear-cifar10-mini                 execute a run again

  fedvl verify comparisons/comparison --sample 5        five runs at random

  fedvl verify results.zip                              a pack, without images
"""

Sample = Annotated[int | None, typer.Option(min=1, help="Execute so many runs, drawn at random, instead of all.")]
TrustMethod = Annotated[
    bool, typer.Option("--trust-method", help="Run the method files of folder or pack (read them).")
]


def verify(
    place: Annotated[Path, typer.Argument(help="A run, a comparison, or a pack (a folder or a .zip file).")],
    sample: Sample = None,
    trust_method: TrustMethod = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Execute finished runs again, and compare every figure; exit with 1 if one differs."""
    from fedvl.display import GridDisplay, TerminalDisplay

    with tempfile.TemporaryDirectory() as scratch, TerminalDisplay(quiet) as display:
        found, told = verified(place, sample, trust_method, Path(scratch), GridDisplay(display))
    if as_json:
        print(found.to_json(indent=1))
    else:
        show(found, told)
    if found.verdict == "different":
        raise typer.Exit(1)


def verified(
    place: Path, sample: int | None, trust_method: bool, scratch: Path, display: "GridDisplay"
) -> "tuple[Verified, list[str]]":
    """Verify a run, a comparison or a pack; return the result, and sentences on the data."""
    from fedvl.comparisons.pack import PACK, open_pack, pack_folder
    from fedvl.comparisons.verification import COMPARISON, Verified, verify_comparison
    from fedvl.data.sources import Opener
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.repeat import repeat

    opener = Opener.once()
    if not place.exists():
        raise FedVLError(f"{place} does not exist; give a run, a comparison or a pack.")
    if place.is_file() or (place / PACK).is_file():
        folder = pack_folder(place, scratch).absolute()
        packed, told = open_pack(folder, opener, trust_method)
        with among_methods(folder):
            found = verify_comparison(folder, sample, scratch, display, packed, pages, packed=True)
        return found, told
    if (place / COMPARISON).is_file():
        return verify_comparison(place, sample, scratch, display, opener, pages, trust_method), []
    return Verified(runs=[repeat(RunFolder(place, trust_method), scratch, display, opener)], left=0), []


@contextmanager
def among_methods(folder: Path) -> Iterator[None]:
    """Work where the paths of a pack's method files lead to them."""
    methods = folder / "methods"
    with chdir(methods if methods.is_dir() else folder):
        yield


def pages(summary: "Comparison") -> "Mapping[str, bytes]":
    """Return the files that show a comparison."""
    from fedvl.display import visible
    from fedvl.report.comparison_tables import tables_of
    from fedvl.report.page import curves_of, page_of, render

    return {**tables_of(summary), **curves_of(summary), "report.html": visible(render(*page_of(summary))).encode()}


def show(found: "Verified", told: list[str]) -> None:
    """Print the verdict of each run that differs, and what it was."""
    from fedvl.display import visible

    for sentence in told:
        print(visible(sentence))
    for line in (*found.summary, *(f"{run.run}: {each}" for run in found.runs for each in run.differences)):
        print(visible(str(line)))
    for elsewhere in dict.fromkeys(line for run in found.runs for line in run.elsewhere):
        print(visible(f"Another execution: {elsewhere}."))
    counts = {verdict: sum(run.verdict == verdict for run in found.runs) for verdict in VERDICTS}
    runs = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    left = f"; {found.left} runs were not executed" if found.left else ""
    summary = "The summary does not follow from the runs. " if found.summary else ""
    print(f"{summary}Executed again: {runs}{left}.")
    print(f"Verdict: {found.verdict}.")


VERDICTS = ("same bits", "within rounding", "different")


def pack(
    folder: Annotated[Path, typer.Argument(help="A comparison that fedvl compare wrote.")],
    out: Annotated[Path, typer.Option(help="A .zip file, or a folder.")],
) -> None:
    """Bundle a comparison with features instead of images, so that others can execute it again."""
    from fedvl.comparisons.pack import pack as write_pack
    from fedvl.data.sources import Opener

    sha256 = write_pack(folder, out, Opener.once())
    print(f"{out}: {sha256}", "Features tell much of an image: send them to those alone who may have them.", sep="\n")


def leaderboard(
    packs: Annotated[list[Path], typer.Argument(help="Packs, as folders or .zip files.")],
    out: Annotated[Path, typer.Option(help="Folder of the page, CSV and JSON.")] = Path("leaderboard"),
    sample: Sample = None,
    trust_method: TrustMethod = False,
    quiet: Quiet = False,
) -> None:
    """Verify packs, and write a table of those that pass; the others are listed with the reason."""
    from fedvl.comparisons.pack import PACK, pack_folder
    from fedvl.comparisons.verification import read_comparison
    from fedvl.display import GridDisplay, TerminalDisplay, visible
    from fedvl.files import file_sha256
    from fedvl.report.leaderboard import Entry, Rejected, data_of, leaderboard_of, write_leaderboard

    entries, rejected = list[Entry](), list[Rejected]()
    for place in packs:
        with tempfile.TemporaryDirectory() as scratch, TerminalDisplay(quiet) as display:
            try:
                found, told = verified(place, sample, trust_method, Path(scratch), GridDisplay(display))
                folder = pack_folder(place, Path(scratch) / "read")
                summary, sha256 = read_comparison(folder), file_sha256(folder / PACK)
            except (FedVLError, OSError) as error:
                rejected.append(Rejected(pack=place.name, reason=str(error)))
                continue
        if found.verdict == "different":
            reasons = [*found.summary, *(each for run in found.runs for each in run.differences)]
            rejected.append(Rejected(pack=place.name, reason=str(reasons[0])))
            continue
        entries += [
            Entry(
                **cell.model_dump(include={"row", "column", "measure", "mean", "deviation", "n", "images"}),
                data=data_of(summary),
                verdict=found.verdict,
                executed=len(found.runs),
                of=len(found.runs) + found.left,
                checked=all("this package" in sentence for sentence in told),
                pack=place.name,
                sha256=sha256,
            )
            for cell in summary.cells
        ]
    path = write_leaderboard(leaderboard_of(entries, rejected), out)
    for one in rejected:
        print(visible(f"Rejected: {one.pack}: {one.reason}"))
    print(f"Written: {path}")
    if not entries:
        raise typer.Exit(1)
