"""fedvl report: write the page of a run again, or one page of several runs."""

from pathlib import Path
from typing import Annotated

import typer

from fedvl.commands.run import Trust
from fedvl.errors import FedVLError

EXAMPLES = """
Examples:

  fedvl report runs/linear-cifar10-mini                 its report.html again

  fedvl report runs/A runs/B runs/C --out compare.html  runs side by side

  fedvl report runs/linear-cifar10-mini --images        browse its test images

  fedvl report comparisons/comparison                   of compare or reproduce

  fedvl report hospital-a                               a party's newest run
"""


def report(
    folders: Annotated[list[Path], typer.Argument(help="A run, a comparison or a reproduced recipe; or several runs.")],
    out: Annotated[Path | None, typer.Option(help="The page of several runs; compare.html if absent.")] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Write a page with the run's test images, which stays with you.")
    ] = False,
    trust_method: Trust = False,
) -> None:
    """Write the page of a run again, or one page that compares several runs."""
    from fedvl.display import visible
    from fedvl.report.page import write_report, write_side_by_side
    from fedvl.runs.folder import RunFolder

    if len(folders) == 1 and out is not None:
        raise FedVLError("--out is for several runs; the page of one is report.html in its folder.")
    if images and len(folders) > 1:
        raise FedVLError("--images shows the test images of one run; name one.")
    if images:
        from fedvl.display import TerminalDisplay
        from fedvl.report.images_page import write_images_page

        with TerminalDisplay() as display:
            path = write_images_page(RunFolder.open(folders[0], trust_method), display)
        print(f"Test images: {path}")
    if len(folders) == 1:
        print(f"Report: {write_report(folders[0])}")
        return
    from fedvl.report.comparison_of_runs import paired_sentences

    path = write_side_by_side(folders, out or Path("compare.html"))
    for sentence in paired_sentences([RunFolder.open(folder) for folder in folders]):
        print(visible(sentence))
    print(f"Report: {path}")
