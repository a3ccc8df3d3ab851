"""Every client asks its own model about its own images."""

import numpy as np
import pytest
import torch
from helpers.small import small_federation, small_task

from fedvl.config import DataConfig
from fedvl.data.protocols import Labels, closed, personal
from fedvl.evaluation.personal import personal_answers, personal_confusions, personal_figures
from fedvl.federation.records import RoundFigures
from fedvl.methods.base import Method, Options, Samples


class Told(Method):
    """Answers with the class that the client's own tensor names."""

    def predict(self, tensors, inputs):
        return torch.nn.functional.one_hot(tensors["answer"], 4).float().expand(len(inputs["features"]), -1)


def test_each_client_is_judged_by_its_own_tensors_and_clients_count_alike():
    samples = Samples({"features": torch.zeros(6, 6)}, torch.tensor([0, 0, 0, 1, 1, 2]))
    parts = [torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5]), torch.tensor([], dtype=torch.long)]
    answers = [0, 2, 3]
    given = personal_answers(
        Told(Options(), small_task()), lambda client: {"answer": torch.tensor(answers[client])}, samples, parts, 3
    )
    assert given.classes.tolist() == [0, 0, 0, 0, 2, 2]
    assert given.shares.tolist() == pytest.approx([np.e / (np.e + 3)] * 6)
    matrices = personal_confusions(samples, parts, given.classes, 4)
    figures = personal_figures(matrices)
    assert figures["per_client_accuracy"] == [75.0, 50.0, None]  # the third has nothing to ask
    assert figures["accuracy"] == 62.5
    assert figures["weighted_accuracy"] == pytest.approx(100 * 4 / 6)
    assert figures["worst_client_accuracy"] == figures["worst_tenth_accuracy"] == 50.0
    assert figures["client_deviation"] == 12.5
    together = np.sum(matrices, axis=0)
    assert together[0].tolist() == [3, 0, 0, 0]
    assert together[1].tolist() == [1, 0, 1, 0]
    assert figures["macro_recall"] == pytest.approx(100 * (1 + 0 + 1) / 3)


def test_the_test_split_is_dealt_whole_and_by_the_clients_own_classes():
    train, test = np.repeat(np.arange(5), 40), np.tile(np.arange(5), 30)
    data = DataConfig(clients=4, partition="quantity:0.5")
    deal, plain = personal(Labels(train, test, 5), data, 0), closed(Labels(train, test, 5), data, 0)
    assert sorted(np.concatenate(deal.parts).tolist()) == list(range(150))
    for rows, part in zip(deal.clients, deal.parts, strict=True):
        assert set(test[part].tolist()) <= set(train[rows].tolist())
    assert all(np.array_equal(one, other) for one, other in zip(deal.clients, plain.clients, strict=True))
    assert plain.parts == []


class Counting(Method):
    """A private tensor that says how often its client trained."""

    def start(self, generator):
        return {"w": torch.zeros(2)}

    def join(self, samples, generator):
        return {"rounds": torch.zeros(())}

    def objective(self, tensors, batch):
        return tensors["w"].sum(), {"rounds": tensors["rounds"] + 1}


def test_a_round_is_judged_with_the_private_tensors_that_it_left():
    federation = small_federation(Counting(Options(), small_task()), {"batch_size": 100, "local_epochs": 1})
    seen = []

    def look(shared, kept, number):
        seen.append(float(federation.engine.private_of(0)["rounds"]))
        return RoundFigures()

    federation.run(look, lambda record: None)
    assert seen == [1.0, 2.0, 3.0]


def test_a_client_that_never_took_part_asks_with_what_it_would_begin_with():
    engine = small_federation(Counting(Options(), small_task())).engine
    assert float(engine.private_of(3)["rounds"]) == 0
    assert engine.private_of(1) == {}  # it has no data
    assert engine.private == {}
