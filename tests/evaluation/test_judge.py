"""A model is judged on the test, on clients' own parts, and under missing modalities."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.small import small_task

from fedvl.evaluation.base_to_new import set_percentages
from fedvl.evaluation.judge import Judge
from fedvl.methods.base import Method, Options, Samples
from fedvl.methods.roles import Private


class Scored(Method):
    """Scores that an image brings along, moved by what a client keeps."""

    inputs = ("features",)
    vocabulary = "any"

    def roles(self) -> dict[str, Any]:
        return {"seen": Private(lasts=False)}

    def predict(self, tensors: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        assert "seen" not in tensors or len(tensors["seen"]) == len(self.task.class_names)
        return inputs["features"] + tensors.get("favour", torch.zeros(4))


def test_each_set_is_asked_among_its_own_candidates() -> None:
    """Two clients own the base classes 0, 1 and 2, 3; client 0 adds 5 to class 0, client 1 nothing."""
    scores = torch.tensor(
        [
            [2.0, 1.0, 9.0, 0.0],  # class 0: right among 0, 1; among all, client 0 says 2 (9 > 7), client 1 too
            [1.0, 3.0, 0.0, 0.0],  # class 1: client 0 says 0 among its own (6 > 3) and among all; client 1 is right
            [9.0, 0.0, 2.0, 1.0],  # class 2: right among 2, 3; among all, both say 0
            [0.0, 0.0, 7.0, 1.0],  # class 3: client 1 says 2 among its own; both say 2 among all
            [0.0, 0.0, 0.0, 6.0],  # class 3: right in all ways
        ]
    )
    test = Samples({"features": scores}, torch.tensor([0, 1, 2, 3, 3]))
    new = Samples({"features": torch.tensor([[0.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])}, torch.tensor([1, 0]))
    kept = [{"favour": torch.tensor([5.0, 0, 0, 0])}, {"favour": torch.zeros(4)}]
    judge = Judge(
        Scored(Options(), small_task()),
        test,
        2,
        parts=[torch.tensor([0, 1]), torch.tensor([2, 3, 4])],
        private_of=lambda client: {**kept[client], "seen": torch.zeros(4)},
        candidates=[torch.tensor([0, 1]), torch.tensor([2, 3])],
        for_new=Scored(Options(), small_task()),
        new=new,
    )
    judged = judge.judge({}, {})
    assert judged.answers.tolist() == [0, 0, 2, 2, 3]
    assert judged.figures["per_client_accuracy"] == pytest.approx([50.0, 100 * 2 / 3])
    hits = judge.judge_sets(judged, {}, {})
    assert hits.owner.tolist() == [0, 0, 1, 1, 1]
    assert hits.own.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert hits.local.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0]  # as base, of the owner alone
    assert hits.base.tolist() == [0.0, 0.5, 0.0, 0.0, 1.0]  # client 0 favours class 0: 5 < 6
    assert hits.new.tolist() == [0.5, 1.0]  # client 0 says 0 for the first, 5 > 3
    found = set_percentages(hits)
    assert found["own"] == pytest.approx((50 + 200 / 3) / 2) == judged.figures["accuracy"]
    assert found["local"] == pytest.approx((0 + 100 / 3) / 2)
    assert found["base"] == pytest.approx(30.0)
    assert found["new"] == pytest.approx(75.0)


@pytest.mark.parametrize("kept", [True, False])
def test_local_takes_the_model_of_the_images_owner(kept: bool) -> None:
    """Client 1 has no images, so that the second model is of client 2; without models of their own, all share one."""
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.5, 0.0], [1.0, 0.0, 0.9, 0.0]])
    test = Samples({"features": scores}, torch.tensor([0, 2, 2]))
    favours = [torch.zeros(4), torch.tensor([9.0, 0, 0, 0]), torch.tensor([0, 0, 0.3, 0])]
    judge = Judge(
        Scored(Options(), small_task()),
        test,
        2,
        parts=[torch.tensor([0]), torch.tensor([], dtype=torch.long), torch.tensor([1, 2])],
        private_of=lambda client: {"favour": favours[client]} if kept else {},
        candidates=[torch.tensor([0, 1]), torch.tensor([], dtype=torch.long), torch.tensor([2, 3])],
        for_new=Scored(Options(), small_task()),
        new=test,
    )
    hits = judge.judge_sets(judge.judge({}, {}), {}, {})
    assert hits.owner.tolist() == [0, 2, 2]
    assert hits.own.tolist() == [1.0, 1.0, 1.0]
    # With 0.3 for class 2: 0.8 < 1 and 1.2 > 1.
    assert hits.local.tolist() == [1.0, 0.0, float(kept)]
    assert hits.base.tolist() == [1.0, 0.0, 0.5 * kept]
    assert set_percentages(hits)["local"] == pytest.approx((100 + 50 * kept) / 2)


def scored(rows: list[list[float]], labels: list[int]) -> Samples:
    return Samples({"features": torch.tensor(rows)}, torch.tensor(labels))


def one_hot(*answers: int) -> list[list[float]]:
    return torch.eye(4)[list(answers)].tolist()


def test_one_model_is_judged_on_the_whole_test() -> None:
    test = scored(one_hot(0, 1, 1, 3), [0, 1, 2, 3])
    judged = Judge(Scored(Options(), small_task()), test, 3).judge({"favour": torch.zeros(4)}, {})
    assert judged.answers.tolist() == [0, 1, 1, 3]
    assert judged.confusion.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert judged.figures["accuracy"] == 75.0
    assert judged.shares.tolist() == pytest.approx([np.e / (np.e + 3)] * 4)


def test_a_model_is_the_mean_of_the_kept_updates_with_the_methods_weights() -> None:
    class Weighted(Scored):
        def client_weights(self, last: Any) -> Any:
            return {2: 1.0, 5: 3.0}

    judge = Judge(Weighted(Options(), small_task()), scored([[0.0, 0, 0, 2], [0.0, 0, 0, 4]], [3, 3]), 2)
    last = {client: {"favour": torch.tensor([0.0, value, 0, 0])} for client, value in ((2, 0.0), (5, 4.0))}
    assert judge.judge({"favour": torch.zeros(4)}, last).answers.tolist() == [1, 3], "class 1 has 3 of them"


def test_a_clients_own_tensors_replace_the_shared_ones_and_rows_of_nobody_are_not_answered() -> None:
    judge = Judge(
        Scored(Options(), small_task()),
        scored(one_hot(0, 0, 0), [1, 0, 2]),
        2,
        parts=[torch.tensor([0]), torch.tensor([1])],
        private_of=lambda client: {"favour": torch.tensor([0.0, 9, 0, 0])} if client == 0 else {},
    )
    judged = judge.judge({"favour": torch.zeros(4)}, {})
    assert judged.answers.tolist() == [1, 0, -1]
    assert judged.figures["accuracy"] == 100.0
    assert judged.confusion.sum() == 2


def test_models_of_clients_have_nothing_but_the_tensors_that_are_given() -> None:
    judge = Judge(
        Scored(Options(), small_task()),
        scored(one_hot(0, 0), [1, 2]),
        2,
        parts=[torch.tensor([0]), torch.tensor([1])],
        private_of=lambda client: {"favour": torch.tensor([0.0, 0, 0, 99])},
    )
    models = [{"favour": torch.tensor([0.0, 9, 0, 0])}, {"favour": torch.tensor([0.0, 0, 9, 0])}]
    assert judge.judge_models(models.__getitem__).answers.tolist() == [1, 2]


def test_zero_shot_is_the_class_of_the_nearest_text_whatever_the_method() -> None:
    task = small_task()
    test = Samples({"features": task.text_features[[2, 0, 0]]}, torch.tensor([2, 0, 1]))
    judged = Judge(Scored(Options(), task), test, 2).judge_zero_shot()
    assert judged is not None
    assert judged.answers.tolist() == [2, 0, 0]
    assert (
        Judge(Scored(Options(), task), Samples({"tokens": torch.zeros(1)}, torch.tensor([0])), 2).judge_zero_shot()
        is None
    )


def test_equal_conditions_are_judged_once_and_each_has_its_figures() -> None:
    """Two of four are right without the image, macro-F1 by hand; three conditions are two."""
    asked = []

    class Counted(Scored):
        def predict(self, tensors: Any, inputs: Any) -> Any:
            asked.append(len(inputs["features"]))
            return super().predict(tensors, inputs)

    whole, half = scored(one_hot(0, 1, 2, 3), [0, 1, 2, 3]), scored(one_hot(0, 1, 0, 1), [0, 1, 2, 3])
    conditions = {"both": whole, "image missing": half, "text missing": whole}
    found = Judge(Counted(Options(), small_task()), half, 4, conditions=conditions).judge_conditions({}, {})
    assert [each.condition for each in found] == list(conditions)
    assert [each.accuracy for each in found] == [100.0, 50.0, 100.0]
    assert found[1].macro_f1 == pytest.approx(100 * (2 / 3 + 2 / 3 + 0 + 0) / 4)
    assert found[0].macro_f1_interval == [100.0, 100.0]
    assert found[1].macro_f1_interval is not None
    low, high = found[1].macro_f1_interval
    assert low < found[1].macro_f1 < high
    assert asked == [4, 4]


def test_the_sets_of_the_pretrained_model_need_no_clients_tensors() -> None:
    task = small_task()
    test = Samples({"features": task.text_features[[0, 1, 3]]}, torch.tensor([0, 2, 3]))
    judge = Judge(
        Scored(Options(), task), test, 2, parts=[torch.tensor([0, 1])], for_new=Scored(Options(), task), new=test
    )
    judged = judge.judge_zero_shot()
    assert judged is not None
    hits = judge.judge_sets_zero_shot(judged)
    assert hits.owner.tolist() == [0, 0, -1]
    assert hits.own.tolist() == [1.0, 0.0, 0.0]
    assert hits.local.tolist() == [1.0, 0.0, 0.0], "a row of nobody has none"
    assert hits.base.tolist() == hits.new.tolist() == [1.0, 0.0, 1.0]
