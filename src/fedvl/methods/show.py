"""Print the methods, and one method's options and presets, in the terminal."""

import inspect
import re
import sys
from typing import TYPE_CHECKING, Any, get_args

from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from fedvl.config import toml_value
from fedvl.display import Console
from fedvl.methods import load_method, method_summaries

if TYPE_CHECKING:
    from fedvl.methods.base import Options


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
        table.add_row(
            f"method.{key}", toml_value(field.default), describe_option(method.options_type, key, field.annotation)
        )
    if table.row_count:
        console.print()
        console.print(table)
    for preset, changes in method.presets.items():
        settings = [
            f"{section}.{key}={toml_value(value)}" for section, part in changes.items() for key, value in part.items()
        ]
        console.print(Text.assemble("\npreset ", (preset, "bold"), f": {'  '.join(settings) or 'the defaults'}"))


def describe_option(options: "type[Options]", key: str, annotation: Any) -> str:
    """Return an option's choices and the comment beside it in the source."""
    choices = [str(choice) for choice in get_args(annotation) if isinstance(choice, str)]
    comments = []
    for owner in options.__mro__:
        if key in vars(owner).get("__annotations__", {}):
            found = re.search(rf"^    {key}:.*?  # (.+)$", inspect.getsource(owner), re.MULTILINE)
            comments = [found[1]] if found else []
            break
    return "; ".join([*(["one of " + ", ".join(choices)] if choices else []), *comments])
