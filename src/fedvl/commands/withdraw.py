"""fedvl withdraw: a run without one of its clients, and the difference that makes."""

from pathlib import Path
from typing import Annotated

import typer

from fedvl.commands.run import Json, Quiet, Trust, complete_run
from fedvl.errors import FedVLError

EXAMPLES = """
Examples:

Simulated clients: run again without client 3.

  fedvl withdraw runs/linear-cifar10-mini 3

Between machines: measure against the run of the others.

  fedvl withdraw runs/clinic hospital-b --against runs/rest
"""


def withdraw(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    client: Annotated[str, typer.Argument(help="Number of the client, from 0, or name of the party.")],
    against: Annotated[
        Path | None, typer.Option(help="A finished run of the same settings without the client, if there is one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the new run; RUN-without-CLIENT by default.")] = None,
    trust_method: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take a client out of a finished run, and measure what that changes.

    A training-free method, such as ridge, subtracts the client's sums; others are run again.
    """
    from fedvl.display import TerminalDisplay
    from fedvl.report.ending import withdrawal_sentences
    from fedvl.report.page import write_report
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.update import by_sums, subtracted
    from fedvl.runs.withdrawal import check_comparable, find_client, measure_withdrawal, without_client

    folder = RunFolder(run, trust_method)
    folder.tensors()  # refuses one that is not finished, or damaged
    number, party = find_client(folder, client)
    if against is None and folder.federation is not None:
        federation = folder.federation.federation
        raise FedVLError(
            f"The other parties' images are on their own machines: revoke it (fedvl federation revoke {federation} {client}), run "
            f"fedvl server {federation} --out NEW with the others, then say fedvl withdraw {run} {client} --against NEW."
        )
    if against is not None:
        other = RunFolder(against, trust_method)
        other.tensors()
        check_comparable(folder, other, number)
    else:
        experiment = without_client(folder.experiment, number)
        path = out or run.with_name(f"{run.resolve().name}-without-{number}")
        with RunFolder.create(path, experiment) as other:
            complete_run(other, quiet, known=subtracted(folder, number) if by_sums(experiment) else None)
    with TerminalDisplay(quiet) as display:
        measured = measure_withdrawal(folder, other, number, party, display)
    for each in (folder, other):
        write_report(each.path)
    if as_json:
        print(measured.to_json())
    else:
        for sentence in (*withdrawal_sentences(measured), f"The run without it is in {other.path}."):
            typer.echo(sentence)
