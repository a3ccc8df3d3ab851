"""Figures of a finished run that its result has."""

import csv
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.finished import finish
from helpers.runs import prepare

from fedvl.evaluation.calibration import calibration_error, calibration_interval
from fedvl.federation.records import Budget, Record
from fedvl.methods.base import Samples
from fedvl.runs.experiment import local_engine
from fedvl.runs.folder import RunFolder
from fedvl.runs.memory import Peak
from fedvl.runs.result import (
    calibration_figures,
    candidate_names,
    dataset_figures,
    memory_figures,
    privacy_figures,
    right,
    round_reaching,
    selection_figures,
    state_sha256,
    target_figures,
    validation_figures,
    zero_shot_figures,
)
from fedvl.tensors import digest

SPENT = Budget(unit="record", epsilon=2.0, delta=1e-5, sampling="by chance", planned=3)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_budget_says_whether_its_noise_is_secret(simulated: bool) -> None:
    prepared = prepare({"data": {"clients": 2}, "privacy": {"unit": "record"}})
    engine: Any = local_engine(prepared) if simulated else SimpleNamespace()
    federation: Any = SimpleNamespace(engine=engine, privacy=engine, records=[Record(round=1, privacy=SPENT)])
    found = privacy_figures(prepared, federation)
    assert found is not None
    assert found.simulated == simulated
    assert (found.of, found.group, found.epsilon) == ("image", None, 2.0)
    assert ("class counts, names of images" in [item.name for item in found.released]) == simulated
    assert "planned" not in found.to_dict()


def judged_as(answers: list[int], **more: Any) -> Any:
    return SimpleNamespace(answers=np.array(answers), **more)


def prepared_for(labels: list[int], names: str = "abc", **more: Any) -> Any:
    """What is prepared, as far as figures of a test need it."""
    task = SimpleNamespace(class_names=tuple(names), origins=more.pop("origins", ()))
    samples = Samples({}, torch.tensor(labels))
    return SimpleNamespace(
        queried=SimpleNamespace(task=task),
        test=SimpleNamespace(samples=samples, parts=None, **more),
        class_names=list(names),
        method=SimpleNamespace(labels="true", role=SimpleNamespace(trained_private=False)),
        experiment=SimpleNamespace(evaluation=SimpleNamespace(unsure=0.65)),
    )


def test_each_test_image_has_a_letter() -> None:
    assert right(prepared_for([0, 1, 2, 1]), judged_as([0, 2, -1, 1])) == "10-1"
    assert right(prepared_for([0]), None) == ""


def record(number: int, **figures: Any) -> Record:
    return Record.model_validate({"round": number, "bytes_up": 10, "bytes_down": 1, "seconds": 0.5} | figures)


def test_what_it_took_to_reach_a_target_by_hand() -> None:
    records = [record(1, accuracy=40.0), record(2, validation=60.0), record(3, accuracy=70.0)]
    assert [round_reaching(target, records) for target in (40.0, 40.1, 60.0, 60.1, 70.1)] == [1, 2, 2, 3, None]
    found = target_figures(60.0, records, 7)
    assert found.to_dict() == {
        "round_to_target": 2, "bytes_to_target": 22, "flops_to_target": 14, "seconds_to_target": 1.0
    }  # fmt: skip
    assert target_figures(60.0, records, None).flops_to_target is None
    assert set(target_figures(90.0, records, 7).to_dict().values()) == {None}
    assert target_figures(None, records, 7).to_dict() == {}


def test_memory_until_a_target_is_that_of_its_round() -> None:
    records, peaks = [record(1, accuracy=40.0), record(2, accuracy=60.0)], {2: Peak(5, 3)}
    whole = {"peak_memory_bytes": 9, "peak_gpu_memory_bytes": 8}
    assert memory_figures(Peak(9, 8), peaks, None, records).to_dict() == whole
    until = {"memory_bytes_to_target": 5, "gpu_memory_bytes_to_target": 3}
    assert memory_figures(Peak(9, 8), peaks, 50.0, records).to_dict() == whole | until
    for target in (30.0, 90.0):  # a round of another process, and none
        assert memory_figures(Peak(9, 8), peaks, target, records).to_dict() == whole | dict.fromkeys(until)


def test_the_best_round_is_the_first_with_the_highest_validation() -> None:
    held = SimpleNamespace(samples=[0] * 12)
    records = [record(1, validation=50.0), record(2), record(3, validation=70.0), record(4, validation=70.0)]
    found = validation_figures(SimpleNamespace(training=SimpleNamespace(validation=held)), records)  # type: ignore[arg-type]
    assert found.to_dict() == {
        "best_round": 3, "validation_accuracy": 70.0, "validation_images": 12, "per_round_validation": [50.0, 70.0, 70.0]
    }  # fmt: skip
    for training, known in (
        (SimpleNamespace(validation=None), records),
        (SimpleNamespace(validation=held), [record(1)]),
    ):
        assert validation_figures(SimpleNamespace(training=training), known).to_dict() == {}  # type: ignore[arg-type]


def test_zero_shot_has_its_accuracies_under_its_own_names() -> None:
    judged = judged_as([0], figures={"accuracy": 50.0, "macro_f1": 40.0}, confusion=np.array([[1, 1], [0, 4]]))
    assert zero_shot_figures(judged).to_dict() == {
        "zero_shot_accuracy": 50.0, "zero_shot_per_class_recall": [50.0, 100.0]
    }  # fmt: skip
    assert zero_shot_figures(None).to_dict() == {"zero_shot_accuracy": None}


def test_several_datasets_have_the_accuracy_of_their_own_images() -> None:
    candidates = [torch.tensor([0, 1]), torch.tensor([2])]
    prepared = prepared_for([0, 1, 1, 2, 2], origins=("pets", "pets", "food"), candidates=candidates)
    found = dataset_figures(prepared, judged_as([0, 0, 1, 2, -1]), judged_as([1, 0, 1, 0, 2])).to_dict()
    pets, food = found["datasets"]
    assert (pets["dataset"], pets["class_names"], pets["test_images"]) == ("pets", ["a", "b"], 3)
    assert (pets["accuracy"], pets["zero_shot_accuracy"]) == pytest.approx((200 / 3, 100 / 3))
    assert (food["test_images"], food["accuracy"], food["zero_shot_accuracy"]) == (1, 100.0, 0.0)
    assert found["class_lists"] == [["a", "b"], ["c"]]
    assert dataset_figures(prepared_for([0]), judged_as([0]), None).to_dict() == {}
    assert dataset_figures(prepared, None, None).to_dict() == {}


def test_calibration_is_of_the_images_whose_shares_are_known() -> None:
    shares = np.array([0.9, 0.6, np.nan, 0.6])
    prepared = prepared_for([0, 1, 2, 1])
    judged = judged_as([0, 1, 2, 0], shares=shares)
    found = calibration_figures(prepared, judged, None, None).to_dict()
    known = shares[[0, 1, 3]], np.array([True, True, False])
    assert found["ece"] == pytest.approx(calibration_error(*known))
    assert found["ece_interval"] == pytest.approx(list(calibration_interval(*known)))
    assert found.keys() == {"ece", "ece_interval", "reliability", "sure"}
    assert [row["images"] for row in found["sure"] if row["least"] in (0.5, 0.65, 0.95)] == [3, 1, 0]
    other = judged_as([0, 1, 2, 0], shares=np.array([0.8, 0.5, np.nan, 0.5]))
    both = calibration_figures(prepared, judged, None, other).to_dict()
    assert both["uncalibrated_ece"] == pytest.approx(found["ece"])
    assert both["uncalibrated_reliability"] == found["reliability"]
    assert both["ece"] == pytest.approx(calibration_error(np.array([0.8, 0.5, 0.5]), known[1]))
    unknown = judged_as([0], shares=np.array([np.nan]))
    assert calibration_figures(prepared_for([0]), unknown, unknown, None).to_dict() == {}


def test_what_was_trained_is_hashed_whoever_holds_it() -> None:
    shared, own = {"w": torch.ones(2)}, {1: {"v": torch.zeros(1)}, 0: {"v": torch.ones(1)}}
    engine = SimpleNamespace(private=own, private_of=lambda client: own[client])
    federation: Any = SimpleNamespace(shared=shared, engine=engine)
    assert state_sha256(federation) == digest(shared)
    federation.shared = {}
    assert state_sha256(federation) == digest({"0/v": torch.ones(1), "1/v": torch.zeros(1)})
    own[0], own[1] = {}, {}
    assert state_sha256(federation) is None


def test_names_of_candidates_are_those_of_one_dataset() -> None:
    task: Any = SimpleNamespace(class_names=("cat", "pizza", "dog"), origins=("pets", "food", "pets"))
    assert candidate_names(task) == [["cat", "dog"], ["pizza"]]
    task.origins = ()
    assert candidate_names(task) == [["cat", "pizza", "dog"]]


def test_pseudo_labels_of_each_evaluated_round_are_listed() -> None:
    records = [record(1, pseudo_label_accuracy=None), record(2), record(3, pseudo_label_accuracy=80.0)]
    assert selection_figures(records).to_dict() == {"per_round_pseudo_label_accuracy": [None, 80.0]}
    assert selection_figures(records[1:2]).to_dict() == {}


HELD: dict[str, Any] = {
    "method": {"name": "linear"},
    "data": {"clients": 2, "shots": 30},
    "federation": {"rounds": 2, "threads": 1},
    "evaluation": {"validation": 0.3, "unsure": 0.75},
}


def test_a_temperature_is_fitted_to_images_that_clients_hold_out(tmp_path):
    """It minimises the loss on them, changes no answer, and test.csv has the shares that queries have."""
    result = finish(tmp_path / "run", HELD)
    held = prepare(HELD).training.validation
    assert held is not None
    assert result.temperature_from == f"{len(held.samples)} images that clients held out"
    assert result.temperature is not None
    folder = RunFolder(tmp_path / "run")
    shared, _ = folder.tensors()
    method = prepare(HELD).method

    def loss(temperature):
        scores = method.predict(shared, held.samples.inputs) / temperature
        return float(torch.nn.functional.cross_entropy(scores.double(), held.samples.labels))

    around = [loss(result.temperature * factor) for factor in (0.95, 1.0, 1.05)]
    assert min(around) == around[1] < loss(1.0)

    with open(tmp_path / "run" / "test.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    shares = np.array([float(row["share"]) for row in rows])
    right = np.array([row["truth"] == row["prediction"] for row in rows])
    assert result.accuracy == pytest.approx(100 * right.mean())
    assert result.ece == pytest.approx(calibration_error(shares, right), abs=0.2)  # shares have four decimals
    assert result.uncalibrated_ece != pytest.approx(result.ece, abs=0.01)
    (told,) = (each for each in result.sure if each.least == 0.75)
    assert told.unsure == pytest.approx(100 * (shares < 0.75).mean(), abs=0.3)
    assert told.accuracy == pytest.approx(100 * right[shares >= 0.75].mean(), abs=0.3)
    assert sum(each.images for each in result.reliability) == len(rows)


def test_no_temperature_is_fitted_without_held_out_images_or_under_privacy(tmp_path, folder_of):
    assert RunFolder(folder_of("linear")).result.temperature is None
    assert RunFolder(folder_of("linear")).result.uncalibrated_ece is None
    private = {**HELD, "method": {"name": "fst-cbdg"}, "privacy": {"unit": "client"}, "evaluation": {}}
    assert finish(tmp_path / "private", private).temperature is None
