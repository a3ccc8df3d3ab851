"""fedvl run and fedvl resume: one experiment, from its settings to its report."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvl.commands.flags import with_flags
from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedvl.config import Experiment
    from fedvl.federation.processes import Processes
    from fedvl.federation.statistics import Statistics
    from fedvl.runs.contents import Result
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.preparation import Prepared

EXAMPLES = """
Examples:

  fedvl run                                             no data, no download

  fedvl run --method fedprox --partition dirichlet:0.1  a harder split

  fedvl run --dataset photos/ --clients 5               a sub-folder per class

  fedvl run --model openai/clip-vit-base-patch32        a download of 600 MB

  fedvl run experiment.toml --set training.learning_rate=0.1
"""

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress display.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as section.key=value; repeatable.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-method",
        help="Run the folder's own code (its method's file; read it), and download its model and dataset.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; runs/METHOD-DATASET by default.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", min=1, max=65535, help="Offer metrics for Prometheus on this port of this machine."),
]


LivePage = Annotated[bool, typer.Option("--page", help="Serve a page on this machine that follows the run.")]


@with_flags()
def run(
    experiment: Annotated[Path | None, typer.Argument(help="TOML file of settings; flags win over it.")] = None,
    out: Out = None,
    settings: Assignments = None,
    page: LivePage = False,
    as_json: Json = False,
    quiet: Quiet = False,
    **flags: Any,
) -> None:
    """Run one experiment and write its result, model and report."""
    from fedvl.config import gather_settings

    given = gather_settings(experiment, {**flags, "classes": read_names(flags["classes"])}, settings or [])
    from fedvl.runs.folder import RunFolder
    from fedvl.runs.settings import new_experiment

    resolved = new_experiment(given)
    with first_of_several(lambda: resolved) as processes:
        if processes is None or processes.rank == 0:
            with RunFolder.create(out, resolved) as folder:
                finish(folder, as_json, quiet, processes=processes, page=page)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that was interrupted.")],
    metrics: MetricsPort = None,
    page: LivePage = False,
    trust_method: Trust = False,
    settings_sha256: Annotated[
        str | None, typer.Option(help="Trust the run if its config.toml has this SHA-256; else refuse it.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Resume a run after a crash from its last committed round; the result is bit-identical."""
    from fedvl.runs.folder import RunFolder

    found = RunFolder(folder, trust_method or settings_sha256 is not None)
    if not found.exists:
        raise FedVLError(f"There is no run in {folder}; start one with fedvl run --out {folder}.")
    if settings_sha256 is not None and settings_sha256 != found.settings_sha256:
        raise FedVLError(f"{folder / 'config.toml'} does not have the SHA-256 {settings_sha256}; start the run again.")
    with first_of_several(lambda: found.experiment) as processes:
        if processes is None or processes.rank == 0:
            with found.lock():
                before = found.finished
                finish(found, as_json, quiet, metrics, processes, page)
                if before:
                    print(f"The run in {folder} was finished already.", file=sys.stderr)


@contextmanager
def first_of_several(experiment: "Callable[[], Experiment]") -> Iterator["Processes | None"]:
    """Yield the processes that torchrun started; those after the first help before it yields."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield None
        return
    from fedvl.federation.processes import join_processes
    from fedvl.runs.experiment import help_with

    processes = join_processes()
    if processes.rank:
        help_with(experiment(), processes)
        yield processes
        return
    yield processes
    processes.end()  # if this one fails instead, torchrun ends the others


def finish(
    folder: "RunFolder",
    as_json: bool,
    quiet: bool,
    metrics: int | None = None,
    processes: "Processes | None" = None,
    page: bool = False,
) -> None:
    """Complete a run and print its result."""
    result = complete_run(folder, quiet, metrics, processes, page=page)
    if as_json:
        print(result.to_json())
        return
    from rich.text import Text

    from fedvl.display import Console
    from fedvl.report.ending import ending
    from fedvl.report.evaluation_page import headline
    from fedvl.report.tables import result_table
    from fedvl.runs.evaluation import read_evaluation

    console = Console()
    console.print(result_table(result))
    for line in ending(result):
        console.print(Text(line), soft_wrap=True)
    if found := read_evaluation(folder):
        console.print(Text(headline(found)), soft_wrap=True)
    console.print(f"Report: {folder.path / 'report.html'}", soft_wrap=True, highlight=False)


def complete_run(
    folder: "RunFolder",
    quiet: bool,
    metrics: int | None = None,
    processes: "Processes | None" = None,
    known: "Callable[[Prepared], Statistics] | None" = None,
    page: bool = False,
) -> "Result":
    """Complete a run, with clients in this process or on other machines, and write its report."""
    from fedvl.display import TerminalDisplay
    from fedvl.report.evaluation_page import write_evaluation_page
    from fedvl.report.page import write_report
    from fedvl.runs.evaluation import read_evaluation

    with saying_how_to_go_on(folder), ExitStack() as stack:
        if metrics is not None:
            from fedvl.report.loopback import served
            from fedvl.report.metrics import metrics_server

            stack.enter_context(served(metrics_server(folder.path, metrics)))
        if page:
            from fedvl.report.loopback import served
            from fedvl.report.status import make_server

            server = stack.enter_context(served(make_server(folder.path, 0)))
            print(f"http://127.0.0.1:{server.server_port}/ follows the run until it ends.", file=sys.stderr)
        display = stack.enter_context(TerminalDisplay(quiet))
        if folder.federation is not None:
            from fedvl.deployment.server import complete_with_machines

            result = complete_with_machines(folder, display)
        else:
            from fedvl.runs.experiment import complete

            result = complete(folder, display, processes=processes, known=known)
        if not (folder.path / "report.html").is_file():
            write_report(folder.path)
        if (found := read_evaluation(folder)) and not (folder.path / "evaluation.html").is_file():
            write_evaluation_page(found, folder.path / "evaluation.html")
    return result


@contextmanager
def saying_how_to_go_on(folder: "RunFolder") -> Iterator[None]:
    """On Ctrl-C, say what is saved and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        rounds = len(list((folder.path / "journal").glob("*.json")))
        saved = f"saved after round {rounds}" if rounds else "no round is saved yet"
        print(f"Stopped; {saved}; go on with `fedvl resume {folder.path}`.", file=sys.stderr)
        raise typer.Exit(130) from None


def read_names(classes: str | None) -> list[str] | None:
    if classes is None:
        return None
    if not classes.startswith("@"):
        parts = classes.split(",")
    else:
        try:
            parts = Path(classes[1:]).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FedVLError(
                f"Cannot read class names from {classes[1:]}; give a text file with one per line."
            ) from error
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        raise FedVLError('--classes takes names such as "cat,dog", or @FILE with one per line.')
    return names
