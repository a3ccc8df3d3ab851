"""Where tests are: a file for each module that has tests, a file for each method, and nothing of the benchmarks."""

import ast
from pathlib import Path

import pytest

from fedvl.methods import method_names

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "fedvl"
# Folders whose tests belong to no single module, and what they are of.
OTHERS = {
    "browser": "pages in a real browser",
    "docs": "what the documentation promises, and its examples",
    "end_to_end": "whole runs, from data to report or between processes",
    "repository": "workflows, templates, citation and changelog",
    "reliability": "faults: damage, kills, full disks, bad updates, races, nonsense",
    "tools": "tools/, which made what is embedded",
}
FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("*.py"))
TEST_FILES = [path for path in FILES if path.name.startswith("test_") and path.name != Path(__file__).name]


def source_of(path: Path) -> Path:
    """The module that a test file is of, without ".py": also a package may have a test file."""
    return SOURCE / path.parent / path.stem.removeprefix("test_")


def imported(path: Path) -> set[str]:
    """The full names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse((TESTS / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_every_test_file_is_of_a_module_or_in_a_folder_of_its_own_kind():
    strays = [
        str(path)
        for path in TEST_FILES
        if path.parts[0] not in OTHERS
        and not source_of(path).with_suffix(".py").is_file()
        and not (source_of(path) / "__init__.py").is_file()
    ]
    assert strays == [], f"src/fedvl has no such modules; other folders of tests are {', '.join(OTHERS)}"


@pytest.mark.parametrize("folder", OTHERS)
def test_a_folder_of_its_own_kind_says_what_it_is_and_is_no_package_of_the_source(folder):
    assert ast.get_docstring(ast.parse((TESTS / folder / "conftest.py").read_text(encoding="utf-8")))
    assert not (SOURCE / folder).exists()


def test_every_method_and_every_part_of_methods_has_its_test_file():
    methods = {name.replace("-", "_") for name in method_names()}
    parts = {path.stem for path in (SOURCE / "methods" / "parts").glob("*.py")} - {"__init__"}
    for folder, wanted in (("methods", methods), ("methods/parts", parts)):
        there = {path.stem.removeprefix("test_") for path in (TESTS / folder).glob("test_*.py")}
        assert sorted(wanted - there) == []


def test_no_test_imports_benchmarks():
    """They measure what tests are sure of; what both need is in tests/helpers."""
    users = [str(path) for path in FILES if any(name.split(".")[0] == "benchmarks" for name in imported(path))]
    assert users == []
    mentions = [str(path) for path in FILES if '"benchmarks.' in (TESTS / path).read_text(encoding="utf-8")]
    assert mentions == [Path(__file__).name], "nor are they run"


def test_what_tests_share_is_in_helpers_and_nothing_else_is():
    """A file that is no test is one of the helpers, or pytest's conftest.py."""
    others = [
        path for path in FILES if path not in TEST_FILES and path.name not in ("conftest.py", Path(__file__).name)
    ]
    assert {path.parts[0] for path in others} == {"helpers"}
