"""Docstrings of the source: short lines, so that a reader takes them in at a glance."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "fedvl"
WIDTH = 100
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def long_lines(text: str) -> list[int]:
    """The numbers of docstring lines that are too long."""
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            found += [number for number in range(first, last + 1) if len(lines[number - 1]) > WIDTH]
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_no_line_of_a_docstring_is_longer_than_a_hundred_columns(path):
    assert long_lines(path.read_text(encoding="utf-8")) == []


def test_a_long_line_is_found():
    assert long_lines(f'"""Short."""\n\ndef f():\n    """{"x" * 100}"""\n') == [4]
