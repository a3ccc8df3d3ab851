"""The command line, called in a folder of its own."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedvl.cli import app


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> Result:
        monkeypatch.setattr("sys.argv", ["fedvl", *words])
        return CliRunner().invoke(app, words)

    return run
