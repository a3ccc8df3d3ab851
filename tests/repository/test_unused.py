"""The package has no function, class or constant that only tests use, or nobody."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USERS = [path for folder in ("src", "tools", "benchmarks") for path in ROOT.joinpath(folder).rglob("*.py")]

# Called by a library, by users of the Python interface, or by a name that is put together.
CALLED_BY_OTHERS = {
    "attack",  # of each module of ATTACKS
    "setup_context", "_should_skip_dynamo",  # torch
    "do_GET", "do_POST", "log_message",  # http.server
    "send_400_response", "intercept",  # uvicorn, Flower
    "_repr_html_",  # notebooks
    "_reports", "_adopt", "_sum_statistics", "_sum_updates",  # audit/messages.py, by the engine's name
}  # fmt: skip

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts if ROOT / "src" in path.parents else path.parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def used_of_modules(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file imports, or reads of a module; the module is "" where a call returns it."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            yield "", node.attr


def names_read(tree: ast.AST) -> Iterator[str]:
    """Names and attributes that are read; and texts, of getattr or of an annotation."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from "".join(
                letter if letter.isidentifier() or letter.isdigit() else " " for letter in node.value
            ).split()


def defined(node: ast.stmt) -> list[str]:
    if isinstance(node, Definition):
        decorated = node.decorator_list and not isinstance(node, ast.ClassDef)
        return [] if decorated or node.name.startswith("__") else [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("__")]


def unused(trees: dict[str, ast.Module], package: str = "fedvl") -> list[str]:
    elsewhere = {pair for tree in trees.values() for pair in used_of_modules(tree)}
    attributes = {name for tree in trees.values() for name in names_read(tree)}
    found = []
    for module, tree in trees.items():
        if not module.startswith(package):
            continue
        read = [set(names_read(node)) for node in tree.body]
        counts = Counter(name for names in read for name in names)
        for node, own in zip(tree.body, read, strict=True):
            is_method = (
                isinstance(node, ast.ClassDef) and module.startswith(f"{package}.methods.") and "parts" not in module
            )
            for name in defined(node):
                used = (
                    counts[name] > (name in own) or (module, name) in elsewhere or ("", name) in elsewhere or is_method
                )
                found += [] if used else [f"{module}.{name}"]
            if isinstance(node, ast.ClassDef):
                parts = [part for part in node.body if isinstance(part, Definition) and not part.decorator_list]
                offered = module == f"{package}.api"  # its methods are for users
                names = [part.name for part in parts if not part.name.startswith("__") and not offered]
                found += [f"{module}.{node.name}.{name}" for name in names if name not in attributes]
    return [each for each in found if each.rpartition(".")[2] not in CALLED_BY_OTHERS]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in USERS}


def test_everything_is_used(trees):
    assert unused(trees) == []


def test_names_that_nobody_uses_are_found():
    code = """
LIMIT = 3
def helper(): return helper
def called(): return LIMIT
class Model:
    def read(self): return called()
    def collate(self): "Use `collate`."
"""
    others = "from fedvl.one import Model\nprint(Model().read(), other.helper)"
    trees = {"fedvl.one": ast.parse(code), "tools.two": ast.parse(others)}
    assert unused(trees) == ["fedvl.one.helper", "fedvl.one.Model.collate"]
    with_module = others + "\nfrom fedvl import one\none.helper(); one.Model().collate()"
    assert unused(trees | {"tools.two": ast.parse(with_module)}) == []
