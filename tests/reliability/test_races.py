"""Two processes that want the same: one has it, the other waits or is told so, and nobody's work is lost."""

import os
import signal
import time

import pytest
from helpers.forked import SMALL, Child, in_child


def wait_for(path, child):
    """Until a child has made this file."""
    while not path.exists():
        assert os.waitid(os.P_PID, child.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "it ended before"
        time.sleep(0.002)


def one_sentence(ended, words):
    assert ended.code == 2, ended.error
    assert len(ended.error.strip().splitlines()) == 1
    assert words in ended.error


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    ended = in_child(tmp_path_factory.mktemp("whole"), "run", *SMALL)
    assert ended.code == 0, ended.error
    return ended.result


def test_a_second_process_in_a_run_folder_is_refused_and_the_lock_of_a_dead_one_is_not_in_the_way(tmp_path, whole):
    first = Child(tmp_path, "run", *SMALL, "--out", "run")
    wait_for(tmp_path / "run" / "config.toml", first)
    os.kill(first.process, signal.SIGSTOP)  # it holds the run, and stands still
    one_sentence(in_child(tmp_path, "run", *SMALL, "--out", "run"), "exists already")
    assert (tmp_path / "run" / "config.toml").exists()
    wait_for_lock(first, tmp_path / "run")
    one_sentence(in_child(tmp_path, "resume", "run"), f"Another process ({first.process}) is at work")
    os.kill(first.process, signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    assert (tmp_path / "run" / ".lock").read_text().split()[0] == str(first.process)  # of a process that is no more
    resumed = in_child(tmp_path, "resume", "run", "--json", "--quiet")
    assert resumed.code == 0, resumed.error
    assert resumed.result["state_sha256"] == whole["state_sha256"]


def wait_for_lock(child, folder):
    """Let a stopped child go on until it has written its number into the lock, and stop it again."""
    while not (folder / ".lock").read_text():
        os.kill(child.process, signal.SIGCONT)
        time.sleep(0.005)
        os.kill(child.process, signal.SIGSTOP)


@pytest.mark.parametrize("out", [[], ["--out", "run"]], ids=["names of their own", "the same folder"])
def test_runs_that_begin_at_the_same_time_do_not_harm_each_other(tmp_path, whole, out):
    gate = tmp_path / "gate"

    def look_together():
        """Both see that the folder is not there before either makes it."""
        make = os.mkdir

        def make_late(path, *arguments):
            if path.name != "journal":  # that is in a folder of one's own
                time.sleep(0.5)
            make(path, *arguments)

        os.mkdir = make_late  # type: ignore[assignment]
        while not gate.exists():
            pass

    children = [Child(tmp_path, "run", *SMALL, *out, prepare=look_together) for _ in range(2)]
    gate.touch()
    ended = sorted((child.wait() for child in children), key=lambda end: end.code)
    assert ended[0].code == 0, ended[0].error
    assert ended[0].result["state_sha256"] == whole["state_sha256"]
    if out:
        one_sentence(ended[1], "exists already")
        assert (tmp_path / "run" / "result.json").exists()
    else:
        assert ended[1].result["state_sha256"] == whole["state_sha256"]
        assert len(list((tmp_path / "runs").glob("*/result.json"))) == 2
