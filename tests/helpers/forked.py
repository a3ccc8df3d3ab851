"""The command line in a forked child: a process of its own to limit, break and kill, without the seconds that a new one takes."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch

from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.runs.result import tower_seconds

SMALL = ["--rounds", "4", "--clients", "3", "--shots", "2", "--partition", "iid", "--quiet", "--json"]
SMALL += ["--set", "federation.threads=1"]


class Ended(NamedTuple):
    code: int
    out: str
    error: str

    @property
    def result(self) -> dict:
        return json.loads(self.out)


@cache
def warm() -> None:
    """Load and measure here, once, what every child would load and measure for itself."""
    for name in (
        "fedvl.display",
        "fedvl.runs.experiment",
        "fedvl.federation.steps",
        "fedvl.report.page",
        "fedvl.report.tables",
    ):
        import_module(name)
    model = load_model("fedvl-tiny")
    assert isinstance(model, DualEncoder)
    tower_seconds(model, torch.device("cpu"))


class Child:
    """`fedvl ARGUMENTS` in a folder, after `prepare` has been called in the child."""

    def __init__(self, folder: Path, *arguments: object, prepare: Callable[[], object] = lambda: None) -> None:
        warm()
        self.streams = [folder / f".stream-{os.urandom(4).hex()}" for _ in range(2)]
        self.process = os.fork()
        if self.process:
            return
        try:
            os.chdir(folder)
            for path, number in zip(self.streams, (1, 2), strict=True):
                os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), number)
            # pytest has put its own in their places
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            sys.argv = ["fedvl", *map(str, arguments)]
            os.environ["FEDVL_CACHE"] = str(folder / "cache")
            torch.set_num_threads(1)
            torch.set_num_threads = lambda count: None  # type: ignore[assignment]  # threads are not there after a fork
            prepare()
            from fedvl.cli import main

            main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(int(end.code or 0))
        except BaseException:
            traceback.print_exc()
            os._exit(70)
        os._exit(0)

    def wait(self) -> Ended:
        _, status = os.waitpid(self.process, 0)
        out, error = (path.read_text() for path in self.streams)
        for path in self.streams:
            path.unlink()
        return Ended(os.waitstatus_to_exitcode(status), out, error)


def in_child(folder: Path, *arguments: object, prepare: Callable[[], object] = lambda: None) -> Ended:
    return Child(folder, *arguments, prepare=prepare).wait()
