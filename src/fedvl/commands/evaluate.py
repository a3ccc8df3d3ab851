"""fedvl evaluate: clinical figures of a finished run, at its sites or on labelled images here."""

from pathlib import Path
from typing import Annotated

import typer

from fedvl.commands.run import Json, Quiet, Trust
from fedvl.errors import FedVLError

EXAMPLES = """
Examples:

Between machines: the clients run with --stay, or are started again.

  fedvl evaluate clinic runs/clinic

On this machine, on images that were not there when the run was made:

  fedvl evaluate runs/linear --dataset labelled/

The models of two runs on the same images, here or at the sites:

  fedvl evaluate runs/linear --against runs/zero-shot
  fedvl evaluate clinic runs/clinic --against runs/clinic-before
"""


def evaluate(
    words: Annotated[
        list[Path], typer.Argument(metavar="[FEDERATION] RUN", help="Folder of a finished run, after its federation's.")
    ],
    dataset: Annotated[
        str | None, typer.Option(help="Labelled images on this machine: folder, parquet file, manifest or name.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another finished run, to compare both models on the same images.")
    ] = None,
    number: Annotated[
        int, typer.Option(min=1, help="Which evaluation of the run by its sites; their policies limit how many.")
    ] = 1,
    epsilon: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Let the sites add noise to their counts that hides each image, at most of this epsilon."
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="The delta of --epsilon.")] = 1e-5,
    out: Annotated[Path | None, typer.Option(help="The page; evaluation.html in the run's folder if absent.")] = None,
    trust_method: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a finished run on labelled images; between machines, each site counts its own."""
    from fedvl.display import TerminalDisplay
    from fedvl.report.evaluation_page import evaluation_lines, write_evaluation_page
    from fedvl.runs.evaluation import evaluate_run, write_evaluation
    from fedvl.runs.folder import RunFolder

    if len(words) > 2:
        raise FedVLError("Give a run, after its federation's folder: fedvl evaluate FEDERATION RUN.")
    folder = RunFolder(words[-1], trust_method)
    other = None if against is None else RunFolder.open(against, trust_method)
    if folder.federation is None or dataset is not None:
        if epsilon is not None:
            raise FedVLError("--epsilon is for counts that leave sites; leave it out on one machine.")
        if len(words) == 2:
            raise FedVLError("A federation's folder is for runs between machines, without --dataset; leave it out.")
        folder = RunFolder.open(words[-1], trust_method)
        with TerminalDisplay(quiet) as display:
            found = evaluate_run(folder, dataset, display, other)
    else:
        from fedvl.commands.federation import end_on_termination
        from fedvl.deployment.evaluation import evaluate_sites

        if len(words) == 2 and Path(folder.federation.federation).resolve() != words[0].resolve():
            raise FedVLError(f"The run in {words[1]} is of another federation: {folder.federation.federation}.")
        end_on_termination()
        with folder.lock(), TerminalDisplay(quiet) as display:
            found = evaluate_sites(folder, number, display, other, None if epsilon is None else (epsilon, delta))
    write_evaluation(folder, found)
    page = write_evaluation_page(found, out or folder.path / "evaluation.html")
    if as_json:
        print(found.model_dump_json())
        return
    for line in evaluation_lines(found):
        print(line)
    print(f"The page: {page}")
