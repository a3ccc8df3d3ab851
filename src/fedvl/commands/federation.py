"""fedvl federation, server, client and status: a federation between real machines."""

import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedvl.commands.run import Assignments, Json, MethodFlag, ModelFlag, Out, Quiet, RoundsFlag, SeedFlag, finish
from fedvl.errors import FedVLError

INIT_EXAMPLES = """
Examples:

  fedvl federation init clinic --clients hospital-a,hospital-b,hospital-c --method fst-cbdg

  fedvl federation init clinic --clients a,b --host fed.example.org --dataset skin/ experiment.toml

Then hand clinic/parties/NAME to each party (over a channel that you trust: it holds that party's key), and start

  fedvl server clinic                                on the server

  fedvl client hospital-a --data IMAGES              on each party's machine
"""

federation_app = typer.Typer(no_args_is_help=True, help="A federation between real machines: make its folders.")


@federation_app.callback()
def federation_options() -> None:
    """Keep ``init`` a subcommand: typer merges an only command into its app."""


@federation_app.command("init", epilog=INIT_EXAMPLES)
def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    experiment: Annotated[Path | None, typer.Argument(help="TOML file of settings; flags win over it.")] = None,
    clients: Annotated[str, typer.Option(help="Names of the parties, comma-separated.")] = "",
    host: Annotated[str, typer.Option(help="Name or address under which clients reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the server.", min=1, max=65535)] = 9443,
    method: MethodFlag = None,
    dataset: Annotated[str | None, typer.Option(help="Dataset of the classes and of the server's test images.")] = None,
    model: ModelFlag = None,
    rounds: RoundsFlag = None,
    seed: SeedFlag = None,
    settings: Assignments = None,
) -> None:
    """Make certificates, keys, the experiment, and a folder to hand to each party."""
    from fedvl.config import gather_settings
    from fedvl.deployment.files import create, resolve_for_parties

    names = [name.strip() for name in clients.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or not all(re.fullmatch(r"[\w.-]+", name) for name in names):
        raise FedVLError(
            "--clients takes different names of letters, digits, - and _, for example hospital-a,hospital-b."
        )
    if folder.exists():
        raise FedVLError(f"{folder} exists already; choose another folder.")
    flags = {"method": method, "dataset": dataset, "model": model, "rounds": rounds, "seed": seed}
    given = gather_settings(experiment, flags, settings or [])
    create(folder, names, host, port, resolve_for_parties(given, len(names)))
    print(f"{folder} is the server's. Hand each party its folder, over a channel that you trust (it holds a key):")
    for name in names:
        print(f"  {folder / 'parties' / name}")
    print(f"Then: fedvl server {folder}, and on each machine: fedvl client {names[0]} --data IMAGES")


def server(
    folder: Annotated[Path, typer.Argument(help="Folder that fedvl federation init made.")],
    experiment: Annotated[str | None, typer.Option(help="Which of its experiments, if there are several.")] = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment with clients on other machines; after a crash, use fedvl resume."""
    from fedvl.config import read_toml
    from fedvl.deployment.files import choose_experiment
    from fedvl.deployment.server import describe_federation
    from fedvl.run_folder import RunFolder
    from fedvl.settings import resolve_experiment

    end_on_termination()
    resolved = resolve_experiment(read_toml(choose_experiment(folder, experiment)))
    with RunFolder.create(out, resolved, describe_federation(folder)) as run_folder:
        print(f"Waiting for clients; follow the run with fedvl status {run_folder.path} --page", file=sys.stderr)
        finish(run_folder, as_json, quiet)


def client(
    folder: Annotated[Path, typer.Argument(help="The folder that this party was handed.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="This party's images: folder, parquet file, manifest or dataset name. Absent: a rehearsal with the "
            "experiment's dataset."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, and exit; no network.")] = False,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for further runs when one is over.")] = False,
    quiet: Quiet = False,
) -> None:
    """Take part in a federation with this machine's images; they never leave it."""
    from fedvl.deployment.client import Client
    from fedvl.display import TerminalDisplay
    from fedvl.report.status import print_dry_run

    end_on_termination()
    with TerminalDisplay(quiet) as display:
        found = Client(folder, data, display, partial(display.console.print, soft_wrap=True, highlight=False))
    if dry_run:
        for rehearsal in found.dry_run():
            print_dry_run(rehearsal)
        return
    if not quiet:
        print(f"{found.file.name}: images are ready; connecting to {found.file.server}.", file=sys.stderr)
    found.serve(stay)


def status(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    page: Annotated[bool, typer.Option("--page", help="Serve a page on this machine that follows the run.")] = False,
    port: Annotated[int, typer.Option(help="Port of the page; 0: any free one.")] = 0,
) -> None:
    """Show the state of a run: rounds, clients, bytes, refusals, accuracy so far."""
    from fedvl.report.status import print_status, serve_page

    if page:
        serve_page(folder, port)
    else:
        print_status(folder)


def end_on_termination() -> None:
    """Treat SIGTERM as Ctrl-C, so that everything that was started ends."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
