"""fedvl update: add images to a finished run, by their sums alone."""

from pathlib import Path
from typing import Annotated

import typer

from fedvl.commands.run import Json, Quiet, Trust, complete_run
from fedvl.errors import FedVLError

EXAMPLES = """
Examples:

Next month's images, as a new client:

  fedvl update runs/ridge-photos --dataset more/

Further images of client 3:

  fedvl update runs/ridge-photos --dataset more/ --client 3
"""


def update(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of a training-free method, such as ridge.")],
    dataset: Annotated[str, typer.Option(help="The images to add; names of classes that are new are added too.")],
    client: Annotated[int | None, typer.Option(min=0, help="Client that holds them; a new one by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the new run; RUN-updated by default.")] = None,
    trust_method: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Add images, a client or a class to a finished run; the result equals a run on all images."""
    from fedvl.report.page import write_report
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.update import added, by_sums, with_addition

    folder = RunFolder(run, trust_method)
    folder.tensors()  # refuses one that is not finished, or damaged
    if folder.federation is not None:
        raise FedVLError(
            "The images of a federation between machines are at its sites: add the new ones there, then run fedvl server "
            f"{folder.federation.federation} --out NEW; one exchange sums all images again."
        )
    if folder.experiment.privacy.unit != "none":
        raise FedVLError(
            "Noise hides the sums of this run, so that images cannot be added to them; run fedvl run on all images, and "
            "add up the budgets of both runs."
        )
    if not by_sums(folder.experiment):
        raise FedVLError(
            f"Method '{folder.experiment.method.name}' does not follow from sums, so that it must be trained "
            "again on all images; use ridge or gda, or add the images to the dataset and use fedvl run."
        )
    experiment = with_addition(folder.experiment, dataset, client)
    path = out or run.with_name(f"{run.resolve().name}-updated")
    with RunFolder.create(path, experiment) as new:
        complete_run(new, quiet, known=added(folder))
    write_report(new.path)
    before, after = folder.result.accuracy, new.result.accuracy
    if as_json:
        print(new.result.to_json())
    else:
        typer.echo(f"Accuracy {after:.2f} % after the update, {before:.2f} % before it. The new run is in {path}.")
