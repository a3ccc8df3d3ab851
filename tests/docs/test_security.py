"""The threat model: every line names a test that exists, and its counts of hostile cases are those that pytest finds."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = "tests/reliability"
LEAST = {"server": 60, "client": 40, "network": 30, "page": 60, "folder": 60}
PAGES = ("security.md", "privacy.md", "network.md", "compliance.md")


@pytest.fixture(scope="module")
def found():
    files = [f"{FOLDER}/test_hostile_{attacker}.py" for attacker in LEAST]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"/test_hostile_(\w+)\.py::", listed))


def page_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@cache
def functions_of(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def rows_with_tests(page):
    """The rows of all tables whose last column is called "test"."""
    rows: list[str] = []
    inside = False
    for line in page.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.rstrip("| ").endswith("| test"):
            inside = True
        elif inside and not set(line) <= set("|- "):
            rows.append(line)
    return rows


def test_the_page_counts_the_hostile_cases(found):
    told = {
        name: int(count) for name, count in re.findall(r"/test_hostile_(\w+)\.py` \| (\d+) \|", page_of("security.md"))
    }
    assert told == dict(found)


@pytest.mark.parametrize("attacker", LEAST)
def test_there_are_enough_of_each(attacker, found):
    assert found[attacker] >= LEAST[attacker]


@pytest.mark.parametrize("name", PAGES)
def test_every_promise_has_a_test(name):
    rows = rows_with_tests(page_of(name))
    assert len(rows) >= {"security.md": 35, "privacy.md": 5, "network.md": 6, "compliance.md": 20}[name]
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row.split("|")[-2])
        assert named, f"no test in: {row}"
        for path, test in named:
            assert (ROOT / path).is_file(), path
            assert not test or test in functions_of(path), f"{path} has no {test}"
