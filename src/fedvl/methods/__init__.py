"""The methods. A method's name is its file's name with hyphens; nothing registers it anywhere else."""

import ast
import difflib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from fedvl.methods.base import Method

FOLDER = Path(__file__).parent
PARTS = {"__init__", "base", "show"}  # files here that are not methods


def method_names() -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.py") if path.stem not in PARTS)


def method_summaries() -> dict[str, str]:
    """The first line of each method's docstring, read without importing anything."""
    summaries = {}
    for name in method_names():
        source = (FOLDER / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
        summaries[name] = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
    return summaries


def load_method(name: str) -> "type[Method]":
    names = method_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(names)}."
        raise FedVLError(f"There is no method '{name}'; {hint}")
    module = importlib.import_module(f"fedvl.methods.{name.replace('-', '_')}")
    from fedvl.methods.base import Method

    (found,) = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Method) and item.__module__ == module.__name__
    ]
    return found
