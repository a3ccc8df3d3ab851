"""The page on attackers: its counts of hostile cases are those that pytest finds."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = "tests/reliability"
LEAST = {"server": 60, "client": 40, "network": 30, "page": 60, "folder": 60}


@pytest.fixture(scope="module")
def found():
    files = [f"{FOLDER}/test_hostile_{attacker}.py" for attacker in LEAST]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"/test_hostile_(\w+)\.py::", listed))


def test_the_page_counts_the_hostile_cases(found):
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    told = {name: int(count) for name, count in re.findall(r"/test_hostile_(\w+)\.py` \| (\d+) \|", page)}
    assert told == dict(found)


@pytest.mark.parametrize("attacker", LEAST)
def test_there_are_enough_of_each(attacker, found):
    assert found[attacker] >= LEAST[attacker]
