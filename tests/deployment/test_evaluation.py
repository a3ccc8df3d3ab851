"""The server's part of an evaluation at sites: counts are added up, and who is missing is named."""

import shutil
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedvl.deployment import evaluation
from fedvl.deployment.evaluation import SITES_TEST, evaluate_sites
from fedvl.deployment.own_counts import request_of
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import count
from fedvl.runs.contents import Federation
from fedvl.runs.evaluation import AT_HALF, ON_TEST
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare

NAMES = ["north", "south", "west"]


@pytest.fixture
def folder(folder_of, tmp_path):
    path = shutil.copytree(folder_of("linear"), tmp_path / "run")
    RunFolder(path).write_federation(Federation(federation=str(tmp_path / "clinic"), run="0" * 32))
    return RunFolder(path)


@pytest.fixture(scope="module")
def prepared(folder_of):
    return prepare(RunFolder(folder_of("linear")).experiment, Silent(), splits=("test",))


class Engine:
    """Sites that answer with these counts, or are refused."""

    def __init__(self, counts: dict[int | None, Any], reporters: list[int], refusals: list[Any]) -> None:
        self.names, self.counts, self.reporters, self.refusals = NAMES, counts, reporters, refusals
        self.asked: list[Any] = []

    def evaluate(self, number, request, classes):
        self.asked.append((number, request, classes))
        return self.counts

    def refused(self):
        return self.refusals


def counts_of(right: int, wrong: int, classes: int) -> Any:
    """Images of class 0, so many taken for class 0 and so many for class 1."""
    shares = np.full((right + wrong, classes), 0.01)
    shares[:right, 0] = shares[right:, 1] = 1 - 0.01 * (classes - 1)
    return count(np.zeros(right + wrong, np.int64), shares)


@pytest.fixture
def connect(monkeypatch, prepared):
    def with_(engine: Engine) -> Engine:
        @contextmanager
        def connected(folder, display, notes):
            assert notes == "evaluation-sums.json", "its secure sums have a file of their own"
            yield engine, prepared

        monkeypatch.setattr(evaluation, "connected", connected)
        monkeypatch.setattr(evaluation, "read_federation", lambda place: place)
        monkeypatch.setattr(evaluation, "wait_for_all", lambda engine, place: engine.asked.append(place.name))
        return engine

    return with_


def test_counts_of_sites_are_added_up_and_each_has_its_figures(folder, connect, prepared):
    classes = len(prepared.class_names)
    refusal = SimpleNamespace(client=2, reason="it has no such model.")
    both: dict[int | None, Any] = {1: counts_of(1, 3, classes), 0: counts_of(5, 1, classes)}
    engine = connect(Engine(both, [1, 0], [refusal, SimpleNamespace(client=None, reason="")]))
    found: Any = evaluate_sites(folder, 3, Silent())
    waited, (number, request, asked) = engine.asked
    assert (waited, number, asked) == ("clinic", 3, classes)
    assert torch.equal(request["model"], request_of(folder.tensors()[0])["model"])
    assert found.pooled.accuracy.value == pytest.approx(60.0)
    assert {site: each.accuracy.value for site, each in found.by_site.items()} == pytest.approx(
        {"north": 100 * 5 / 6, "south": 25.0}
    )
    assert (found.sites, found.missing, found.refused) == (
        ["north", "south"],
        ["west"],
        ["west: it has no such model."],
    )
    assert (found.images_from, found.thresholds_from, found.secure_sum) == (SITES_TEST, ON_TEST, False)


def test_a_secure_sum_has_no_figures_of_a_site(folder, connect, prepared):
    connect(Engine({None: counts_of(5, 5, len(prepared.class_names))}, [2, 0], []))
    found: Any = evaluate_sites(folder, 1, Silent())
    assert found.by_site == {}
    assert (found.sites, found.missing) == (["north", "west"], ["south"])
    assert found.pooled.accuracy.value == 50.0


@pytest.mark.parametrize(
    "refusals, said",
    [
        ([], "None was connected, or none has test images."),
        (
            [SimpleNamespace(client=1, reason="its policy forbids it.")],
            "No site sent counts. south: its policy forbids it.",
        ),
    ],
)
def test_without_counts_the_reasons_are_said(folder, connect, refusals, said):
    connect(Engine({}, [], refusals))
    with pytest.raises(FedVLError) as error:
        evaluate_sites(folder, 1, Silent())
    assert str(error.value).endswith(said)


def test_a_run_that_is_unfinished_or_private_is_refused(folder, connect):
    private = folder.experiment.privacy.model_copy(update={"unit": "client"})
    folder.experiment = folder.experiment.model_copy(update={"privacy": private})
    with pytest.raises(FedVLError, match="The counts of an evaluation have no noise"):
        evaluate_sites(folder, 1, Silent())
    (folder.path / "result.json").unlink()
    with pytest.raises(FedVLError, match="is not finished; go on with it by fedvl resume"):
        evaluate_sites(RunFolder(folder.path), 1, Silent())


def test_thresholds_are_those_that_go_with_the_model_or_one_half(folder, connect, prepared):
    classes = len(prepared.class_names)
    connect(Engine({0: counts_of(5, 1, classes)}, [0], []))
    (folder.path / "thresholds.json").unlink()
    found: Any = evaluate_sites(folder, 1, Silent())
    assert found.thresholds_from == AT_HALF
    assert found.pooled.classes[0].threshold is None, "all images are of class 0"
