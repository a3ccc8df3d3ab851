"""Runs of a grid side by side: as processes of this machine, or as a Slurm array for a cluster.

Each run is described in its folder and brought to its end by ``fedvl resume``; afterwards the grid
finds them finished. A run that fails is tried once more with the grid, which says why. The command
carries the SHA-256 of the settings that were asked for, and of the method's file through them: no
other code of the folder runs.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

from fedvl.comparisons.grid import Grid, Variant
from fedvl.comparisons.run import asked_sha256, folder_of, write_settings
from fedvl.display import GridDisplay
from fedvl.files import write_whole
from fedvl.runs.folder import RunFolder
from fedvl.tensors import usable_cores

JOB_POLL_SECONDS = 0.2


def with_share_of_cores(grid: Grid, jobs: int) -> Grid:
    """Give each of so many runs at once its share of the cores, unless the grid says otherwise."""
    share = {"federation": {"threads": max(1, usable_cores() // jobs)}}
    given = [grid.base, grid.over, *(entry.settings for entry in (*grid.rows.values(), *grid.columns.values()))]
    said = any("threads" in settings.get("federation", {}) for settings in given)
    return grid if said else grid.under(Variant(settings=share))


def unfinished(grid: Grid, runs: Path) -> list[RunFolder]:
    """Describe the runs of a grid in their folders; return those that are not finished."""
    found: dict[Path, RunFolder] = {}  # cells may share a run
    for case in grid.cases():
        folder = folder_of(case, runs)
        with folder.lock():
            if not write_settings(folder).finished:
                found[folder.path] = folder
    return list(found.values())


def run_side_by_side(folders: list[RunFolder], jobs: int, display: GridDisplay) -> None:
    """Run folders to their end, so many at once, on the GPUs of this machine in turn."""
    waiting, running, done = list(enumerate(folders)), dict[RunFolder, subprocess.Popen[bytes]](), 0
    gpus = torch.cuda.device_count()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, folder = waiting.pop(0)
                environment = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus > 1 else {}
                with open(folder.file("job.log"), "wb") as log:
                    running[folder] = subprocess.Popen(
                        [sys.executable, "-m", "fedvl", *resuming(folder)],
                        env={**os.environ, **environment},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
            for folder in [folder for folder, process in running.items() if process.poll() is not None]:
                code, done = running.pop(folder).returncode, done + 1
                display.begin(folder.path.name, done - 1, len(folders))
                display.end("finished" if code == 0 else f"failed, see {folder.file('job.log')}", done, len(folders))
            time.sleep(JOB_POLL_SECONDS)
    finally:
        for process in running.values():  # committed rounds are kept: the same command goes on
            process.terminate()
        for process in running.values():
            process.wait()


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
