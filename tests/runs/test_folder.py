"""The folder of a run: made, locked, read and written in one way, by one process at a time."""

import fcntl
import json
import math
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.contents import record_of, result_of

from fedvl import __version__
from fedvl.config import Experiment
from fedvl.errors import FedVLError
from fedvl.federation import journal
from fedvl.files import file_sha256
from fedvl.runs.contents import Examples, Federation, Status
from fedvl.runs.folder import RunFolder, located, process_start, read_rounds
from fedvl.runs.settings import resolve_experiment
from fedvl.tensors import load

PLAIN = resolve_experiment({})


def told(error):
    """The one sentence of an error."""
    text = str(error.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


@contextmanager
def child(work):
    """A forked process that does some work; it is killed in the end, if it has not ended."""
    process = os.fork()
    if not process:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def wait_until(true):
    for _ in range(6000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it never came")


# --- create


def test_a_new_folder_is_described_and_locked_and_then_free(tmp_path):
    path = tmp_path / "deep" / "run"
    with RunFolder.create(path, PLAIN) as folder:
        assert folder.path == path
        assert folder.at_work
        assert folder.exists
        assert not folder.finished
        assert RunFolder(path).experiment == PLAIN
    assert not RunFolder(path).at_work
    assert RunFolder(path).federation is None


def test_names_are_counted_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = resolve_experiment({"method": {"name": "fedprox"}, "data": {"dataset": "/a/photos.csv"}})
    paths = []
    for experiment in (PLAIN, PLAIN, other, PLAIN):
        with RunFolder.create(None, experiment) as folder:
            paths.append(str(folder.path))
    assert paths == [
        "runs/linear-cifar10-mini",
        "runs/linear-cifar10-mini-2",
        "runs/fedprox-photos",
        "runs/linear-cifar10-mini-3",
    ]


@pytest.mark.parametrize("taken", ["a run", "a strange file", "no folder"])
def test_a_folder_that_holds_something_is_refused_and_left_as_it_is(tmp_path, taken):
    path = tmp_path / "run"
    if taken == "a run":
        with RunFolder.create(path, PLAIN):
            pass
    elif taken == "a strange file":
        path.mkdir()
        (path / "thesis.tex").write_text("all of it")
    else:
        path.write_text("all of it")
    before = {file: file.read_bytes() for file in (path, *path.rglob("*")) if file.is_file()}
    with pytest.raises(FedVLError) as error, RunFolder.create(path, PLAIN):
        pytest.fail("it was taken")
    assert f"{path} exists already" in told(error)
    assert {file: file.read_bytes() for file in (path, *path.rglob("*")) if file.is_file()} == before


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedVLError) as error, RunFolder.create(tmp_path / "file" / "run", PLAIN):
        pytest.fail("it cannot be made")
    assert "Cannot make the folder" in told(error)


class CodeError(Exception):
    """A mistake in the code."""


def fail_in(path, error, work=lambda folder: None, federation=None):
    """Make a run that does some work and then fails."""

    def begin():
        with RunFolder.create(path, PLAIN, federation) as folder:
            work(folder)
            raise error

    with pytest.raises(type(error)) as raised:
        begin()
    assert raised.value is error


@pytest.mark.parametrize("error", [FedVLError("the data are bad."), OSError(28, "no space")])
def test_a_run_that_fails_before_its_first_round_leaves_nothing(tmp_path, error):
    fail_in(tmp_path / "run", error)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_before_is_left_empty_and_not_deleted(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    fail_in(path, FedVLError("the data are bad."), lambda folder: (folder.path / "journal").mkdir())
    assert path.is_dir()
    assert list(path.iterdir()) == []
    with RunFolder.create(path, PLAIN) as folder:  # and can be taken again
        assert folder.exists


def test_a_link_to_a_folder_is_left_empty_too(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fail_in(tmp_path / "link", FedVLError("the data are bad."))
    assert list((tmp_path / "real").iterdir()) == []


def commit_a_round(folder):
    (folder.path / "journal").mkdir()
    (folder.path / "journal" / "000001.json").write_text("{}")


@pytest.mark.parametrize(
    ("error", "work", "federation"),
    [
        (FedVLError("no quorum."), commit_a_round, None),  # something to go on from
        (
            FedVLError("no client came."),
            lambda folder: None,
            Federation(federation="clinic", run="abc"),
        ),  # parties may still come
        (CodeError(), lambda folder: None, None),  # to be looked into
        (KeyboardInterrupt(), lambda folder: None, None),
    ],
)
def test_other_runs_that_fail_are_kept_and_can_be_gone_on_with(tmp_path, error, work, federation):
    fail_in(tmp_path / "run", error, work, federation)
    kept = RunFolder(tmp_path / "run")
    assert kept.experiment == PLAIN
    assert kept.federation == federation
    assert not kept.at_work
    with kept.lock():
        assert kept.at_work


def test_a_method_of_ones_own_is_copied_and_the_copy_is_used(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("from fedvl.methods.linear import Linear\n\n\nclass Mine(Linear):\n    pass\n")
    with RunFolder.create(tmp_path / "run", resolve_experiment({"method": {"name": str(mine)}})):
        pass
    assert RunFolder(tmp_path / "run").experiment.method.name == str(tmp_path / "run" / "mine.py")
    mine.unlink()  # now nothing says that the copy is the user's own
    experiment = RunFolder(tmp_path / "run", trust_method=True).experiment
    assert experiment.method.name == str(tmp_path / "run" / "mine.py")
    assert experiment.method.sha256 == file_sha256(tmp_path / "run" / "mine.py")


# --- lock


def hold(path):
    """What a child does: hold the folder until it is killed."""
    with RunFolder(path).lock():
        time.sleep(600)


def test_a_second_process_is_refused_and_told_who_is_at_work(tmp_path):
    folder = RunFolder(tmp_path)
    with child(lambda: hold(tmp_path)) as process:
        wait_until(lambda: folder.at_work)
        with pytest.raises(FedVLError) as error, folder.lock():
            pytest.fail("it is held")
        assert f"Another process ({process}) is at work in {tmp_path}" in told(error)
        assert folder.at_work, "nor does being refused end the lock"


def test_the_lock_of_a_killed_process_is_in_nobodys_way(tmp_path):
    folder = RunFolder(tmp_path)
    with child(lambda: hold(tmp_path)) as process:
        wait_until(lambda: folder.at_work)
        noted = (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == noted == f"{process} {noted.split()[1]}", "it could not tidy up"
    assert not folder.at_work
    with folder.lock():
        assert folder.at_work
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {process_start(os.getpid())}"
    assert not folder.at_work


def test_another_process_of_the_same_number_is_not_the_one_at_work(tmp_path):
    (tmp_path / ".lock").write_text(f"{os.getpid()} {process_start(os.getpid())}")
    assert RunFolder(tmp_path).at_work
    (tmp_path / ".lock").write_text(f"{os.getpid()} 1")
    assert not RunFolder(tmp_path).at_work


@pytest.mark.parametrize("content", ["", "no number", "0x1", "99999999 5", "\x00"])
def test_a_strange_lock_is_nobodys(tmp_path, content):
    (tmp_path / ".lock").write_text(content)
    assert not RunFolder(tmp_path).at_work
    with RunFolder(tmp_path).lock():
        assert RunFolder(tmp_path).at_work


def test_a_holder_that_has_not_said_its_number_yet_is_told_too(tmp_path):
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FedVLError) as error, RunFolder(tmp_path).lock():
            pytest.fail("it is held")
        assert "at work" in told(error)


def test_the_lock_ends_with_the_block_also_where_it_fails(tmp_path):
    with pytest.raises(CodeError), RunFolder(tmp_path).lock():
        raise CodeError
    assert not RunFolder(tmp_path).at_work
    with RunFolder(tmp_path).lock(), pytest.raises(FedVLError), RunFolder(tmp_path).lock():
        pytest.fail("it is held")


def test_asking_who_is_at_work_never_disturbs_a_run_that_starts(tmp_path):
    """Another process asks all the time, as ``fedvl status`` may, while runs are made and locked."""
    seen = tmp_path / "seen"

    def ask():
        answers = {False: 0, True: 0}
        while True:
            for path in list((tmp_path / "runs").iterdir())[-3:]:
                answers[RunFolder(path).at_work] += 1
            seen.write_text(f"{answers[False]} {answers[True]}")

    def asked():
        return [int(count) for count in seen.read_text().split() or (0, 0)] if seen.exists() else [0, 0]

    (tmp_path / "runs").mkdir()
    with child(ask):
        for number in range(150):
            with RunFolder.create(tmp_path / "runs" / f"{number:03d}", PLAIN) as folder:
                assert folder.at_work
        wait_until(lambda: asked()[0] >= 150)
        assert asked()[1] > 0, "some of the asking was while a run was held"
    assert not (tmp_path / "runs" / "149" / ".lock").read_text()


# --- rounds


def test_rounds_are_read_as_they_were_written(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_rounds([record_of({"round": 1, "loss": 2.5}), record_of({"round": 2, "loss": 1.5})])
    folder.append_round(record_of({"round": 3, "loss": 0.1}))
    assert folder.rounds == [
        record_of({"round": 1, "loss": 2.5}),
        record_of({"round": 2, "loss": 1.5}),
        record_of({"round": 3, "loss": 0.1}),
    ]
    assert folder.unreadable_lines == 0
    again = RunFolder(tmp_path)
    again.write_rounds([record_of({"round": 1, "loss": 2.5})])  # what was not committed is dropped
    assert again.rounds == [record_of({"round": 1, "loss": 2.5})]


def test_no_rounds_are_none(tmp_path):
    assert RunFolder(tmp_path).rounds == []
    assert RunFolder(tmp_path).unreadable_lines == 0


def test_torn_lines_are_counted_and_the_later_of_two_is_the_one_committed(tmp_path):
    lines = [
        '{"round": 2, "loss": 1.0}',
        '{"round": 1, "loss": 3.0}',
        '{"round": 3, "lo',  # killed while it was written
        "",
        '{"loss": 4.0}',
        "[1, 2]",
        '"text"',
        '{"round": null}',
        '{"round": 2, "loss": 9.0}',
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n" + b'{"round": 10, "loss": 5.0}')
    rounds, unreadable = read_rounds(path)
    assert rounds == [
        record_of({"round": 1, "loss": 3.0}),
        record_of({"round": 2, "loss": 9.0}),
        record_of({"round": 10, "loss": 5.0}),
    ]
    assert unreadable == 6
    assert (RunFolder(tmp_path).rounds, RunFolder(tmp_path).unreadable_lines) == (rounds, 6)


# --- the end


SHARED = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}
LAST = {0: {"sent": torch.ones(2)}, 7: {"sent": torch.full((3,), 0.5)}}


def finish(path, last=LAST, examples=None, shared=SHARED):
    with RunFolder.create(path, PLAIN) as folder:
        result = {"method": "linear", "config": {"seed": 0}, "rounds": 0, "model_fingerprint": "abc"}
        result |= {"class_names": ["cat", "dog"], "templates": ["a photo of a {}."]}
        folder.finish(result_of(result), Examples.model_validate(examples or {}), shared, last)
    return folder


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_end_is_written_with_the_hashes_of_its_files(tmp_path):
    folder = finish(tmp_path / "run", examples={"gained": [{"true": "cat"}]})
    again = RunFolder(tmp_path / "run")
    assert again.finished
    assert again.result == folder.result
    assert again.result.files_sha256 == {
        name: file_sha256(tmp_path / "run" / name) for name in ("model.safetensors", "kept.safetensors")
    }
    assert again.examples.to_dict() == {"gained": [{"true": "cat"}]}
    shared, last = again.tensors()
    assert equal(shared, SHARED)
    assert last.keys() == LAST.keys()
    assert all(equal(last[client], LAST[client]) for client in LAST)


def test_what_is_not_needed_is_not_written(tmp_path):
    finish(tmp_path / "run", last={}, examples={"gained": [], "lost": []})
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {".lock", "config.toml", "model.safetensors", "result.json"}
    shared, last = RunFolder(tmp_path / "run").tensors()
    assert equal(shared, SHARED)
    assert last == {}
    assert RunFolder(tmp_path / "run").examples == Examples()


@pytest.mark.parametrize("name", ["model.safetensors", "kept.safetensors"])
def test_a_file_that_is_not_the_one_written_is_refused(tmp_path, name):
    finish(tmp_path / "run")
    path = tmp_path / "run" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert load(path), "it is a whole safetensors file all the same"
    with pytest.raises(FedVLError) as error:
        RunFolder(tmp_path / "run").tensors()
    assert f"{path} is damaged" in told(error)
    path.unlink()
    with pytest.raises(FedVLError) as error:
        RunFolder(tmp_path / "run").tensors()
    assert f"Cannot read {path}" in told(error)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.safetensors", "kept.safetensors"])
def test_tensors_that_are_not_finite_are_refused_though_their_hash_is_right(tmp_path, name, value):
    broken = torch.tensor([0.0, value])
    shared = {**SHARED, "bias": broken} if name == "model.safetensors" else SHARED
    last = {**LAST, 7: {"sent": broken}} if name == "kept.safetensors" else LAST
    finish(tmp_path / "run", last=last, shared=shared)
    with pytest.raises(FedVLError) as error:
        RunFolder(tmp_path / "run").tensors()
    assert f"{tmp_path / 'run' / name} holds numbers that are not finite" in told(error)


def test_a_result_without_hashes_is_of_an_older_version(tmp_path):
    finish(tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_bytes())
    del result["files_sha256"]
    path.write_text(json.dumps(result))
    with pytest.raises(FedVLError) as error:
        RunFolder(tmp_path / "run").tensors()
    assert "older FedVL" in told(error)


# --- what is no run


@pytest.mark.parametrize("asked", ["settings", "experiment", "result"])
def test_where_there_is_no_run_it_is_told(tmp_path, asked):
    with pytest.raises(FedVLError) as error:
        getattr(RunFolder(tmp_path / "nowhere"), asked)
    assert f"There is no run in {tmp_path / 'nowhere'}" in told(error)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "is not finished"), ("{}", "names no method"), ("[]", "names no method"), ("{", "cannot be read")],
)
def test_a_result_that_is_none_is_told(tmp_path, content, words):
    with RunFolder.create(tmp_path / "run", PLAIN):
        pass
    if content is not None:
        (tmp_path / "run" / "result.json").write_text(content)
    with pytest.raises(FedVLError) as error:
        _ = RunFolder(tmp_path / "run").result
    assert words in told(error)


def test_settings_that_are_no_toml_are_told(tmp_path):
    (tmp_path / "config.toml").write_text("= 3")
    with pytest.raises(FedVLError, match="not valid TOML") as error:
        _ = RunFolder(tmp_path).experiment
    told(error)


def test_a_setting_of_another_version_names_both_versions(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("[training]\nmomentums = 0.9\n")
    with pytest.raises(FedVLError, match="momentums") as error:
        _ = RunFolder(tmp_path).settings
    assert "wrote this run" not in str(error.value)  # not known
    monkeypatch.setattr(journal, "__version__", "9.9.9")
    journal.Journal(tmp_path / "journal").commit(1, {"shared/w": torch.zeros(1)}, record_of({"round": 1}))
    with pytest.raises(FedVLError, match="momentums") as error:
        _ = RunFolder(tmp_path).settings
    assert str(error.value).endswith(f" FedVL 9.9.9 wrote this run, and this is {__version__}: use 9.9.9 for it.")


def test_the_status_is_the_last_that_was_written_and_a_torn_one_is_none(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.status == Status()
    folder.write_status(Status(round=1))
    folder.write_status(Status(round=2))
    assert folder.status == Status(round=2)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    Path(tmp_path / "status.json").write_text('{"round"')
    assert folder.status == Status()


# --- folders from others


LINKED = ["config.toml", "result.json", "examples.json", "federation.json", "metrics.jsonl", "journal", ".lock"]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_in_a_run_folder_is_neither_read_nor_written_through(name, tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    folder.mkdir()
    RunFolder(folder).describe(PLAIN)
    (folder / "result.json").write_text(json.dumps({"method": "linear", "rounds": 1}))
    (folder / name).unlink(missing_ok=True)
    victim.mkdir() if name == "journal" else victim.write_text("precious")
    (folder / name).symlink_to(victim)
    run = RunFolder(folder)

    def everything():
        with run.lock():
            run.append_round(record_of({"round": 1}))
            _ = run.experiment, run.result, run.examples, run.federation, run.rounds, run.state()

    with pytest.raises(FedVLError, match="is a link, which a run folder does not have"):
        everything()
    assert list(victim.iterdir()) == [] if name == "journal" else victim.read_text() == "precious"


def test_a_methods_file_in_a_folder_is_run_only_if_it_is_trusted(tmp_path):
    """Tried on version 0.1: ``predict``, ``export`` and ``resume`` ran the code of a folder that somebody sent."""
    folder, ran = tmp_path / "run", tmp_path / "ran"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    (folder / "config.toml").write_text('[method]\nname = "evil.py"\n')
    with pytest.raises(FedVLError, match="is code that this run would execute; read it, then say --trust-method"):
        _ = RunFolder(folder).experiment
    assert not ran.exists()
    with pytest.raises(FedVLError, match="defines 0 subclasses"):
        _ = RunFolder(folder, trust_method=True).experiment
    assert ran.exists()


def test_a_methods_file_does_not_vouch_for_itself(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    for name in ("run/evil.py", str(folder / "evil.py"), "run/../run/evil.py"):
        (folder / "config.toml").write_text(f'[method]\nname = "{name}"\n')
        with pytest.raises(FedVLError, match="say --trust-method"):
            _ = RunFolder(folder).experiment
    assert not (tmp_path / "ran").exists()


# --- what a killed process leaves


def test_a_folder_with_a_lock_alone_can_be_taken(tmp_path):
    """Tried on version 0.1: ``run`` said resume, and ``resume`` said run."""
    path = tmp_path / "run"
    path.mkdir()
    (path / ".lock").write_text("99999999 5")
    with RunFolder.create(path, PLAIN) as folder:
        assert folder.at_work
    assert RunFolder(path).experiment == PLAIN


def test_a_folder_whose_lock_is_held_is_neither_taken_nor_removed(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    with child(lambda: hold(path)):
        wait_until(lambda: RunFolder(path).at_work)
        with pytest.raises(FedVLError) as error, RunFolder.create(path, PLAIN):
            pytest.fail("it is held")
        assert "is at work" in told(error)
        assert [item.name for item in path.iterdir()] == [".lock"]


def test_what_a_killed_process_wrote_aside_does_not_stay(tmp_path):
    path = tmp_path / "run"
    with RunFolder.create(path, PLAIN):
        pass
    (path / "journal").mkdir()
    kept = [path / f".report.html.{os.getpid()}.part", path / ".mine.part", path / "my.12.part"]
    left = [path / ".config.toml.99999999.part", path / "journal" / ".000001.json.99999999.part"]
    for file in (*kept, *left):
        file.write_text("half")
    with RunFolder(path).lock():
        pass
    assert [file.exists() for file in (*kept, *left)] == [True] * 3 + [False] * 2


# --- a party's folder


def test_a_partys_folder_stands_for_the_run_that_finished_last(tmp_path):
    (tmp_path / "party.json").write_text("{}")
    with pytest.raises(FedVLError) as error:
        RunFolder.open(tmp_path)
    assert "has no finished run yet" in told(error)
    for name, finished in (("b", "2026-01-02T00:00:00+00:00"), ("a", "2026-01-03T00:00:00+00:00"), ("c", None)):
        (tmp_path / "state" / "runs" / name).mkdir(parents=True)
        if finished:
            (tmp_path / "state" / "runs" / name / "result.json").write_text(
                json.dumps({"method": "linear", "finished": finished})
            )
    runs = tmp_path / "state" / "runs"
    assert RunFolder.open(tmp_path).path == runs / "a"
    assert RunFolder.open(runs / "b").path == runs / "b"
    (tmp_path / "state").rename(tmp_path / "elsewhere")
    (tmp_path / "state").symlink_to("elsewhere")
    with pytest.raises(FedVLError, match="is a link"):
        RunFolder.open(tmp_path)


def test_a_run_finds_a_folder_of_ones_own_from_any_other(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    (tmp_path / "labels.csv").write_text("")
    monkeypatch.chdir(tmp_path)
    settings = {"data": {"dataset": "photos/", "corrections": "labels.csv"}}
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").describe(Experiment.model_validate(settings))
    monkeypatch.chdir(tmp_path / "photos")
    data = RunFolder(tmp_path / "run").experiment.data
    assert (data.dataset, data.corrections) == (str(tmp_path / "photos"), str(tmp_path / "labels.csv"))
    assert located(Experiment()).data.dataset == "cifar10-mini"
