"""fedvl run as a user types it, in this process."""

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedvl.data import stored
from fedvl.data.stored import StoredRows
from fedvl.federation import steps
from fedvl.report import status
from fedvl.runs import settings
from fedvl.runs.folder import RunFolder


def draw(folder: Path, count: int, seed: int = 0) -> None:
    """Write images of noise."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    for index in range(count):
        Image.frombytes("RGB", (8, 8), noise.randbytes(192)).save(folder / f"{index}.png")


def test_a_folder_without_labels_is_trained_on_and_queried(call: Any, tmp_path: Path) -> None:
    draw(tmp_path / "scans", 12)
    words = ("run", "--dataset", "scans", "--classes", "well,ill", "--method", "fst-cbdg", "--partition", "iid")
    done = call(*words, "--clients", "2", "--rounds", "1", "--quiet", "--json")
    assert done.exception is None, done.exception
    result = json.loads(done.stdout)
    assert result["accuracy"] is result["zero_shot_accuracy"] is None
    assert result["per_round"] == []
    assert result["class_names"] == ["well", "ill"]
    assert '--set \'data.classes=["well", "ill"]\'' in result["command"]
    asked = json.loads(call("predict", "runs/fst-cbdg-scans", "scans", "--json").stdout)
    assert {each["name"] for line in asked for each in line["ranked"]} == {"well", "ill"}
    assert "no accuracy is measured" in (tmp_path / "runs/fst-cbdg-scans/report.html").read_text()


def test_a_run_is_queried_in_the_precision_that_it_was_encoded_in(call: Any, tmp_path: Path) -> None:
    for name in ("well", "ill"):
        draw(tmp_path / "scans" / name, 6, seed=len(name))
    words = ("run", "--dataset", "scans", "--partition", "iid", "--clients", "2", "--rounds", "1", "--quiet", "--json")
    exact = json.loads(call(*words, "--out", "exact").stdout)
    lower = json.loads(call(*words, "--out", "lower", "--set", "model.encoding=bfloat16").stdout)
    assert lower["model_fingerprint"] != exact["model_fingerprint"]
    assert RunFolder(tmp_path / "lower").experiment.model.encoding == "bfloat16"
    assert len(json.loads(call("predict", "lower", "scans/ill", "--json").stdout)) == 6
    refused = call(*words, "--model", "fedvl-tiny-vilt", "--set", "model.encoding=bfloat16")
    assert "leave out model.encoding" in str(refused.exception)


@pytest.mark.parametrize(("rounds", "saved"), [(2, "saved after round 2"), (0, "no round is saved yet")])
def test_ctrl_c_says_what_is_saved_and_how_to_go_on(
    rounds: int, saved: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: RunFolder, record: Any) -> None:
        if record.round == rounds:
            raise KeyboardInterrupt

    def before_the_first(folder: RunFolder, records: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if rounds:
            patched.setattr(RunFolder, "append_round", interrupted)
        else:
            patched.setattr(RunFolder, "write_rounds", before_the_first)
        stopped = call("run", "--rounds", "3", "--shots", "5", "--clients", "2", "--partition", "iid", "--quiet")
    assert stopped.exit_code == 130
    assert stopped.stderr == f"Stopped; {saved}; go on with `fedvl resume runs/linear-cifar10-mini`.\n"
    assert call("resume", "runs/linear-cifar10-mini", "--quiet").exit_code == 0


def test_a_run_resumes_with_the_precision_that_it_began_with(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor computes in bfloat16 as a GPU would; the second machine would choose float32."""
    monkeypatch.setattr(steps, "FASTER", {"cpu"})
    words: tuple[str, ...] = (
        "run",
        "--method",
        "promptfl",
        "--shots",
        "2",
        "--clients",
        "2",
        "--partition",
        "iid",
        "--rounds",
        "2",
    )
    words = (
        *words,
        "--set",
        "evaluation.every=2",
        "--set",
        "data.test_shots=2",
        "--device",
        "cpu",
        "--quiet",
        "--json",
    )

    def interrupted(folder: RunFolder, record: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(settings, "choose_precision", lambda towers, device: "bfloat16")
    whole = json.loads(call(*words, "--precision", "auto", "--out", "whole").stdout)
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append_round", interrupted)
        assert call(*words, "--precision", "auto", "--out", "stopped").exit_code == 130
    monkeypatch.setattr(settings, "choose_precision", lambda towers, device: "float32")
    resumed = json.loads(call("resume", "stopped", "--quiet", "--json").stdout)
    plain = json.loads(call(*words, "--precision", "auto", "--out", "plain").stdout)
    assert resumed["precision"] == whole["precision"] == "bfloat16"
    assert resumed["config"]["training"]["precision"] == "bfloat16"
    assert resumed["state_sha256"] == whole["state_sha256"] != plain["state_sha256"]
    assert plain["precision"] == "float32"
    assert "--set 'training.precision=\"bfloat16\"'" in whole["command"]
    assert "precision" not in plain["command"]


@pytest.mark.parametrize(("method", "labels"), [("fed-mp", "true"), ("promptfl", "cpl")])
def test_features_that_stay_on_disk_give_the_bits_of_those_in_memory(
    method: str, labels: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: tuple[str, ...] = (
        "run",
        "--method",
        method,
        "--clients",
        "3",
        "--rounds",
        "2",
        "--quiet",
        "--json",
        "--device",
        "cpu",
    )
    words += ("--set", f'data.labels="{labels}"', "--set", "federation.threads=1")
    held = json.loads(call(*words, "--out", "held").stdout)
    read: list[int] = []
    original = StoredRows.__getitem__

    def counted(rows: StoredRows, index: Any) -> Any:
        found = original(rows, index)
        read.append(len(found))
        return found

    monkeypatch.setattr(stored, "MAX_IN_MEMORY", 0)
    monkeypatch.setattr(StoredRows, "__getitem__", counted)
    on_disk = json.loads(call(*words, "--out", "on-disk").stdout)
    assert sum(read) > 2 * 200  # training images of two rounds
    for figure in ("state_sha256", "per_round", "confusion", "right"):
        assert on_disk[figure] == held[figure]


def test_a_page_follows_a_run_while_it_lasts(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    pages: list[str] = []
    make, append = status.make_server, RunFolder.append_round

    def make_and_note(folder: Path, port: int) -> Any:
        made.append(make(folder, port))
        return made[-1]

    def append_and_look(folder: RunFolder, record: Any) -> None:
        append(folder, record)
        with urllib.request.urlopen(f"http://127.0.0.1:{made[-1].server_port}/", timeout=30) as answer:
            pages.append(answer.read().decode())

    monkeypatch.setattr(status, "make_server", make_and_note)
    monkeypatch.setattr(RunFolder, "append_round", append_and_look)
    done = call("run", "--shots", "5", "--rounds", "2", "--page", "--quiet", "--out", "followed")
    assert done.exception is None, done.exception
    assert [f"round {number} of 2" in page for number, page in zip((2, 3), pages, strict=True)] == [True, True]
    assert f"http://127.0.0.1:{made[0].server_port}/ follows the run until it ends." in done.stderr
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{made[0].server_port}/", timeout=30)
    again = call("resume", "followed", "--quiet")
    assert "The run in followed was finished already." in again.stderr
