"""Rounds that are validated: the best one is kept, a run stops for want of better ones, and resumes to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.contents import record_of
from helpers.runs import OPENER

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.journal import best_round
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.report.page import write_report
from fedvl.runs import result
from fedvl.runs.contents import Figures, Result
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.memory import Peak
from fedvl.runs.result import memory_figures, target_figures
from fedvl.runs.settings import resolve_experiment

STEEP: dict[str, Any] = {
    "data": {"clients": 3, "shots": 20, "test_shots": 10, "partition": "iid"},
    "training": {"learning_rate": 3.0},
    "evaluation": {"validation": 0.3},
}


def run_in(path: Path, protocol: str = "closed", method: str = "linear", **federation: int) -> tuple[RunFolder, Result]:
    evaluation = {**STEEP["evaluation"], "protocol": protocol}
    settings = STEEP | {"evaluation": evaluation, "method": {"name": method}, "federation": federation}
    return completed(path, settings)


def completed(path: Path, settings: dict[str, Any]) -> tuple[RunFolder, Result]:
    with RunFolder.create(path, resolve_experiment(settings)) as folder:
        return folder, complete(folder, Silent(), OPENER)


def test_the_best_round_is_the_first_of_the_highest() -> None:
    records = [record_of({"round": n, "validation": v}) for n, v in enumerate((50.0, 70.0, 70.0, 60.0), 1)]
    assert best_round([*records, record_of({"round": 5})]) == 2
    assert best_round([record_of({"round": 1, "accuracy": 3.0})]) is None


@pytest.mark.parametrize(("protocol", "method"), [("closed", "linear"), ("personal", "fst-cbdg")])
def test_a_run_ends_with_the_tensors_of_its_best_round(tmp_path: Path, protocol: str, method: str) -> None:
    """A run of exactly so many rounds as the best one has the same tensors and test figures."""
    folder, result = run_in(tmp_path / "patient", protocol, method, rounds=6, patience=2)
    rounds = [record.validation or 0.0 for record in folder.rounds]
    best = 1 + rounds.index(max(rounds))
    assert result.best_round == best
    assert result.rounds == min(6, best + 2) == len(rounds)
    assert result.per_round == []
    _, shorter = run_in(tmp_path / "short", protocol, method, rounds=best)
    for key in ("state_sha256", "accuracy", "right", "validation_accuracy", "validation_images"):
        assert getattr(result, key) == getattr(shorter, key), key


def test_a_stopped_run_finds_its_best_round_again(tmp_path: Path) -> None:
    tmp_path /= "run"
    _, whole = run_in(tmp_path, rounds=12, patience=2)
    assert whole.best_round < whole.rounds < 12
    (tmp_path / "result.json").unlink()
    again = complete(RunFolder(tmp_path), Silent(), OPENER)
    assert again.state_sha256 == whole.state_sha256
    for path in (tmp_path / "result.json", *tmp_path.glob(f"journal/{whole.rounds:06d}.*")):
        path.unlink()
    again = complete(RunFolder(tmp_path), Silent(), OPENER)
    for key in ("state_sha256", "rounds", "best_round", "accuracy"):
        assert getattr(again, key) == getattr(whole, key), key


def test_another_share_is_another_run(tmp_path: Path) -> None:
    """The journal of a run with other training images is not gone on with."""
    tmp_path /= "run"
    run_in(tmp_path, rounds=1)
    (tmp_path / "result.json").unlink()
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace("validation = 0.3", "validation = 0.4"))
    with pytest.raises(FedVLError, match="of another experiment"):
        complete(RunFolder(tmp_path), Silent(), OPENER)


def test_without_the_test_nothing_of_it_is_judged(tmp_path: Path) -> None:
    settings = STEEP | {"federation": {"rounds": 1}, "evaluation": {"validation": 0.3, "test": False}}
    _, result = completed(tmp_path / "blind", settings)
    assert result.accuracy is result.zero_shot_accuracy is None
    assert (result.right, result.zero_shot_right, result.confusion) == ("", "", [])
    assert not (tmp_path / "blind" / "examples.json").exists()


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"federation": {"patience": 2}, "evaluation": {}}, "federation.patience needs images"),
        ({"privacy": {"unit": "client"}}, "is not private"),
        ({"data": {"shots": 1, "clients": 10, "partition": "iid"}}, "two at least"),
    ],
)
def test_what_cannot_be_validated_is_refused(tmp_path: Path, section: dict[str, Any], told: str) -> None:
    with pytest.raises(FedVLError, match=told):
        completed(tmp_path / "refused", STEEP | section)


def test_what_it_takes_to_reach_a_target(tmp_path: Path) -> None:
    settings = {
        "data": STEEP["data"],
        "training": {"learning_rate": 0.3},
        "federation": {"rounds": 4},
        "evaluation": {"target_accuracy": 20.0},
    }
    folder, result = completed(tmp_path / "run", settings)
    accuracies, rounds = [value or 0.0 for value in result.per_round], folder.rounds
    assert result.round_to_target == 1
    best = target_figures(max(accuracies), rounds, 5)
    at = 1 + accuracies.index(max(accuracies))
    assert best.round_to_target == at
    assert best.bytes_to_target == sum(record.bytes_up + record.bytes_down for record in rounds[:at])
    assert best.flops_to_target == 5 * at
    assert best.seconds_to_target == pytest.approx(sum(record.seconds for record in rounds[:at]))
    assert target_figures(100.0, rounds, 5).round_to_target is None
    assert target_figures(None, rounds, 5) == Figures()
    assert 2**20 < result.memory_bytes_to_target <= result.peak_memory_bytes < 2**36
    assert result.peak_gpu_memory_bytes is result.gpu_memory_bytes_to_target is None
    peaks = {1: Peak(5, None), at: Peak(7, 3)}
    told = memory_figures(Peak(9, 4), peaks, max(accuracies), rounds)
    assert told.memory_bytes_to_target == (5 if at == 1 else 7)
    assert memory_figures(Peak(9, 4), {}, 100.0, rounds).memory_bytes_to_target is None
    assert result.ece_interval is not None
    assert result.ece_interval[0] < result.ece < result.ece_interval[1]


def test_newcomers_take_no_part_and_are_then_tested_before_and_after_a_round_of_their_own(tmp_path: Path) -> None:
    data = {"clients": 5, "shots": 20, "test_shots": 10, "partition": "disjoint"}
    settings: dict[str, Any] = {
        "method": {"name": "linear"},
        "data": {**data, "newcomers": 2},
        "training": {"learning_rate": 0.5},
        "federation": {"rounds": 2},
        "evaluation": {"protocol": "personal"},
    }
    folder, result = completed(tmp_path / "run", settings)
    assert all(record.cohort == [0, 1, 2] and record.dropped == [] for record in folder.rounds)
    assert result.per_client_test_images == [20, 20, 20, 0, 0]
    assert result.newcomers_per_client_accuracy[:3] == [None] * 3
    assert result.newcomers_trained_accuracy > result.newcomers_accuracy  # of classes that nobody else has
    without = {**settings, "data": data, "federation": {"rounds": 2, "withdrawn": [3, 4]}}
    _, other = completed(tmp_path / "other", without)
    assert result.state_sha256 == other.state_sha256
    assert "newcomers_accuracy" not in other.model_fields_set
    with pytest.raises(FedVLError, match="use --protocol personal"):
        completed(tmp_path / "closed", {**settings, "evaluation": {"protocol": "closed"}})
    with pytest.raises(FedVLError, match=r"lower data\.newcomers"):
        completed(tmp_path / "all", {**settings, "data": {**data, "newcomers": 5}})
    _, solved = completed(tmp_path / "solved", {**settings, "method": {"name": "ridge"}})
    assert solved.newcomers_trained_accuracy > solved.newcomers_accuracy


def test_a_long_tail_is_tested_by_groups_of_classes(tmp_path: Path) -> None:
    settings = {
        "data": {"clients": 2, "long_tail": 100, "partition": "iid", "test_shots": 5},
        "federation": {"rounds": 1},
    }
    folder, result = completed(tmp_path / "run", settings)
    found = result.long_tail
    assert found.by.startswith("more than 100, 20 to 100")
    # 200 x 100^(-c/9): 200, 120, 72, 43, 26, 15, 9, 6, 3, 2
    assert [row.classes for row in found.groups] == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]]
    assert [row.training_images for row in found.groups] == [320, 141, 35]
    recalls = result.per_class_recall
    for row in found.groups:
        mean = sum(recalls[c] or 0.0 for c in row.classes) / len(row.classes)  # classes have as many test images
        assert row.accuracy == pytest.approx(mean)
    assert folder.result == result
    assert "Many, medium and few training images" in write_report(folder.path).read_text()


def test_the_image_tower_is_timed_once_for_a_model_that_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = load_model("fedvl-tiny"), load_model("fedvl-tiny")
    assert isinstance(first, DualEncoder)
    assert isinstance(again, DualEncoder)
    monkeypatch.setattr(result, "TIMED", {})
    seconds = result.tower_seconds(first, torch.device("cpu"))
    assert seconds > 0
    monkeypatch.setattr(again, "encode_image", lambda pixels: pytest.fail("it is timed again"))
    assert result.tower_seconds(again, torch.device("cpu")) == seconds


def test_the_share_of_true_pseudo_labels_is_kept_by_evaluated_round() -> None:
    records = [
        record_of({"round": 1, "pseudo_label_accuracy": 75.0}),
        record_of({"round": 2}),
        record_of({"round": 3, "pseudo_label_accuracy": None}),
    ]
    assert result.selection_figures(records) == Figures(per_round_pseudo_label_accuracy=[75.0, None])
    assert result.selection_figures([record_of({"round": 1})]) == Figures()
