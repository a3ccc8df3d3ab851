"""fedvl run and fedvl resume: one experiment, from its settings to its report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from fedvl.run_folder import RunFolder

EXAMPLES = """
Examples:

  fedvl run                                               embedded model and images, no download

  fedvl run --method fedprox --partition dirichlet:0.1    a harder split

  fedvl run --dataset photos/ --clients 5                 your own folder, one sub-folder a class

  fedvl run --model openai/clip-vit-base-patch32          a real CLIP, downloaded because you named it

  fedvl run experiment.toml --set training.learning_rate=0.1
"""

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress display.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="Any setting, as section.key=value; repeatable.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-method", help="Run the folder's own code (its method's file; read it), and download its model."
    ),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; runs/METHOD-DATASET by default.")]
MethodFlag = Annotated[str | None, typer.Option(help="What is trained and how; see fedvl methods.")]
ModelFlag = Annotated[str | None, typer.Option(help="Embedded model, folder, safetensors file or hub name.")]
RoundsFlag = Annotated[int | None, typer.Option(help="Rounds of training and merging.")]
SecureSumFlag = Annotated[
    bool, typer.Option("--secure-sum", help="The server learns sums over clients only, no single update.")
]
PrivacyFlag = Annotated[
    str | None, typer.Option(help="Differential privacy: client:eps=EPSILON or record:eps=EPSILON[,delta=,clip=].")
]
SeedFlag = Annotated[int | None, typer.Option(help="Seed of every random choice.")]


def run(
    experiment: Annotated[Path | None, typer.Argument(help="TOML file of settings; flags win over it.")] = None,
    method: MethodFlag = None,
    dataset: Annotated[
        str | None, typer.Option(help="Embedded set, catalogue name, folder, parquet file or manifest.")
    ] = None,
    model: ModelFlag = None,
    partition: Annotated[
        str | None, typer.Option(help="iid, dirichlet:ALPHA, shards:COUNT, quantity:FRACTION, disjoint or domains.")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Keep this many training images of each class.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients that hold the data.")] = None,
    per_round: Annotated[int | None, typer.Option(help="Clients that train in a round; all by default.")] = None,
    rounds: RoundsFlag = None,
    local_epochs: Annotated[int | None, typer.Option(help="Passes over a client's data in a round.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="What is tested: closed (the trained classes), open (classes nobody trained on), personal (each "
            "client's own test images) or missing (samples without text or image)."
        ),
    ] = None,
    missing: Annotated[
        str | None, typer.Option(help="Missing modalities: text:RATE, image:RATE or both:RATE; see fed-prime.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="paper, or released where public code differs.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    seed: SeedFlag = None,
    dropout: Annotated[float | None, typer.Option(help="Chance that a chosen client does not answer.")] = None,
    secure_sum: SecureSumFlag = False,
    robust: Annotated[
        str | None,
        typer.Option(
            help="How updates are merged: mean, median, trimmed, multi-krum, geometric-median, centred-clipping, root."
        ),
    ] = None,
    attack: Annotated[
        str | None,
        typer.Option(
            help="Simulate hostile clients: sign-flip, label-flip, scaled, alie, ipm or backdoor, as KIND:SHARE."
        ),
    ] = None,
    privacy: PrivacyFlag = None,
    chunk: Annotated[int | None, typer.Option(help="Clients trained in one kernel.")] = None,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Train clients one at a time; same result, slower.")
    ] = False,
    out: Out = None,
    settings: Assignments = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment and write its result, model and report."""
    given_flags = {name: value for name, value in locals().items() if value is not False}
    from fedvl.config import FLAGS, gather_settings

    flags = {name: value for name, value in given_flags.items() if name in FLAGS}
    given = gather_settings(experiment, flags, settings or [])
    from fedvl.run_folder import RunFolder
    from fedvl.settings import resolve_experiment

    with RunFolder.create(out, resolve_experiment(given)) as folder:
        finish(folder, as_json, quiet)


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run that was interrupted.")],
    trust_method: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Resume a run after a crash from its last committed round; the result is bit-identical."""
    from fedvl.run_folder import RunFolder

    found = RunFolder(folder, trust_method)
    if not found.exists:
        raise FedVLError(f"There is no run in {folder}; start one with fedvl run --out {folder}.")
    with found.lock():
        finish(found, as_json, quiet)


def finish(folder: "RunFolder", as_json: bool, quiet: bool) -> None:
    """Complete a run, with clients in this process or on other machines, and print its result."""
    from fedvl.display import TerminalDisplay
    from fedvl.report.page import write_report

    with TerminalDisplay(quiet) as display:
        if folder.federation is not None:
            from fedvl.deployment.server import complete_with_machines

            result = complete_with_machines(folder, display)
        else:
            from fedvl.experiment import complete

            result = complete(folder, display)
        report = folder.path / "report.html"
        if not report.is_file():
            write_report(folder.path)
    if as_json:
        print(json.dumps(result))
        return
    from fedvl.display import Console
    from fedvl.report.tables import result_table

    console = Console()
    console.print(result_table(result))
    console.print(f"Report: {report}", soft_wrap=True, highlight=False)
