"""Runs of a grid side by side: the same results, whoever runs them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.comparisons.jobs import Workers, resuming, unfinished, write_slurm_array
from fedvl.comparisons.run import flags_grid, perform_grid
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay, SilentLine
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder

SMALL: dict[str, dict[str, Any]] = {
    "data": {"clients": 2, "shots": 4, "partition": "iid"},
    "federation": {"rounds": 2, "threads": 1},
}


@pytest.mark.slow
def test_runs_of_an_array_and_of_two_workers_have_the_bits_of_one_process(tmp_path):
    grid, opener = flags_grid(["linear", "fedprox", "zero-shot"], [], [], 2, SMALL), Opener.once()
    folders = unfinished(grid, tmp_path / "jobs")
    assert len(folders) == 6
    script = tmp_path / "array.sh"
    write_slurm_array(folders, script)
    assert "#SBATCH --array=0-5" in script.read_text()
    subprocess.run(["bash", script], check=True, env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"})
    left = unfinished(grid, tmp_path / "jobs")
    assert [folder.path for folder in left] == [folders[0].path, *(folder.path for folder in folders[2:])]
    display = GridDisplay(SilentLine())
    with Workers(2) as workers:
        left[0].file("config.toml").rename(tmp_path / "away")  # one of them fails, and the others do not
        workers.run(left, display)
        assert "FileNotFoundError" in left[0].file("job.log").read_text()
        (tmp_path / "away").rename(left[0].file("config.toml"))
        (first, second) = workers.workers
        first.process.kill()
        first.process.wait()
        workers.run(unfinished(grid, tmp_path / "jobs"), display)  # a worker that was killed is replaced
        assert workers.workers[1] is second
        workers.run(unfinished(grid, tmp_path / "jobs"), display)
    assert [worker.process.returncode for worker in workers.workers] == [0, 0]
    assert unfinished(grid, tmp_path / "jobs") == []
    side_by_side = perform_grid(grid, tmp_path / "jobs", display, opener)
    one_by_one = perform_grid(grid, tmp_path / "alone", display, opener)
    assert side_by_side.failures == one_by_one.failures == []
    assert side_by_side.figures == one_by_one.figures
    assert side_by_side.tests == one_by_one.tests
    for folder in folders:
        again = RunFolder(tmp_path / "alone" / folder.path.name)
        assert folder.result.state_sha256 == again.result.state_sha256
        assert folder.file("config.toml").read_bytes() == again.file("config.toml").read_bytes()


PARENT = """
import sys
from pathlib import Path
from fedvl.comparisons.jobs import RunWorker, Workers, unfinished
from fedvl.comparisons.run import flags_grid
from fedvl.display import GridDisplay, SilentLine

grid = flags_grid(["linear"], [], [], 1, {"federation": {"rounds": 100000}})
with Workers(1) as workers:
    workers.workers.append(RunWorker(0))
    print(workers.workers[0].process.pid, flush=True)
    workers.run(unfinished(grid, Path(sys.argv[1])), GridDisplay(SilentLine()))
"""


def test_workers_end_with_a_parent_that_is_killed_and_a_locked_run_is_waited_for(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    eventually(lambda: any(folder.file("metrics.jsonl").exists() for folder in map(RunFolder, tmp_path.iterdir())))
    (folder,) = map(RunFolder, tmp_path.iterdir())
    assert folder.at_work
    told = []

    def waits(text):
        told.append(text)
        parent.kill()

    with folder.lock(waits=waits):  # which its worker would hold for hours
        assert told == [f"waiting for process {worker}"]
        assert not Path(f"/proc/{worker}/exe").exists()
    assert parent.wait() == -signal.SIGKILL


def eventually(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- a comparison from a stranger

EVIL = "from pathlib import Path\n\nPath('ran').touch()\n"


def planted(grid, runs):
    """Return a half-finished run of a grid that its sender made to run a file of code."""
    (folder,) = unfinished(grid, runs)
    settings = folder.path / "config.toml"
    settings.write_text(settings.read_text().replace('name = "linear"', 'name = "evil.py"'))
    (folder.path / "evil.py").write_text(EVIL)
    return folder


@pytest.mark.parametrize("flags", [["--jobs", "2"], ["--slurm", "array.sh"]])
def test_a_comparison_from_a_stranger_runs_no_code_and_is_refused(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    grid = flags_grid(["linear"], [], [], 1, SMALL)
    folder = planted(grid, tmp_path / "out" / "runs")
    settings = [f"--set={section}.{key}={value}" for section, part in SMALL.items() for key, value in part.items()]
    words = ["compare", "--methods", "linear", "--seeds", "1", "--out", str(tmp_path / "out"), *settings, *flags]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, FedVLError), refused.output
    assert str(refused.exception) == (
        f"{folder.path / 'config.toml'} is not of the settings that this command asks for; delete {folder.path}, or choose "
        "another --out."
    )
    shutil.rmtree(folder.path)
    (folder.path / "journal").mkdir(parents=True)
    (folder.path / "federation.json").write_text('{"federation": "elsewhere", "run": "0"}')
    assert "is a run between machines" in str(CliRunner().invoke(app, words).exception)
    assert not (tmp_path / "array.sh").exists()
    assert not list(tmp_path.rglob("ran"))


def test_a_folder_that_changes_after_the_array_was_written_runs_no_code(tmp_path):
    grid = flags_grid(["linear"], [], [], 1, SMALL)
    write_slurm_array(unfinished(grid, tmp_path / "runs"), tmp_path / "array.sh")
    planted(grid, tmp_path / "runs")
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    ended = subprocess.run(["bash", "array.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: ")
    assert "config.toml does not have the SHA-256" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("ran"))


def test_a_method_is_trusted_by_its_hash_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "mine.py"
    own.write_text("from fedvl.methods.linear import Linear\n\n\nclass Mine(Linear):\n    pass\n")
    (folder,) = unfinished(flags_grid([str(own)], [], [], 1, SMALL), tmp_path / "runs")
    (folder.path / "mine.py").write_text(EVIL)
    refused = CliRunner().invoke(app, resuming(folder))
    assert "has changed since the run began" in str(refused.exception)
    assert not list(tmp_path.rglob("ran"))
    shutil.copyfile(own, folder.path / "mine.py")
    assert CliRunner().invoke(app, resuming(folder)).exit_code == 0


def test_a_log_or_folder_that_is_a_link_is_not_written(tmp_path):
    grid = flags_grid(["linear"], [], [], 1, SMALL)
    (folder,) = unfinished(grid, tmp_path / "runs")
    (tmp_path / "victim").write_text("precious")
    (folder.path / "job.log").symlink_to(tmp_path / "victim")
    with Workers(2) as workers, pytest.raises(FedVLError, match="is a link"):
        workers.run([folder], GridDisplay(SilentLine()))
    assert (tmp_path / "victim").read_text() == "precious"
    shutil.move(folder.path, tmp_path / "elsewhere")
    folder.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedVLError, match="is a link"):
        unfinished(grid, tmp_path / "runs")
