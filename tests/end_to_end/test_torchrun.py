"""A run in several processes by torchrun, as a user starts it, killed and resumed: the bits of one process."""

import json
import os
import subprocess
import sys

import pytest
from helpers.machines import committed, ended, kill, of_folder, wait_until

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fedvl"]
SETTINGS = ["--method", "fst-cbdg", "--shots", "20", "--clients", "6", "--chunk", "1", "--rounds", "60", "--quiet"]


def start(*words: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*TORCHRUN, *map(str, words)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_a_run_in_two_processes_killed_and_resumed_ends_in_the_bits_of_one(tmp_path):
    run, alone = tmp_path / "run", tmp_path / "alone"
    started = start("run", *SETTINGS, "--out", run)
    with ended([started]):
        wait_until(lambda: committed(run) >= 2, started)
        kill(*of_folder(run))
    wait_until(lambda: not of_folder(run))
    assert not (run / "result.json").exists()
    with ended([resumed := start("resume", run, "--quiet")]):
        assert resumed.wait(120) == 0
    subprocess.run([sys.executable, "-m", "fedvl", "run", *SETTINGS, "--out", alone], check=True, capture_output=True)
    results = [json.loads((folder / "result.json").read_bytes()) for folder in (run, alone)]
    assert results[0]["state_sha256"] == results[1]["state_sha256"]
    assert results[0]["accuracy"] == results[1]["accuracy"]
