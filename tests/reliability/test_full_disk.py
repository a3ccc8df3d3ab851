"""No space, no permission, no file handles: one sentence, the last round intact, and the run goes on once there is."""

import errno
import os
import resource

import pytest
from helpers.forked import SMALL, in_child

import fedvl.files
from fedvl.federation.journal import Journal


def at_round(number, then):
    """Have something happen in the child just before it commits this round."""
    commit = Journal.commit

    def watched(self, round_number, *rest):
        if round_number == number:
            then(self.folder)
        commit(self, round_number, *rest)

    Journal.commit = watched  # type: ignore[method-assign]


def small_files(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def no_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def full_log(folder):
    """The log of rounds on a device that is always full."""
    from fedvl.runs.folder import RunFolder

    def append(self, record):
        with open("/dev/full", "a") as log:
            log.write("a round\n")

    RunFolder.append_round = append  # type: ignore[method-assign]


def read_only(*ignored):
    def refuse(path, mode="r", **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    fedvl.files.open = refuse  # type: ignore[attr-defined]


def full_at_the_end():
    from fedvl.runs.folder import RunFolder

    finish = RunFolder.finish

    def finish_on_full_disk(*arguments):
        small_files(2000)
        finish(*arguments)

    RunFolder.finish = finish_on_full_disk  # type: ignore[method-assign]


# What is done in the child, how many rounds are committed then, and what the sentence says.
TROUBLES = {
    "a checkpoint that does not fit": (lambda: at_round(3, lambda folder: small_files(3000)), 2, "File too large"),
    "the first checkpoint": (lambda: at_round(1, lambda folder: small_files(3000)), 0, "File too large"),
    "a full log": (lambda: at_round(3, full_log), 3, "No space left on device"),
    "no file handles": (lambda: at_round(3, lambda folder: no_files()), 2, "Too many open files"),
    "a file system gone read-only": (lambda: at_round(3, read_only), 2, "Read-only file system"),
    "no space for the model": (full_at_the_end, 4, "File too large"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_in(tmp_path_factory.mktemp("whole"))


def run_in(folder, prepare=lambda: None):
    return in_child(folder, "run", *SMALL, "--out", "run", prepare=prepare)


def one_sentence(ended, words):
    assert ended.code == 2, ended.error
    assert len(ended.error.strip().splitlines()) == 1, ended.error
    assert ended.error.startswith("Error: ")
    assert words in ended.error
    assert "Traceback" not in ended.error


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_run_stops_cleanly_and_goes_on(tmp_path, whole, trouble):
    prepare, committed, words = TROUBLES[trouble]
    one_sentence(run_in(tmp_path, prepare), words)
    run = tmp_path / "run"
    assert len(list((run / "journal").glob("*.json"))) == committed
    if not committed:  # nothing to go on with: nothing is left, and the command can be given again
        assert not run.exists()
        resumed = run_in(tmp_path)
    else:
        if (run / "metrics.jsonl").is_symlink():
            (run / "metrics.jsonl").unlink()
        assert not list(run.rglob("*.part"))
        resumed = in_child(tmp_path, "resume", "run", "--json", "--quiet")
    assert resumed.code == 0, resumed.error
    assert resumed.result["state_sha256"] == whole.result["state_sha256"]
    assert resumed.result["per_round"] == whole.result["per_round"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4


def test_not_even_the_description_fits(tmp_path, whole):
    one_sentence(run_in(tmp_path, lambda: small_files(300)), "File too large")
    assert not (tmp_path / "run").exists()
    assert run_in(tmp_path).result["state_sha256"] == whole.result["state_sha256"]


def test_a_cache_that_does_not_fit(tmp_path):
    """Patches of the embedded images are not shipped: they go to the cache, which is larger than a file may be."""
    arguments = ["run", "--method", "fedotp", *SMALL, "--out", "run"]
    one_sentence(in_child(tmp_path, *arguments, prepare=lambda: small_files(100_000)), "set FEDVL_CACHE")
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "cache").glob("*.safetensors"))
