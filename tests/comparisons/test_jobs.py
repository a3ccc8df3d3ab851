"""Runs of a grid side by side: the same results, whoever runs them."""

import os
import shutil
import subprocess
from typing import Any

import pytest
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.comparisons import jobs
from fedvl.comparisons.jobs import resuming, run_side_by_side, unfinished, with_share_of_cores, write_slurm_array
from fedvl.comparisons.run import flags_grid, perform_grid
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay, TerminalDisplay
from fedvl.errors import FedVLError

SMALL: dict[str, dict[str, Any]] = {
    "data": {"clients": 2, "shots": 4, "partition": "iid"},
    "federation": {"rounds": 2, "threads": 1},
}


def test_each_of_four_runs_at_once_gets_a_quarter_of_the_cores(monkeypatch):
    monkeypatch.setattr(jobs, "usable_cores", lambda: 10)
    plain = {key: value for key, value in SMALL.items() if key != "federation"}
    threads = [
        case.settings["federation"]["threads"]
        for case in with_share_of_cores(flags_grid(["linear", "fedprox"], [], [], 1, plain), 4).cases()
    ]
    assert threads == [2, 2]
    alone = with_share_of_cores(flags_grid(["linear"], [], [], 1, plain), 20)
    assert [case.settings["federation"]["threads"] for case in alone.cases()] == [1]
    said = flags_grid(["linear"], [], [], 1, {"federation": {"threads": 7}})
    assert with_share_of_cores(said, 4) == said


@pytest.mark.slow
def test_runs_of_an_array_and_of_two_jobs_are_those_of_one_process_after_another(tmp_path):
    grid, opener = flags_grid(["linear", "fedprox", "zero-shot"], [], [], 1, SMALL), Opener.once()
    folders = unfinished(grid, tmp_path / "jobs")
    assert len(folders) == 3
    script = tmp_path / "array.sh"
    write_slurm_array(folders, script)
    assert "#SBATCH --array=0-2" in script.read_text()
    subprocess.run(["bash", script], check=True, env={**os.environ, "SLURM_ARRAY_TASK_ID": "1"})
    left = unfinished(grid, tmp_path / "jobs")
    assert [folder.path for folder in left] == [folders[0].path, folders[2].path]
    with TerminalDisplay(quiet=True) as display:
        run_side_by_side(left, 2, GridDisplay(display))
        assert unfinished(grid, tmp_path / "jobs") == []
        side_by_side = perform_grid(grid, tmp_path / "jobs", GridDisplay(display), opener)
        one_by_one = perform_grid(grid, tmp_path / "alone", GridDisplay(display), opener)
    assert side_by_side.failures == one_by_one.failures == []
    assert side_by_side.figures == one_by_one.figures
    assert side_by_side.tests == one_by_one.tests


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
    with TerminalDisplay(quiet=True) as display, pytest.raises(FedVLError, match="is a link"):
        run_side_by_side([folder], 2, GridDisplay(display))
    assert (tmp_path / "victim").read_text() == "precious"
    shutil.move(folder.path, tmp_path / "elsewhere")
    folder.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedVLError, match="is a link"):
        unfinished(grid, tmp_path / "runs")
