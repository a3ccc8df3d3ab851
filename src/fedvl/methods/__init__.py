"""Find and load methods; a method's name is that of its file, with hyphens."""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from copy import deepcopy
from itertools import starmap
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from fedvl.config import Settings, overlay, read_toml
from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from fedvl.methods.base import Method

FOLDER = Path(__file__).parent
CLASSES: dict[str, "type[Method]"] = {}  # given as Python classes in this process, as NAME@DIGEST
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

    if name in CLASSES:
        return CLASSES[name]
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


def presets_of(name: str) -> dict[str, Settings]:
    """Return a method's presets; those of the package have `embedded` too, for the embedded model.

    It is the preset `paper` with the changes in embedded.toml, which tools/presets.py chose.
    """
    presets = dict(load_method(name).presets)
    if name in method_names():
        tuned = deepcopy(presets["paper"])
        overlay(tuned, read_toml(FOLDER / "embedded.toml").get(name, {}))
        presets["embedded"] = tuned
    return presets


def register(method: "type[Method]") -> str:
    """Return the name by which this process loads a class: its own, and a digest of its code."""
    from fedvl.methods.base import Method

    if not issubclass(method, Method):
        raise FedVLError(f"{method.__name__} is not a subclass of fedvl.methods.base.Method; derive it from one.")
    if method.__module__.startswith(f"{__name__}."):
        return method.__module__.rpartition(".")[2].replace("_", "-")
    name = f"{method.__name__}@{code_digest(method)}"
    CLASSES[name] = method
    return name


def own_file(name: str) -> Path:
    """Return the file with the code of a method, also of a class that was given."""
    if name not in CLASSES:
        return Path(name) if name.endswith(".py") else FOLDER / f"{name.replace('-', '_')}.py"
    codes = (getattr(item, "__code__", None) for item in vars(CLASSES[name]).values())
    return Path(next((code.co_filename for code in codes if code), name))


def own_text(name: str) -> str:
    """Return the code of a method's file or class; "" if Python does not have it."""
    try:
        return inspect.getsource(CLASSES[name]) if name in CLASSES else own_file(name).read_text(encoding="utf-8")
    except (OSError, TypeError):  # typed at a prompt
        return ""


def code_digest(method: type) -> str:
    """Return a digest of the code and constants of a class and of those that it derives from."""
    own = [base for base in method.__mro__ if not base.__module__.startswith(("fedvl.", "builtins"))]
    described = [
        [base.__qualname__, *filter(None, starmap(described_item, sorted(vars(base).items())))] for base in own
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]


def described_item(name: str, item: Any) -> Any:
    """Return what a class holds as JSON, without addresses and places in files."""
    function = getattr(item, "fget", None) or getattr(item, "__func__", item)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return [name, described_code(code), repr(getattr(function, "__defaults__", None))]
    if name.startswith("_"):
        return None
    return [name, json.dumps(item, default=lambda value: type(value).__name__)]


def described_code(code: CodeType) -> Any:
    constants = [
        described_code(each)
        if isinstance(each, CodeType)
        else sorted(map(repr, each))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    return [code.co_code.hex(), code.co_names, code.co_varnames, constants]


def load_packaged(name: str) -> ModuleType:
    names = method_names()
    if "@" in name:
        own = name.partition("@")[0]
        raise FedVLError(
            f"The method {own} was given as a Python class, which this process does not know as it was then; give it again by "
            f"fedvl.resume(folder, method={own}) or fedvl.open_run(folder, method={own}), or write it to a file."
        )
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
