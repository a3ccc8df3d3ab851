"""One user's questions: in order, in batches, with what the method remembers of them."""

from dataclasses import replace

import pytest
import torch
from helpers.small import small_method, small_samples, small_task

from fedvl.evaluation.predict import answer_all, predict_classes
from fedvl.methods.base import Answer, Method, Options, Samples
from fedvl.methods.fedavg_nn import FedAvgNN, NetworkOptions


class Remembering(Method):
    """Answers with how many images it has seen before this batch, so that order and batches show."""

    def answer(self, tensors, session, inputs):
        seen = int(session.get("seen", torch.tensor(0)))
        count = len(inputs["features"])
        scores = torch.nn.functional.one_hot(torch.full((count,), seen % 4), 4).float()
        return Answer(scores, {"seen": torch.tensor(seen + count)}, torch.zeros(count), torch.full((count,), -1))


def remembering():
    return Remembering(Options(), small_method("zero-shot").task)


def questions(count):
    return Samples({"features": torch.zeros(count, 6)}, torch.zeros(count, dtype=torch.long))


def test_a_session_goes_from_batch_to_batch():
    assert answer_all(remembering(), {}, questions(7), 3).tolist() == [0, 0, 0, 3, 3, 3, 2]
    assert answer_all(remembering(), {}, questions(5), 1).tolist() == [0, 1, 2, 3, 0]


def test_every_call_is_a_new_session():
    method = remembering()
    assert answer_all(method, {}, questions(3), 3).tolist() == answer_all(method, {}, questions(3), 3).tolist()


def test_the_first_class_wins_a_tie():
    class Undecided(Method):
        def predict(self, tensors, inputs):
            return torch.zeros(len(inputs["features"]), 4)

    assert answer_all(Undecided(Options(), remembering().task), {}, questions(2), 9).tolist() == [0, 0]


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_a_method_without_memory_answers_the_same_in_any_batches(batch_size):
    method = small_method("zero-shot")
    samples = small_samples(method, 40)
    expected = method.predict({}, samples.inputs).argmax(-1)
    assert answer_all(method, {}, samples, batch_size).tolist() == expected.tolist()


def test_each_row_gets_the_class_whose_text_is_nearest():
    method = small_method("zero-shot")
    samples = Samples({"features": method.task.text_features[[0, 1, 1, 3]]}, torch.tensor([0, 1, 2, 3]))
    assert predict_classes(method, {}, samples, 2).classes.tolist() == [0, 1, 1, 3]


def test_no_gradients_are_kept():
    class Watching(Method):
        def predict(self, tensors, inputs):
            assert not torch.is_grad_enabled()
            return inputs["features"][:, :4]

    assert len(answer_all(Watching(Options(), remembering().task), {}, questions(2), 2)) == 2


def test_a_method_that_clusters_is_judged_by_its_clusters():
    class Planted(FedAvgNN):
        def represent(self, tensors, inputs):
            return inputs["pixels"].float().mean((1, 2, 3))[:, None]  # the brightness is the class, in another order

    method = Planted(NetworkOptions(), replace(small_task(), protocol="open"))
    samples = small_samples(method, 12)
    brightness = torch.tensor([90, 0, 200, 255], dtype=torch.uint8)[samples.labels]
    samples = replace(
        samples, inputs={"pixels": torch.zeros_like(samples.inputs["pixels"]) + brightness[:, None, None, None]}
    )
    assert predict_classes(method, {}, samples, batch_size=5).classes.tolist() == samples.labels.tolist()


def test_of_several_datasets_an_image_is_asked_among_the_classes_of_its_own():
    method = small_method("zero-shot")
    texts = method.task.text_features
    method.task = replace(method.task, origins=("x", "x", "y", "y"))
    samples = Samples({"features": texts}, torch.tensor([2, 3, 0, 1]))  # each looks like a class of the other dataset
    scores = texts @ texts.T
    expected = [2 + int(scores[0, 2:].argmax()), 2 + int(scores[1, 2:].argmax())]
    expected += [int(scores[2, :2].argmax()), int(scores[3, :2].argmax())]
    assert predict_classes(method, {}, samples, 3).classes.tolist() == expected
