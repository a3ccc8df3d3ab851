"""Print the methods, and one method's options and presets, in the terminal."""

import sys

from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from fedvl.config import field_help, toml_value
from fedvl.display import Console
from fedvl.methods import load_method, method_summaries, presets_of
from fedvl.methods.base import Method

LABEL_SENTENCES = {
    "one": "one label for each image",
    "candidates": "one or several candidate labels for each image",
    "none": "images without labels",
}
CLASSES = {
    "trained": "the classes of the run",
    "any": "any class, by its name",
    "clusters": "the classes of the run; images of new classes are sorted into clusters",
}


def list_methods() -> None:
    table = Table("method", "what it does", box=None, pad_edge=False)
    for name, summary in method_summaries().items():
        table.add_row(name, summary)
    console = Console()
    console.print(table)
    console.print("\nOptions of one: fedvl methods NAME")


def facts(method: type[Method]) -> dict[str, str]:
    """Return what a method trains on and what it can be queried about, by heading."""
    trained = method.start is not Method.start
    return {
        "Trains on": LABEL_SENTENCES[method.labels] if trained else "nothing",
        "Predicts": CLASSES[method.vocabulary],
    }


def show_method(name: str) -> None:
    method = load_method(name)
    console = Console()
    console.print(Markdown((sys.modules[method.__module__].__doc__ or "").replace("``", "`")))
    for heading, fact in facts(method).items():
        console.print(f"\n{heading} {fact}.")
    table = Table("option", "default", "what it is", box=None, pad_edge=False)
    for key, field in method.options_type.model_fields.items():
        table.add_row(f"method.{key}", toml_value(field.default), field_help(field))
    if table.row_count:
        console.print()
        console.print(table)
    for preset, changes in presets_of(name).items():
        settings = [
            f"{section}.{key}={toml_value(value)}" for section, part in changes.items() for key, value in part.items()
        ]
        console.print(Text.assemble("\npreset ", (preset, "bold"), f": {'  '.join(settings) or 'the defaults'}"))
