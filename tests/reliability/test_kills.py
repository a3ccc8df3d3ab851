"""SIGKILL at any moment, the writing of a checkpoint included: the resumed run ends in the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.kills import AT_RANDOM, PLACES
from helpers.small import PAPERS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_twenty_kills_over_five_methods_change_nothing(tmp_path):
    """``python -m benchmarks.faults`` does it 140 times, and 60 times to real processes."""
    command = [sys.executable, "-m", "tests.helpers.kills", "20", *PAPERS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome.keys() == set(PAPERS)
    for method, figures in outcome.items():
        assert sum(figures["kills"].values()) == 4, method
        assert figures["same"] == figures["runs"], method
        assert figures["redone"] <= 4, method
    places = {place for figures in outcome.values() for place in figures["kills"]}
    assert len(places & {AT_RANDOM, *PLACES}) >= 4  # when a kill at random comes too late, there is none
    assert len({rounds for figures in outcome.values() for rounds in figures["committed"]}) >= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_command_that_is_killed_between_rounds_is_resumed(tmp_path):
    environment = {**os.environ, "FEDVL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    fedvl = [sys.executable, "-m", "fedvl.cli"]
    arguments = [*fedvl, "run", "--rounds", "40", "--json", "--quiet", "--out"]

    def call(command):
        done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        return json.loads(done.stdout)

    whole = call([*arguments, "whole"])
    process = subprocess.Popen([*arguments, "killed"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "journal" / "000007.json").exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    resumed = call([*fedvl, "resume", "killed", "--json", "--quiet"])
    assert resumed["state_sha256"] == whole["state_sha256"]
    assert resumed["per_round"] == whole["per_round"]
    assert len((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()) == 40
