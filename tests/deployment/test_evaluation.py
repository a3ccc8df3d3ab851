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
from fedvl.deployment.remote import SiteCounts
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import bin_edges, count
from fedvl.evaluation.noisy_counts import coarse
from fedvl.runs.contents import Federation
from fedvl.runs.evaluation import AT_HALF, ON_TEST, read_thresholds
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare
from fedvl.tensors import digest

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
        self.paired: dict[int | None, Any] = {}
        self.noisy: dict[int | None, Any] = {}

    def evaluate(self, number, request, classes):
        self.asked.append((number, request, classes))
        return {client: SiteCounts(counts, self.paired.get(client)) for client, counts in self.counts.items()}

    def evaluate_with_noise(self, number, request, classes):
        self.asked.append((number, request, classes))
        return self.noisy

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
    shares: Any = read_thresholds(folder)
    assert [float(bin_edges()[bin_]) for bin_ in request["thresholds"]] == pytest.approx(list(shares.shares.values()))
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
    with pytest.raises(FedVLError, match="send no counts without noise; say how much it may tell: --epsilon"):
        evaluate_sites(folder, 1, Silent())
    (folder.path / "result.json").unlink()
    with pytest.raises(FedVLError, match="is not finished; go on with it by fedvl resume"):
        evaluate_sites(RunFolder(folder.path), 1, Silent())


def test_thresholds_are_those_that_go_with_the_model_or_one_half(folder, connect, prepared):
    classes = len(prepared.class_names)
    engine = connect(Engine({0: counts_of(5, 1, classes)}, [0], []))
    (folder.path / "thresholds.json").unlink()
    found: Any = evaluate_sites(folder, 1, Silent())
    assert found.thresholds_from == AT_HALF
    assert "thresholds" not in engine.asked[1][1], "sites keep their own"
    assert found.pooled.classes[0].threshold is None, "all images are of class 0"


# --- two models


@pytest.fixture
def other(folder, tmp_path):
    """Another run of the same federation, with another model."""
    path = shutil.copytree(folder.path, tmp_path / "before")
    found = RunFolder(path)
    found.write_federation(Federation(federation=str(tmp_path / "clinic"), run="1" * 32))
    tensors, last = found.tensors()
    found.finish(found.result, found.examples, {name: tensor + 1 for name, tensor in tensors.items()}, last)
    return RunFolder(path)


def test_two_models_are_compared_by_the_sum_of_what_sites_give(folder, other, connect, prepared):
    """Of 30 images 8 are right with this model only, 1 with the other only: exact p = 2 (1 + 9) / 2^9."""
    classes = len(prepared.class_names)
    counts = counts_of(5, 1, classes)
    engine = connect(Engine({0: counts, 1: counts, 2: counts}, [0, 1, 2], []))
    engine.paired = {0: np.array([10, 6, 1, 1]), 1: np.array([5, 2, 0, 5]), 2: np.full(4, -1)}
    found: Any = evaluate_sites(folder, 1, Silent(), other)
    _, (_, request, _) = engine.asked
    assert {name: bytes(tensor.tolist()).hex() for name, tensor in request.items() if name != "thresholds"} == {
        "model": digest(folder.tensors()[0]),
        "other_run": "1" * 32,
        "other_model": digest(other.tensors()[0]),
    }
    against = found.against
    assert (against.other, against.images, against.gained, against.lost) == ("before", 30, 8, 1)
    assert against.p == pytest.approx(20 / 2**9)
    assert against.difference.value == pytest.approx(100 * 7 / 30)
    assert found.refused == [
        "west: its counts of both models are withheld; one is of few images (least_cell of its policy)."
    ]


def test_without_counts_of_both_models_there_is_no_comparison(folder, other, connect, prepared):
    engine = connect(Engine({0: counts_of(5, 1, len(prepared.class_names))}, [0], []))
    engine.paired = {0: np.full(4, -1)}
    assert evaluate_sites(folder, 1, Silent(), other).against is None
    engine.paired = {0: np.zeros(4, np.int64)}
    assert evaluate_sites(folder, 1, Silent(), other).against is None


def test_only_runs_of_the_same_sites_and_classes_are_compared(folder, other, connect, tmp_path):
    other.write_federation(Federation(federation=str(tmp_path / "other clinic"), run="1" * 32))
    with pytest.raises(FedVLError, match="is of another federation, whose sites have other images"):
        evaluate_sites(folder, 1, Silent(), RunFolder(other.path))
    (other.path / "federation.json").unlink()
    with pytest.raises(FedVLError, match="is not one between machines; give a run of the same federation"):
        evaluate_sites(folder, 1, Silent(), RunFolder(other.path))


def test_a_run_of_secure_sums_is_not_compared_outside_of_one(folder, other):
    federation = other.experiment.federation.model_copy(update={"secure_sum": True})
    other.experiment = other.experiment.model_copy(update={"federation": federation})
    with pytest.raises(FedVLError, match="clients send counts of both in a secure sum only"):
        evaluate_sites(folder, 1, Silent(), other)


def test_figures_of_counts_with_noise_say_how_much_it_is(folder, other, connect, prepared):
    classes = len(prepared.class_names)
    private = folder.experiment.privacy.model_copy(update={"unit": "client"})
    folder.experiment = folder.experiment.model_copy(update={"privacy": private})
    engine = connect(Engine({}, [0, 1], []))
    engine.noisy = {client: coarse(counts_of(60, 20, classes)) for client in (0, 1)}
    found: Any = evaluate_sites(folder, 1, Silent(), noise=(4.0, 1e-5))
    assert engine.asked[1][1]["noise"].tolist() == [4.0, 1e-5]
    assert (found.epsilon, found.delta) == (4.0, 1e-5)
    assert found.pooled.accuracy.value == pytest.approx(75.0)
    assert found.pooled.accuracy.noise > 0
    assert set(found.by_site) == {"north", "south"}
    assert found.by_site["north"].accuracy.noise > found.pooled.accuracy.noise
    with pytest.raises(FedVLError, match="leave out --epsilon or --against"):
        evaluate_sites(folder, 1, Silent(), other, (4.0, 1e-5))
