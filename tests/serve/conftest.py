from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from finished import RUNS, finish, serving

from fedvl.serve.app import make_app
from fedvl.serve.model import FinishedRun


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished run: "fed-mp" answers anything, "linear" has fixed classes, "fedpp" personal models."""
    root = tmp_path_factory.mktemp("runs")

    @cache
    def make(name: str) -> Path:
        finish(root / name, RUNS[name])
        return root / name

    return make


@pytest.fixture(scope="session")
def fed_mp(folder_of: Callable[[str], Path]) -> FinishedRun:
    return FinishedRun(folder_of("fed-mp"))


@pytest.fixture(scope="session")
def address(fed_mp: FinishedRun):
    with serving(make_app(fed_mp)) as url:
        yield url
