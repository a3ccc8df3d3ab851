"""What tests of several folders share as fixtures. What is heavy is imported when a test asks for it."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
import typer.main
import typer.testing
from helpers.made_up import make_result, save_run

from fedvl.models import checkpoint

if TYPE_CHECKING:
    from fedvl.serve.model import TrainedModel

# What is imported and collected stays: nothing is found by looking through it for garbage again and again.
gc.set_threshold(50_000, 20, 20)

# pytest rewrites the assertions of every test file and keeps the result in __pycache__. With PYTHONDONTWRITEBYTECODE it
# could not, and each process of each run would spend five seconds on it before its first test.
sys.dont_write_bytecode = False

# The embedded models are read once, and whoever loads one gets a copy: to read one takes six times as long.
read, shipped = checkpoint._embedded, checkpoint.EMBEDDED_FOLDER
kept = cache(read)
checkpoint._embedded = lambda name: deepcopy(kept(name)) if shipped == checkpoint.EMBEDDED_FOLDER else read(name)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Nothing here survives a power failure, and nobody waits for disks; tests of that have an os.fsync of their own.
os.fsync = lambda number: None  # type: ignore[assignment]

# Commands are read from their signatures once, not at each call of one: there are a thousand.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every process begin with its share of the long tests, file by file, so that all end at the same time.

    Each gets a piece of the list, of equal length, and takes from the end of another's piece when its own is done. Long
    tests at the head of the list alone would be one process's, and most of their time is waiting.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long: dict[Path, list[pytest.Item]] = {}
    short: list[pytest.Item] = []
    for item in items:
        (long.setdefault(item.path, []) if item.get_closest_marker("slow") else short).append(item)
    arranged: list[pytest.Item] = []
    rest = iter(short)
    for number in range(processes):
        length = (len(items) - len(arranged)) // (processes - number)  # of this piece, as xdist counts
        own = [item for file in list(long.values())[number::processes] for item in file]
        arranged += [*own, *islice(rest, max(length - len(own), 0))]
    items[:] = [*arranged, *rest]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Many tiny tensors: one thread is faster than two."""
    torch.set_num_threads(1)


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra that reads HEIC photos were not installed."""
    from fedvl.data import images, sources

    monkeypatch.setattr(images, "READS_HEIC", False)
    monkeypatch.setattr(images, "FORMATS", tuple(name for name in images.FORMATS if name != "HEIF"))
    for module in images, sources:
        monkeypatch.setattr(module, "EXTENSIONS", images.EXTENSIONS - images.HEIC)
        monkeypatch.setattr(module, "UNREAD", images.UNREAD | images.HEIC)


# --- made-up runs, for reports


@pytest.fixture
def sample() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return make_result()


@pytest.fixture
def sample_of() -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]:
    return make_result


@pytest.fixture
def save() -> Callable[[Path, dict[str, Any], list[dict[str, Any]]], Path]:
    return save_run


# --- finished runs, for whoever asks them


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished run: "fed-mp" answers anything, "linear" has fixed classes, "fedpp" personal models."""
    from helpers.finished import RUNS, finish

    root = tmp_path_factory.mktemp("runs")

    @cache
    def make(name: str) -> Path:
        finish(root / name, RUNS[name])
        return root / name

    return make


@pytest.fixture(scope="session")
def fed_mp(folder_of: Callable[[str], Path]) -> "TrainedModel":
    from fedvl.runs.folder import RunFolder
    from fedvl.serve.model import TrainedModel

    return TrainedModel(RunFolder(folder_of("fed-mp")))


@pytest.fixture(scope="session")
def address(fed_mp: "TrainedModel") -> Iterator[str]:
    """Of a service of "fed-mp"."""
    from helpers.finished import serving

    from fedvl.serve.app import make_app

    with serving(make_app(fed_mp)) as url:
        yield url
