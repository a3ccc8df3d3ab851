"""Measures whose values can be computed by hand."""

import math
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small import encoder_of
from PIL import Image
from sklearn import metrics

from fedvl.comparisons import measures
from fedvl.comparisons.measures import MEASURES, MeasuredRun, Reopened, measure_run
from fedvl.data.sources import Opener
from fedvl.errors import FedVLError
from fedvl.evaluation.leakage import IMAGE_SIDE
from fedvl.methods.base import Samples, Task
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.runs.contents import Result
from fedvl.runs.evaluation import read_evaluation, shares_of
from fedvl.runs.folder import RunFolder
from fedvl.tensors import Tensors


class FlatEncoder(torch.nn.Module):
    """An encoder of 2 x 2 images that is one matrix product: 12 numbers in, 5 out."""

    image_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Linear(12, 5, bias=False)

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.matrix(pixels.flatten(1))
        return out


def of(**parts: Any) -> Any:
    return SimpleNamespace(reopened=Reopened(SimpleNamespace(device="cpu", **parts), {}, {}))  # type: ignore[arg-type]


def test_the_frozen_encoder_is_counted_once_for_each_image_of_the_largest_client() -> None:
    training = SimpleNamespace(rows=[torch.arange(3), torch.arange(7)])
    method = SimpleNamespace(inputs=("features",), task=SimpleNamespace(clip=FlatEncoder()))
    assert MEASURES["encoder_flops"](of(method=method, training=training)) == 7 * 2 * 12 * 5
    assert MEASURES["encoder_flops"](of(method=SimpleNamespace(inputs=("pixels",)), training=training)) == 0


def test_the_best_and_the_worst_client_answer_alone() -> None:
    """One client's head is right about all four images, the other's about one."""
    method = Linear(LinearOptions(scale=1.0), Task(tuple("abcd"), torch.eye(4), encoder_of(), 2))
    test = Samples({"features": torch.eye(4)}, torch.arange(4))
    right, wrong = torch.eye(4), torch.eye(4)[[0, 2, 3, 1]]
    last = {client: {"weight": weight, "bias": torch.zeros(4)} for client, weight in enumerate((right, wrong))}
    prepared: Any = SimpleNamespace(
        queried=method,
        test=SimpleNamespace(samples=test),
        experiment=SimpleNamespace(evaluation=SimpleNamespace(batch_size=3)),
    )
    run: Any = SimpleNamespace(reopened=Reopened(prepared, last[0], last))
    assert MEASURES["best_client_alone"](run) == 100
    assert MEASURES["worst_client_alone"](run) == 25
    run.reopened = Reopened(prepared, last[0], {})
    with pytest.raises(FedVLError, match="none can answer alone"):
        MEASURES["best_client_alone"](run)


class Shown(Linear):
    def represent(self, tensors: Tensors, inputs: Tensors) -> torch.Tensor:
        return inputs["features"] * tensors["stretch"]


def test_a_clients_samples_are_mapped_with_the_share_whose_nearest_other_is_of_their_class() -> None:
    """Client 1 has five samples on a line: two near each other of class 0, two of class 1, and one of 0 beside these."""
    line = torch.tensor([9.0, 0.0, 1.0, 10.0, 12.0, 13.5])[:, None] * torch.eye(2)[:1]
    samples = Samples({"features": line}, torch.tensor([1, 0, 0, 1, 1, 0]))
    method = Shown(LinearOptions(), Task(("a", "b"), torch.eye(2), encoder_of(), 2))
    prepared: Any = SimpleNamespace(
        method=method,
        device="cpu",
        training=SimpleNamespace(samples=samples, rows=[torch.tensor([0]), torch.arange(1, 6)]),
        experiment=SimpleNamespace(evaluation=SimpleNamespace(batch_size=2)),
    )
    run: Any = SimpleNamespace(reopened=Reopened(prepared, {"stretch": torch.tensor(2.0)}, {}))
    found: Any = measure_run("embedding@1", run)
    assert found.label == [0, 0, 1, 1, 0]
    assert found.class_names == ["a", "b"]
    assert len(found.x) == 5
    assert found.value == 60  # 0 and 1 have each other; 10 has 12, and 12 has 13.5, as 13.5 has 12
    with pytest.raises(FedVLError, match="numbered from 0 to 1"):
        measure_run("embedding@2", run)
    with pytest.raises(FedVLError, match="Client 0 has fewer than two samples"):
        measure_run("embedding@0", run)


def test_a_figure_of_a_candidate_set_or_condition_is_measured_by_its_name() -> None:
    sets = [{"name": name, "accuracy": mean, "interval": [0.0, 99.0]} for name, mean in (("base", 60.0), ("hm3", 40.0))]
    conditions = [{"condition": "full", "accuracy": 50.0}]
    contents = {"method": "m", "conditions": conditions, "base_to_new": sets, "macro_f1": 30}
    result = Result.model_validate(contents)
    run = MeasuredRun(SimpleNamespace(result=result, rounds=[], path="run"), Opener.once())  # type: ignore[arg-type]
    assert measure_run("macro_f1", run) == 30.0
    with pytest.raises(FedVLError, match="no 'seconds' to measure"):
        measure_run("training_seconds", run)
    assert [measure_run(f"accuracy@{part}", run) for part in ("full", "base", "hm3")] == [50.0, 60.0, 40.0]
    with pytest.raises(FedVLError, match="no 'accuracy@new' to measure"):
        measure_run("accuracy@new", run)


@pytest.mark.parametrize(
    "measure, score", [("auroc", metrics.roc_auc_score), ("average_precision", metrics.average_precision_score)]
)
def test_areas_of_a_simulation_are_those_of_scikit_learn_within_binning(measure, score, folder_of, tmp_path) -> None:
    """The mean over classes of one against all others, by the scores of the run's model on its test images."""
    folder = RunFolder(shutil.copytree(folder_of("linear"), tmp_path / "run"))
    run = MeasuredRun(folder, Opener.once())
    prepared, shared, last = run.reopened
    labels, shares = shares_of(prepared, shared, last, folder)
    wanted = np.mean([score(labels == number, shares[:, number]) for number in range(shares.shape[1])])
    found: Any = read_evaluation(folder)
    binning = getattr(found.pooled, measure).binning
    assert 0 < binning < 0.02
    assert abs(measure_run(measure, run) - 100 * wanted) <= 100 * binning
    folder.file("evaluation.json").unlink()
    with pytest.raises(FedVLError, match=f"no '{measure}' to measure; evaluate it: fedvl evaluate"):
        measure_run(measure, run)


def test_the_first_training_image_is_attacked_as_numbers_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image has one colour; its label and the trained tensors go with it."""
    image = Image.new("RGB", (50, 30), (255, 51, 0))
    split = SimpleNamespace(read=lambda row: image if row == 0 else None, labels=[2, 1])
    seen: list[Any] = []

    def attack(*given: Any) -> dict[str, Any]:
        seen.extend(given)
        return {"value": 12.5}

    monkeypatch.setattr(measures, "attack", attack)
    prepared: Any = SimpleNamespace(method="the method", experiment=SimpleNamespace(data="the data"))
    run: Any = SimpleNamespace(
        reopened=Reopened(prepared, {}, {}),
        folder=SimpleNamespace(tensors=lambda: ({"keys": torch.ones(1)}, {})),
        opener=SimpleNamespace(dataset_of=lambda data: SimpleNamespace(splits={"train": split})),
    )
    found: Any = measure_run("gradient_inversion", run)
    assert found.value == 12.5
    method, shared, picture, label = seen
    assert (method, list(shared), label) == ("the method", ["keys"], 2)
    assert picture.shape == (3, IMAGE_SIDE, IMAGE_SIDE)
    assert picture.amax((1, 2)).tolist() == pytest.approx([1.0, 0.2, 0.0])


def test_entropies_are_shares_of_the_bound_by_hand() -> None:
    """Equal scores of four classes have an entropy of 2 bits, the bound; with one log 3 above, shares are 3, 1, 1, 1 of 6."""
    texts = torch.eye(4)
    features = torch.tensor([[0.5] * 4, [math.log(3), 0.0, 0.0, 0.0]])
    queried = SimpleNamespace(task=SimpleNamespace(text_features=texts))
    samples = Samples({"features": features}, torch.tensor([0, 1]))
    prepared: Any = SimpleNamespace(test=SimpleNamespace(samples=samples), queried=queried)
    result = Result.model_validate({"method": "m", "seed": 3})
    run = MeasuredRun(SimpleNamespace(result=result, rounds=[], path="run"), Opener.once())  # type: ignore[arg-type]
    run.__dict__["reopened"] = Reopened(prepared, {}, {})
    found: Any = measure_run("entropies", run)
    unequal = -(0.5 * math.log2(0.5) + 0.5 * math.log2(1 / 6))
    assert found.y == pytest.approx([2.0, unequal])
    assert found.bound == 2.0
    assert found.value == pytest.approx(100 * (2 + unequal) / 2 / 2)
