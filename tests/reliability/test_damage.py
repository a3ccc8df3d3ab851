"""Checkpoints that are not as they were written are found, the round before is used, nothing is loaded in silence.

The same for the cache of features is in tests/data/test_features.py.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.contents import record_of
from helpers.forked import SMALL, in_child
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvl.errors import FedVLError
from fedvl.federation import journal as journals
from fedvl.federation.journal import Journal

ROUNDS = 3


def commit_rounds(folder, experiment="this", rounds=ROUNDS, add=0.0):
    journal = Journal(folder, experiment)
    for number in range(1, rounds + 1):
        tensors = {"shared/w": torch.full((50,), number + add), "0/own": torch.arange(4)}
        journal.commit(number, tensors, record_of({"round": number, "cohort": [0, 1], "loss": 0.5}))


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "journal"
    commit_rounds(folder)
    return folder


def expect_damage_found(sound, suffix, content):
    """With the last round's file of this kind replaced by this content."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "journal"
        shutil.copytree(sound, folder)
        (folder / f"{ROUNDS:06d}.{suffix}").write_bytes(content)
        expect_the_round_before(folder)


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_truncated_checkpoint_is_found_and_the_round_before_serves(sound, suffix, data):
    content = (sound / f"{ROUNDS:06d}.{suffix}").read_bytes()
    expect_damage_found(sound, suffix, content[: data.draw(st.integers(0, len(content) - 1), label="bytes left")])


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_of_a_checkpoint_is_found_and_the_round_before_serves(sound, suffix, data):
    content = bytearray((sound / f"{ROUNDS:06d}.{suffix}").read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1), label="bit")
    content[bit // 8] ^= 1 << bit % 8
    expect_damage_found(sound, suffix, content)


def expect_the_round_before(folder):
    journal = Journal(folder, "this")
    found = journal.latest()
    assert found is not None
    tensors, records = found
    assert tensors["shared/w"].tolist() == [ROUNDS - 1] * 50
    assert len(records) == ROUNDS - 1
    assert journal.notes == [f"Round {ROUNDS} was found damaged in the journal and was run again."]
    assert not (folder / f"{ROUNDS:06d}.json").exists()


def other_version(folder, monkeypatch):
    monkeypatch.setattr(journals, "JOURNAL_FORMAT", journals.JOURNAL_FORMAT + 1)
    commit_rounds(folder / "new")
    monkeypatch.undo()
    for path in (folder / "new").glob("000003.*"):
        path.replace(folder / path.name)


def other_experiment(folder, monkeypatch):
    commit_rounds(folder / "new", experiment="another", add=50.0)
    for path in (folder / "new").glob("000003.*"):
        path.replace(folder / path.name)


def other_round(folder, monkeypatch):
    for path in folder.glob("000002.*"):
        shutil.copy(path, folder / path.name.replace("2", "3"))


def no_tensors(folder, monkeypatch):
    (folder / "000003.safetensors").unlink()


@pytest.mark.parametrize("damage", [other_version, other_experiment, other_round, no_tensors])
def test_a_whole_checkpoint_of_something_else_is_not_believed(sound, tmp_path, monkeypatch, damage):
    folder = tmp_path / "journal"
    shutil.copytree(sound, folder)
    damage(folder, monkeypatch)
    expect_the_round_before(folder)


def test_a_journal_that_is_gone_is_a_run_from_the_beginning(tmp_path):
    assert Journal(tmp_path / "journal", "this").latest() is None


def test_nothing_is_removed_where_no_round_can_be_used(sound, tmp_path):
    folder = tmp_path / "journal"
    shutil.copytree(sound, folder)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(FedVLError, match="of another experiment or of another version"):
        Journal(folder, "another").latest()
    first = json.loads((folder / "000001.json").read_bytes())
    (folder / "000001.json").write_text(json.dumps({**first, "record": {"round": 1, "loss": 0.1}}))
    with pytest.raises(FedVLError, match="restore that folder from a copy, or delete it"):
        Journal(folder, "this").latest()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_user_goes_on_from_a_damaged_checkpoint_is_told_and_cannot_mix_experiments(tmp_path):
    whole = in_child(tmp_path, "run", *SMALL, "--out", "run").result
    run = tmp_path / "run"
    for name in ("result.json", "report.html"):
        (run / name).unlink()
    written = (run / "config.toml").read_text()
    for line, other in (("seed = 0", "seed = 1"), ('robust = "mean"', 'robust = "median"')):
        assert line in written
        (run / "config.toml").write_text(written.replace(line, other, 1))
        mixed = in_child(tmp_path, "resume", "run")
        assert mixed.code == 2
        assert "of another experiment" in mixed.error
    (run / "config.toml").write_text(written)
    path = run / "journal" / "000004.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    resumed = in_child(tmp_path, "resume", "run", "--json", "--quiet").result
    assert resumed["state_sha256"] == whole["state_sha256"]
    assert "Round 4 was found damaged in the journal and was run again." in resumed["notes"]
    assert whole["notes"] == [note for note in resumed["notes"] if "journal" not in note]
