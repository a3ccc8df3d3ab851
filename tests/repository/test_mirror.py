"""Tests mirror the sources: a module's own tests are at the same path under tests/."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE, TESTS = ROOT / "src" / "fedvl", ROOT / "tests"

# Modules that define a function or class and need no test file of their own, with the reason.
EXCEPTIONS = {
    "__init__.py": "its lazy names are tested with the functions that they load, in test_api.py",
    "comparisons/contents.py": "fields of comparison.json, read and refused in test_run.py",
    "errors.py": "one class without code",
    "evaluation/contents.py": "fields of result.json, read and refused in runs/test_result.py",
    "report/run_page.py": "the contents of the page that test_page.py reads",
    "runs/contents.py": "fields of result.json, read and refused in test_result.py",
}
MODULES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def has_code(source: str) -> bool:
    """Whether a module defines a function or a class; constants and imports are no code."""
    return any(isinstance(each, ast.FunctionDef | ast.ClassDef) for each in ast.parse(source).body)


def mirror_of(module: Path) -> Path:
    """The test file of a module; that of a package's ``__init__.py`` is named after the package."""
    path = module.parent if module.stem == "__init__" and module.parent.name else module.with_suffix("")
    return path.with_name(f"test_{path.name}.py")


@pytest.mark.parametrize(
    "module, mirror",
    [
        ("files.py", "test_files.py"),
        ("methods/fed_mp.py", "methods/test_fed_mp.py"),
        ("methods/__init__.py", "test_methods.py"),
        ("report/charts/lines.py", "report/charts/test_lines.py"),
    ],
)
def test_a_mirror_has_the_path_of_its_module(module, mirror):
    assert mirror_of(Path(module)) == Path(mirror)


@pytest.mark.parametrize("source, code", [("X = 1", False), ("def f(): ...", True), ("class A: ...", True)])
def test_functions_and_classes_are_code(source, code):
    assert has_code(source) is code


def test_every_module_with_code_has_a_mirror():
    coded = [module for module in MODULES if has_code((SOURCE / module).read_text(encoding="utf-8"))]
    missing = [str(module) for module in coded if not (TESTS / mirror_of(module)).exists()]
    assert sorted(missing) == sorted(EXCEPTIONS), "write tests/PATH/test_NAME.py, and remove exceptions that have one"
