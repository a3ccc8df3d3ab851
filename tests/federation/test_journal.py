import json
import re
import subprocess
import sys

import pytest
import torch
from helpers.contents import record_of
from helpers.small import run_quietly, small_federation, small_method

from fedvl import __version__
from fedvl.errors import FedVLError
from fedvl.federation import journal
from fedvl.federation.journal import MAX_ROUND_FILES, Journal
from fedvl.runs.folder import RunFolder
from fedvl.tensors import digest, load


def commit_rounds(folder, count=3):
    journal = Journal(folder)
    for number in range(1, count + 1):
        journal.commit(number, {"shared/w": torch.full((50,), float(number))}, record_of({"round": number}))
    return journal


def test_latest_gives_the_last_committed_round_and_its_history(tmp_path):
    tensors, records = commit_rounds(tmp_path / "journal").latest()
    assert tensors["shared/w"].tolist() == [3.0] * 50
    assert records == [record_of({"round": number}) for number in (1, 2, 3)]


def test_nothing_committed_is_nothing(tmp_path):
    assert Journal(tmp_path / "journal").latest() is None


def test_old_tensors_go_and_manifests_stay(tmp_path):
    commit_rounds(tmp_path / "journal", 5)
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == [
        "000001.json",
        "000002.json",
        "000003.json",
        "000004.json",
        "000004.safetensors",
        "000005.json",
        "000005.safetensors",
    ]


def test_a_crash_between_tensors_and_manifest_leaves_the_round_before(tmp_path):
    journal = commit_rounds(tmp_path)
    (tmp_path / "000004.safetensors").write_bytes((tmp_path / "000003.safetensors").read_bytes())
    assert journal.latest()[0]["shared/w"][0] == 3.0


def test_a_manifest_of_another_round_is_not_believed(tmp_path):
    journal = commit_rounds(tmp_path)
    manifest = json.loads((tmp_path / "000003.json").read_text())
    manifest["record"] = {"round": 3, "accuracy": 100.0}
    (tmp_path / "000003.json").write_text(json.dumps(manifest))
    assert len(journal.latest()[1]) == 2


def test_a_second_process_is_refused_and_a_dead_ones_lock_is_not_in_the_way(tmp_path):
    code = (
        "import sys, pathlib; from fedvl.runs.folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).lock(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(FedVLError, match="Another process"), RunFolder(tmp_path).lock():
        pass
    holder.kill()
    holder.wait()
    with RunFolder(tmp_path).lock():
        pass


def test_a_round_that_adds_is_read_with_the_earlier_ones(tmp_path):
    journal = Journal(tmp_path, "x")
    journal.commit(
        1,
        {"shared/w": torch.zeros(1), "0/a": torch.zeros(1), "0/b": torch.zeros(1), "1/a": torch.zeros(1)},
        record_of({"round": 1}),
    )
    assert journal.can_add(2)
    journal.commit(
        2,
        {"shared/w": torch.ones(1), "0/a": torch.ones(1), "kept/3/a": torch.ones(1)},
        record_of({"round": 2}),
        adds=True,
    )
    journal.commit(
        3, {"shared/w": torch.full((1,), 2.0), "2/a": torch.full((1,), 2.0)}, record_of({"round": 3}), adds=True
    )
    found = {name: float(tensor) for name, tensor in journal.tensors(3).items()}
    # of a client the newest alone, with all its names; of the server nothing but this round's
    assert found == {"shared/w": 2.0, "2/a": 2.0, "0/a": 1.0, "1/a": 0.0}
    assert {name: float(t) for name, t in journal.tensors(2).items()} == {
        "shared/w": 1,
        "0/a": 1,
        "kept/3/a": 1,
        "1/a": 0,
    }
    journal.commit(4, {"shared/w": torch.zeros(1)}, record_of({"round": 4}))
    assert set(journal.tensors(4)) == {"shared/w"}
    assert len(list(tmp_path.glob("*.safetensors"))) == 4  # round 3 may still be gone back to
    journal.commit(5, {"shared/w": torch.zeros(1)}, record_of({"round": 5}))
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == ["000004", "000005"]


def test_a_round_whose_earlier_file_is_damaged_is_not_believed(tmp_path):
    journal = Journal(tmp_path, "x")
    journal.commit(1, {"shared/w": torch.zeros(1), "0/a": torch.zeros(1)}, record_of({"round": 1}))
    journal.commit(2, {"shared/w": torch.ones(1), "0/a": torch.ones(1)}, record_of({"round": 2}))
    journal.commit(3, {"shared/w": torch.ones(1)}, record_of({"round": 3}), adds=True)
    (tmp_path / "000002.safetensors").write_bytes(b"x")
    with pytest.raises(FedVLError, match="000002"):
        journal.tensors(3)


@pytest.mark.parametrize("name", ["fst-cbdg", "fedpp"])
def test_a_run_of_few_clients_a_round_writes_those_and_is_restored_whole(name, tmp_path):
    def federation(rounds, folder):
        found = small_federation(small_method(name), rounds=rounds, per_round=2)
        found.journal = Journal(folder, "x")
        return found

    whole = run_quietly(federation(20, tmp_path / "whole"))
    sizes = [len(load(path)) for path in sorted((tmp_path / "whole").glob("*.safetensors"))]
    everything = len(Journal(tmp_path / "whole", "x").tensors(20))
    assert min(sizes) < everything  # not all clients in each
    assert len(sizes) <= 2 * MAX_ROUND_FILES
    run_quietly(federation(11, tmp_path / "parts"))
    resumed = federation(20, tmp_path / "parts")
    resumed.restore()
    assert len(resumed.records) == 11
    run_quietly(resumed)
    assert digest(resumed.shared) == digest(whole.shared)
    for client, private in whole.engine.private.items():
        assert digest(resumed.engine.private[client]) == digest(private)
    for name, tensor in Journal(tmp_path / "parts", "x").tensors(20).items():
        assert torch.equal(tensor, Journal(tmp_path / "whole", "x").tensors(20)[name])


def test_rounds_that_another_version_wrote_and_this_one_cannot_read_name_both(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "__version__", "9.9.9")
    monkeypatch.setattr(journal, "JOURNAL_FORMAT", 2)
    commit_rounds(tmp_path / "journal")
    monkeypatch.undo()
    told = rf"FedVL 9\.9\.9 wrote the rounds in .*journal, and {re.escape(__version__)} here cannot read them"
    with pytest.raises(FedVLError, match=told):
        Journal(tmp_path / "journal").latest()
    assert len(list((tmp_path / "journal").glob("*.json"))) == 3


def test_rounds_of_a_version_with_the_same_format_are_continued(tmp_path, monkeypatch):
    """Older manifests name no version."""
    for version in ("9.9.9", ""):
        monkeypatch.setattr(journal, "__version__", version)
        found = commit_rounds(tmp_path / f"journal{version}")
        monkeypatch.undo()
        tensors, records = found.latest()
        assert tensors["shared/w"].tolist() == [3.0] * 50
        assert len(records) == 3
        assert journal.written_by(tmp_path / f"journal{version}") == version
    assert journal.written_by(tmp_path / "nowhere") == ""
