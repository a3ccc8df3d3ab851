"""Several datasets in one federation: whose classes, whose images, and who is asked among which."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import OPENER, prepare, run

from fedvl.config import DataConfig
from fedvl.data.inputs import embed_names
from fedvl.data.protocols import Labels, base_to_new, closed, number_domains, number_origins, personal
from fedvl.data.sources import open_dataset
from fedvl.data.stores import unite
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.methods.parts.losses import CLASS_LIST
from fedvl.report.page import write_report
from fedvl.report.tables import dataset_rows
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

BOTH = "cifar10-mini+emoji-mini"


def test_the_classes_of_one_dataset_follow_those_of_another() -> None:
    cifar, emoji, both = (open_dataset(name) for name in ("cifar10-mini", "emoji-mini", BOTH))
    assert both.name == BOTH
    assert both.class_names == cifar.class_names + emoji.class_names
    assert both.origins == ("cifar10-mini",) * 10 + ("emoji-mini",) * 9
    for part in ("train", "test"):
        one, other, split = cifar.splits[part], emoji.splits[part], both.splits[part]
        assert split.labels.tolist() == [*one.labels.tolist(), *(other.labels + 10).tolist()]
        assert split.domains == ("cifar10-mini",) * len(one) + ("emoji-mini",) * len(other)
        for own, at, row in ((one, 0, 0), (one, len(one) - 1, len(one) - 1), (other, 3, len(one) + 3)):
            assert np.array_equal(np.asarray(own.read(at)), np.asarray(split.read(row)))
            assert own.describe(at) == split.describe(row)


def test_what_cannot_be_joined_is_said(tmp_path: Any) -> None:
    cifar = open_dataset("cifar10-mini")
    with pytest.raises(FedVLError, match="names a dataset twice"):
        unite([cifar, cifar])
    with pytest.raises(FedVLError, match="no dataset, folder or file 'nothing'"):
        open_dataset("cifar10-mini+nothing")
    with pytest.raises(FedVLError, match=r"leave data\.classes out"):
        open_dataset(BOTH, classes=("cat", "dog"))
    with pytest.raises(FedVLError, match="The open protocol is for one dataset"):
        prepare({"data": {"dataset": BOTH}, "method": {"name": "fedclip"}, "evaluation": {"protocol": "open"}})
    with pytest.raises(FedVLError, match="Pseudo-labels would be of classes of all datasets"):
        prepare({"data": {"dataset": BOTH}, "method": {"name": "fst-cbdg"}})
    with pytest.raises(FedVLError, match="which partition 'shards:2' cannot divide"):
        prepare({"data": {"dataset": BOTH, "partition": "shards:2"}})


def two_datasets(classes: tuple[int, int] = (4, 6)) -> Labels:
    """Six training and two test images of each class; the second dataset's name comes first in the alphabet."""
    total = sum(classes)
    origins = ["zoo"] * classes[0] + ["art"] * classes[1]
    train, test = np.repeat(np.arange(total), 6), np.repeat(np.arange(total), 2)
    domains = number_domains([origins[label] for label in train], [origins[label] for label in test])
    return Labels(train, test, total, domains, number_origins(origins))


def test_every_client_holds_classes_of_one_dataset_and_knows_of_these_alone() -> None:
    labels = two_datasets()
    assignment = personal(labels, DataConfig(clients=5, partition="disjoint"), 0)
    # By name "art" (6 classes) is first: clients go to 6, 4, then to the larger of 6/1, 4/1; 6/2, 4/1; 6/2, 4/2
    owned = [set(labels.train[rows].tolist()) for rows in assignment.clients]
    assert [len(own) for own in owned] == [2, 2, 2, 2, 2]
    assert set.union(*owned[:3]) == {4, 5, 6, 7, 8, 9}
    assert set.union(*owned[3:]) == {0, 1, 2, 3}
    assert [set(own.tolist()) for own in assignment.lists] == owned
    assert [set(own.tolist()) for own in assignment.candidates] == owned
    assert [set(labels.test[assignment.queried][part].tolist()) for part in assignment.parts] == owned
    whole = closed(labels, DataConfig(clients=2, partition="iid"), 0)
    assert [own.tolist() for own in whole.lists] == [[4, 5, 6, 7, 8, 9], [0, 1, 2, 3]]
    assert whole.candidates == []  # the whole test is asked, each image among its dataset's classes


def test_each_dataset_is_halved_and_dealt_to_clients_of_its_own() -> None:
    labels = two_datasets((4, 8))
    assignment = base_to_new(labels, DataConfig(clients=3), 0)
    assert sorted(assignment.trained_classes.tolist()) == [0, 1, 4, 5, 6, 7]
    assert assignment.new is not None
    assert sorted(assignment.new.classes.tolist()) == [2, 3, 8, 9, 10, 11]
    art, more_art, zoo = (set(own.tolist()) for own in assignment.candidates)
    assert art | more_art == {4, 5, 6, 7}
    assert len(art) == len(more_art) == 2
    assert zoo == {0, 1}
    assert [set(labels.train[rows].tolist()) for rows in assignment.clients] == [art, more_art, zoo]
    with pytest.raises(FedVLError, match="use 3 or fewer"):
        base_to_new(labels, DataConfig(clients=4), 0)
    with pytest.raises(FedVLError, match="one of 2 datasets; use 2 or more clients"):
        base_to_new(labels, DataConfig(clients=1), 0)


SETTINGS: dict[str, Any] = {
    "data": {"dataset": BOTH, "partition": "disjoint", "clients": 4, "shots": 2, "test_shots": 4},
    "federation": {"rounds": 2},
}


def test_every_training_image_carries_the_class_list_of_its_client() -> None:
    prepared = prepare(SETTINGS)
    known = prepared.training.samples.inputs[CLASS_LIST]
    for rows in prepared.training.rows:
        held = torch.unique(prepared.training.samples.labels[rows])
        assert 4 <= len(held) <= 5
        expected = torch.isin(torch.arange(19), held)
        assert bool((known[rows] == expected).all())
        assert prepared.method.task.origins[int(held[0])] == prepared.method.task.origins[int(held[-1])]


def test_class_lists_are_the_same_in_closed_form_and_one_by_one() -> None:
    batched = run(SETTINGS).federation.shared
    alone = run({**SETTINGS, "federation": {"rounds": 2, "one_by_one": True}}).federation.shared
    assert all(torch.allclose(batched[name], alone[name], atol=1e-5) for name in batched)
    prepared = prepare(SETTINGS)
    start = prepared.method.task.text_features
    everything = run({**SETTINGS, "data": {**SETTINGS["data"], "dataset": "cifar10-mini"}}).federation.shared["weight"]
    assert not torch.allclose(batched["weight"][:10] - start[:10], everything - start[:10], atol=1e-3)


def test_an_image_is_asked_among_the_classes_of_its_dataset() -> None:
    """Zero-shot, against scores of each dataset alone."""
    finished = run({**SETTINGS, "method": {"name": "zero-shot"}})
    judged = finished.judge.judge_zero_shot()
    assert judged is not None
    test, task = finished.prepared.test.samples, finished.prepared.queried.task
    for name, first, last in (("cifar10-mini", 0, 10), ("emoji-mini", 10, 19)):
        mine = (test.labels >= first) & (test.labels < last)
        classes = open_dataset(name).class_names
        texts = torch.nn.functional.normalize(
            embed_names(classes, task.templates, task.clip, str(test.labels.device)), dim=-1
        )
        expected = (test.inputs["features"][mine] @ texts.T).argmax(-1) + first
        assert judged.answers[mine.numpy()].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("method", "protocol"), [("linear", "closed"), ("promptfl", "base-to-new"), ("fedtpg", "personal")]
)
def test_a_run_on_two_datasets_says_who_is_asked_among_what(tmp_path: Any, method: str, protocol: str) -> None:
    settings = {**SETTINGS, "method": {"name": method}, "evaluation": {"protocol": protocol, "examples": 0}}
    settings["federation"] = {"rounds": 1}
    with RunFolder.create(tmp_path / "run", resolve_experiment(settings)) as folder:
        result = complete(folder, Silent(), OPENER)
        assert folder.result == result  # as it is read back, checked
    cifar, emoji = result.datasets
    assert (cifar.dataset, emoji.dataset) == ("cifar10-mini", "emoji-mini")
    right, names = result.right or "", result.class_names
    assert len(names) == (10 if protocol == "base-to-new" else 19)
    assert cifar.test_images + emoji.test_images == len(right)
    mean = (cifar.accuracy * cifar.test_images + emoji.accuracy * emoji.test_images) / len(right)
    assert mean == pytest.approx(100 * right.count("1") / len(right))
    # no image of one dataset gets a name of the other
    confusion, first = np.array(result.confusion), len(cifar.class_names)
    assert not confusion[:first, first:].any()
    assert not confusion[first:, :first].any()
    lists = result.class_lists
    assert len(lists) == (0 if protocol == "closed" else 4)
    for own in lists:
        assert set(own) <= set(cifar.class_names) or set(own) <= set(emoji.class_names)
    if protocol == "base-to-new":
        assert result.candidate_sets["base"] == [cifar.class_names, emoji.class_names]
        assert [len(own) for own in result.candidate_sets["new"]] == [5, 4]
    assert len(dataset_rows(result)) == 3
    page = write_report(tmp_path / "run").read_text() if method == "linear" else "Each dataset"
    assert "Each dataset" in page
