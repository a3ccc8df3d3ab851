"""Find and load methods; a method's name is that of its file, with hyphens."""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from fedvl.methods.base import Method

FOLDER = Path(__file__).parent
NOT_METHODS = {"__init__", "base", "mistakes", "roles", "show"}  # files here that are not methods


def method_names() -> list[str]:
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.py") if path.stem not in NOT_METHODS)


def method_summaries() -> dict[str, str]:
    """Return the first line of each method's docstring without importing it."""
    summaries = {}
    for name in method_names():
        source = (FOLDER / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
        summaries[name] = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0]
    return summaries


def load_method(name: str) -> "type[Method]":
    """Return a method of the package, or of the user's file (``./mine.py``), which is executed."""
    from fedvl.methods.base import Method

    module = load_file(Path(name)) if name.endswith(".py") else load_packaged(name)
    found = [
        item
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Method) and item.__module__ == module.__name__
    ]
    bases = {base for item in found for base in item.__bases__}
    found = [item for item in found if item not in bases]
    if len(found) != 1:
        raise FedVLError(
            f"{name} defines {len(found)} subclasses of fedvl.methods.base.Method, besides those that others derive from; it "
            "must define one."
        )
    return found[0]


def load_packaged(name: str) -> ModuleType:
    names = method_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(names)}."
        raise FedVLError(f"There is no method '{name}'; {hint}")
    return importlib.import_module(f"fedvl.methods.{name.replace('-', '_')}")


def load_file(path: Path) -> ModuleType:
    """Execute a file once per content."""
    name = f"fedvl_method_{path.stem}_{file_digest(path)[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it is, for a name that ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code does wrong
        del sys.modules[name]
        own = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        where = f" (line {own[-1].lineno}: `{own[-1].line}`)" if own else ""
        raise FedVLError(f"{path} cannot be loaded: {type(error).__name__}: {error}{where}.") from error
    return module


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a method's file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise FedVLError(f"There is no method file {path}; check the path.") from error
