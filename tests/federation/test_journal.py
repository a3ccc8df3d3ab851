import json
import subprocess
import sys

import pytest
import torch

from fedvl.errors import FedVLError
from fedvl.federation.journal import Journal
from fedvl.run_folder import RunFolder


def commit_rounds(folder, count=3):
    journal = Journal(folder)
    for number in range(1, count + 1):
        journal.commit(number, {"shared/w": torch.full((50,), float(number))}, {"round": number})
    return journal


def test_latest_gives_the_last_committed_round_and_its_history(tmp_path):
    tensors, records = commit_rounds(tmp_path / "journal").latest()
    assert tensors["shared/w"].tolist() == [3.0] * 50
    assert records == [{"round": 1}, {"round": 2}, {"round": 3}]


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
        "import sys, pathlib; from fedvl.run_folder import RunFolder\n"
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
