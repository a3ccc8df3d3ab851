"""Print the methods, and one method's options and presets, in the terminal."""

import sys

from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from fedvl.config import field_help, toml_value
from fedvl.display import Console
from fedvl.methods import load_method, method_summaries


def list_methods() -> None:
    table = Table("method", "what it does", box=None, pad_edge=False)
    for name, summary in method_summaries().items():
        table.add_row(name, summary)
    console = Console()
    console.print(table)
    console.print("\nOptions of one: fedvl methods NAME")


def show_method(name: str) -> None:
    method = load_method(name)
    console = Console()
    console.print(Markdown((sys.modules[method.__module__].__doc__ or "").replace("``", "`")))
    table = Table("option", "default", "what it is", box=None, pad_edge=False)
    for key, field in method.options_type.model_fields.items():
        table.add_row(f"method.{key}", toml_value(field.default), field_help(field))
    if table.row_count:
        console.print()
        console.print(table)
    for preset, changes in method.presets.items():
        settings = [
            f"{section}.{key}={toml_value(value)}" for section, part in changes.items() for key, value in part.items()
        ]
        console.print(Text.assemble("\npreset ", (preset, "bold"), f": {'  '.join(settings) or 'the defaults'}"))
