"""Runs of a grid side by side: the same results, whoever runs them."""

import os
import subprocess

import pytest

from fedvl.compare import jobs
from fedvl.compare.jobs import run_side_by_side, unfinished, with_share_of_cores, write_slurm_array
from fedvl.compare.run import flags_grid, perform_grid
from fedvl.data.opener import Opener
from fedvl.display import GridDisplay, TerminalDisplay

SMALL = {"data": {"clients": 2, "shots": 4, "partition": "iid"}, "federation": {"rounds": 2, "threads": 1}}


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
    assert left == [folders[0], folders[2]]
    with TerminalDisplay(quiet=True) as display:
        run_side_by_side(left, 2, GridDisplay(display))
        assert unfinished(grid, tmp_path / "jobs") == []
        side_by_side = perform_grid(grid, tmp_path / "jobs", GridDisplay(display), opener)
        one_by_one = perform_grid(grid, tmp_path / "alone", GridDisplay(display), opener)
    assert side_by_side.failures == one_by_one.failures == []
    assert side_by_side.figures == one_by_one.figures
    assert side_by_side.tests == one_by_one.tests
