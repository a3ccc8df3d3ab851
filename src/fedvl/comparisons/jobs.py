"""Runs of a grid side by side: in worker processes of this machine, or as a Slurm array.

Each run is described in its folder and brought to its end in there; afterwards the grid finds it
finished. A run that fails is tried once more with the grid, which says why. Workers and jobs get
the SHA-256 of the settings that were asked for, and of the method's file through them: no other
code of the folder runs.

A worker imports torch and opens datasets once for all of its runs. It reads folders from its
standard input, and ends when that closes: also when this process is killed.
"""

import json
import os
import queue
import select
import shlex
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch

from fedvl.comparisons.grid import Grid
from fedvl.comparisons.run import GridOutcome, asked_sha256, folder_of, perform_grid, write_settings
from fedvl.comparisons.tuning import perform_tuned
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay, Silent
from fedvl.errors import FedVLError
from fedvl.files import write_whole
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder

FINISHED = b"finished\n"


def unfinished(grid: Grid, runs: Path) -> list[RunFolder]:
    """Describe the runs of a grid in their folders; return those that are not finished."""
    found: dict[Path, RunFolder] = {}  # cells may share a run
    for case in grid.cases():
        folder = folder_of(case, runs)
        if not folder.exists:
            with folder.lock(waits=Silent().waiting):
                write_settings(folder)
        if not write_settings(folder).finished:
            found[folder.path] = folder
    return list(found.values())


class RunWorker:
    """A process that brings runs to their end, one after another."""

    def __init__(self, number: int) -> None:
        gpus = torch.cuda.device_count()
        chosen = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus > 1 else {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedvl.comparisons.jobs"],
            bufsize=0,
            env={**os.environ, **chosen},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.folder: RunFolder | None = None  # at work

    def begin(self, folder: RunFolder) -> None:
        folder.file("job.log")  # refuses a link
        self.folder = folder
        with suppress(BrokenPipeError):  # the process was killed, so that its answer is empty
            self.requests.write(json.dumps([str(folder.path.absolute()), asked_sha256(folder)]).encode() + b"\n")

    def end(self) -> None:
        """End the process, also in the middle of a run, whose committed rounds are kept."""
        self.requests.close()
        self.process.wait()
        self.answers.close()


class Workers:
    """At most so many workers, which are started when they are needed and end with the block."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.workers: list[RunWorker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self.workers:
            worker.end()

    def run(self, folders: Sequence[RunFolder], display: GridDisplay) -> None:
        """Run folders to their end, several at once, on the GPUs of this machine in turn."""
        waiting, done = list(reversed(folders)), 0
        while len(self.workers) < min(self.jobs, len(folders)):
            self.workers.append(RunWorker(len(self.workers)))
        while waiting or any(worker.folder for worker in self.workers):
            for worker in self.workers:
                if worker.folder is None and waiting:
                    worker.begin(waiting.pop())
            busy = {worker.answers: worker for worker in self.workers if worker.folder}
            for answers in select.select(list(busy), [], [])[0]:
                worker, answer = busy[answers], answers.readline()
                folder, worker.folder, done = worker.folder, None, done + 1
                assert folder is not None
                display.begin(folder.path.name, done - 1, len(folders))
                told = "finished" if answer == FINISHED else f"failed, see {folder.file('job.log')}"
                display.end(told, done, len(folders))
                if not answer:  # the process was killed
                    worker.end()
                    place = self.workers.index(worker)
                    self.workers[place] = RunWorker(place)


def perform_side_by_side(grid: Grid, runs: Path, jobs: int, display: GridDisplay, opener: Opener) -> GridOutcome:
    """Perform a grid, several runs at once if asked to; first what its tuned cells try."""
    with Workers(jobs) as workers:

        def perform(part: Grid) -> GridOutcome:
            if jobs > 1:
                workers.run(unfinished(part, runs), display)
            return perform_grid(part, runs, display, opener)

        return perform_tuned(grid, perform)


def work() -> None:
    """Bring runs to their end that standard input names, until it closes."""
    requests: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    asked, answers, nothing = os.fdopen(os.dup(0), "rb"), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a method's file may read from it

    def listen() -> None:
        for line in asked:
            requests.put(json.loads(line))
        os._exit(0)  # nobody waits for the run at work; its committed rounds are kept

    threading.Thread(target=listen, daemon=True).start()
    opener = Opener.once()
    while True:
        path, sha256 = requests.get()
        os.write(
            answers, FINISHED if brought_to_end(RunFolder(Path(path), trust_method=True), sha256, opener) else b"\n"
        )


def brought_to_end(folder: RunFolder, sha256: str, opener: Opener) -> bool:
    """Return whether a run could be finished; what it prints is in its job.log."""
    with open(folder.file("job.log"), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        with folder.lock(waits=print):
            if folder.settings_sha256 != sha256:
                raise FedVLError(f"{folder.path / 'config.toml'} was changed; delete {folder.path}.")
            complete(folder, Silent(), opener)
    except FedVLError as error:
        print(f"Error: {error}", flush=True)
    except Exception:  # the next run may fare better, as it would in a process of its own
        traceback.print_exc()
    else:
        return True
    return False


def resuming(folder: RunFolder) -> list[str]:
    return ["resume", str(folder.path.absolute()), "--quiet", "--settings-sha256", asked_sha256(folder)]


def write_slurm_array(folders: list[RunFolder], script: Path) -> None:
    """Write a job script whose tasks each bring one run to its end."""
    lines = [shlex.join([sys.executable, "-m", "fedvl", *resuming(folder)]) for folder in folders]
    tasks = "\n".join(f"  {shlex.quote(line)}" for line in lines)
    text = f"""#!/bin/bash
#SBATCH --job-name=fedvl
#SBATCH --array=0-{len(folders) - 1}
#SBATCH --output=fedvl-%a.log
runs=(
{tasks}
)
eval "${{runs[$SLURM_ARRAY_TASK_ID]}}"
"""
    write_whole(script, text.encode())


if __name__ == "__main__":
    work()
