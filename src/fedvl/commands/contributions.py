"""fedvl contributions: what each client adds to the accuracy of a finished run."""

from pathlib import Path
from typing import Annotated

import typer

from fedvl.commands.run import Json, Quiet, Trust

EXAMPLES = """
Examples:

All coalitions of ten clients, from the sums of a closed-form run:

  fedvl contributions runs/ridge-cifar10-mini

A method that trains each coalition anew: 20 random orders of the clients:

  fedvl contributions runs/linear-cifar10-mini --orders 20
"""


def contributions(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    orders: Annotated[
        int | None,
        typer.Option(
            min=2, help="Random orders to draw; by default all coalitions of at most 12 clients, else 50 orders."
        ),
    ] = None,
    trust_method: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Divide the accuracy of a finished run among its clients: leave-one-out and Shapley values."""
    from fedvl.display import TerminalDisplay
    from fedvl.report.ending import contribution_lines, cost_warning
    from fedvl.report.federation import name_of
    from fedvl.report.page import write_report
    from fedvl.runs.contributions import plan_of, value_coalitions
    from fedvl.runs.folder import RunFolder

    folder = RunFolder(run, trust_method)
    folder.tensors()  # refuses one that is not finished, or damaged
    plan = plan_of(folder, orders)
    if not quiet and (warning := cost_warning(plan)):
        typer.echo(warning, err=True)
    with TerminalDisplay(quiet) as display:
        found = value_coalitions(folder, plan, display)
    folder.write_contributions(found)
    write_report(folder.path)
    if as_json:
        print(found.to_json())
    else:
        names = [name_of(folder.result, client) for client in found.players]
        typer.echo("\n".join(contribution_lines(found, names)))
