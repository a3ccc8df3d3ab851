"""A client counts its own test images by its own finished model, and by no other."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedvl.deployment.own_counts import MODEL_HASH, FinishedRun, as_tensors, own_counts, request_of, requested_noise
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import count, shapes_of_counts, withheld
from fedvl.evaluation.noisy_counts import coarse
from fedvl.federation.accounting import epsilon_of
from fedvl.runs.evaluation import FROM_SERVER, read_thresholds, shares_of
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare
from fedvl.serve.model import TrainedModel
from fedvl.tensors import digest


@pytest.fixture(scope="module")
def folder(folder_of, tmp_path_factory):
    return shutil.copytree(folder_of("linear"), tmp_path_factory.mktemp("own") / "run")


@pytest.fixture(scope="module")
def prepared(folder):
    return prepare(RunFolder(folder).experiment, Silent(), splits=("test",))


@pytest.fixture(scope="module")
def request_(folder):
    return request_of(RunFolder(folder).tensors()[0])


def no_other(run):
    pytest.fail("no other run was requested")


def equal(found, counts):
    return found.keys() == counts._asdict().keys() and all(
        np.array_equal(found[name].numpy(), table) for name, table in counts._asdict().items()
    )


def test_a_model_is_named_by_its_digest(folder):
    shared = RunFolder(folder).tensors()[0]
    found = request_of(shared)
    assert list(found) == [MODEL_HASH]
    assert bytes(found[MODEL_HASH].tolist()).hex() == digest(shared)


def test_counts_are_those_of_its_test_images(prepared, folder, request_):
    run = RunFolder(folder)
    labels, shares = shares_of(prepared, run.tensors()[0], {}, run)
    assert equal(own_counts(FinishedRun(prepared, folder), no_other, request_, 1), count(labels, shares))
    assert equal(own_counts(FinishedRun(prepared, folder), no_other, request_, 5), withheld(labels, shares, 5))
    found: Any = own_counts(FinishedRun(prepared, folder), no_other, request_, 1)
    assert found["confusion"].sum() == len(prepared.test.samples) > 0


def test_without_test_images_there_is_nothing_but_zeros_in_a_secure_sum(prepared, folder, request_):
    none = prepared.test.samples.take(torch.zeros(0, dtype=torch.long))
    untested = replace(prepared, test=replace(prepared.test, samples=none))
    assert own_counts(FinishedRun(untested, folder), no_other, request_, 5) is None
    zeros: Any = own_counts(FinishedRun(untested, folder), no_other, request_, 1)
    assert {name: tuple(table.shape) for name, table in zeros.items()} == shapes_of_counts(len(prepared.class_names))
    assert not any(table.any() for table in zeros.values())


def test_another_model_is_not_evaluated(prepared, folder, request_):
    crafted = request_of({name: tensor + 1 for name, tensor in RunFolder(folder).tensors()[0].items()})
    of_floats = {MODEL_HASH: torch.zeros(8, dtype=torch.bfloat16)}
    for request in (crafted, of_floats):
        with pytest.raises(FedVLError, match="requested of another model than the one that this run ended with"):
            own_counts(FinishedRun(prepared, folder), no_other, request, 1)
    for request in ({}, {**request_, "more": torch.zeros(1)}, {"other": request_[MODEL_HASH]}):
        with pytest.raises(FedVLError, match="has an unexpected format"):
            own_counts(FinishedRun(prepared, folder), no_other, request, 1)


def test_a_run_that_is_not_finished_has_no_model_to_evaluate(prepared, folder, request_, tmp_path):
    unfinished = shutil.copytree(folder, tmp_path / "run")
    (unfinished / "result.json").unlink()
    with pytest.raises(FedVLError, match="This client has not finished that run"):
        own_counts(FinishedRun(prepared, unfinished), no_other, request_, 1)


def test_tables_become_tensors_of_the_same_numbers():
    counts = count(np.array([0, 1]), np.array([[0.9, 0.1], [0.8, 0.2]]))
    assert equal(as_tensors(counts), counts)
    assert as_tensors(counts)["confusion"].tolist() == [[1, 0], [1, 0]]
    assert as_tensors(counts)["confusion"].dtype == torch.int64


# --- two models


@pytest.fixture(scope="module")
def other(folder_of, tmp_path_factory):
    """The run of another model on the same images."""
    path = shutil.copytree(folder_of("linear"), tmp_path_factory.mktemp("other") / "run")
    run = RunFolder(path)
    tensors, last = run.tensors()
    noise = torch.Generator().manual_seed(0)
    changed = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) for name, tensor in tensors.items()}
    run.finish(run.result, run.examples, changed, last)
    return FinishedRun(prepare(run.experiment, Silent(), splits=("test",)), path)


def paired_request(folder, other):
    return request_of(RunFolder(folder).tensors()[0], (), "ab" * 16, RunFolder(other.folder).tensors()[0])


def test_two_models_are_counted_on_the_same_images(prepared, folder, other):
    asked = []

    def find(run):
        asked.append(run)
        return other

    found: Any = own_counts(FinishedRun(prepared, folder), find, paired_request(folder, other), 1)
    assert asked == ["ab" * 16]
    run, second = RunFolder(folder), RunFolder(other.folder)
    labels, shares = shares_of(prepared, run.tensors()[0], {}, run)
    _, theirs = shares_of(other.prepared, second.tensors()[0], {}, second)
    right = [(scores.argmax(1) == labels) for scores in (shares, theirs)]
    wanted = [sum((right[0] == one) & (right[1] == two)) for one, two in ((1, 1), (1, 0), (0, 1), (0, 0))]
    assert found["paired"].tolist() == wanted
    assert found["paired"].sum() == len(labels)
    assert 0 < wanted[1] != wanted[2] > 0, "the models differ in both ways"
    assert equal({name: table for name, table in found.items() if name != "paired"}, count(labels, shares))


def test_another_model_of_the_other_run_is_not_evaluated(prepared, folder, other):
    crafted = request_of(RunFolder(folder).tensors()[0], (), "ab" * 16, {"weight": torch.zeros(1)})
    with pytest.raises(FedVLError, match="requested of another model than the one that this run ended with"):
        own_counts(FinishedRun(prepared, folder), lambda run: other, crafted, 1)


def test_models_of_other_images_are_not_compared(prepared, folder, other):
    samples = other.prepared.test.samples
    fewer = replace(other.prepared, test=replace(other.prepared.test, samples=samples.take(torch.arange(5))))
    with pytest.raises(FedVLError, match="have other classes or test images here"):
        own_counts(
            FinishedRun(prepared, folder), lambda run: other._replace(prepared=fewer), paired_request(folder, other), 1
        )


def test_without_test_images_both_models_have_zeros_in_a_secure_sum(prepared, folder, other):
    none = prepared.test.samples.take(torch.zeros(0, dtype=torch.long))
    untested = replace(prepared, test=replace(prepared.test, samples=none))
    found: Any = own_counts(FinishedRun(untested, folder), no_other, paired_request(folder, other), 1)
    assert found["paired"].tolist() == [0, 0, 0, 0]


# --- thresholds that go with the model


def test_thresholds_of_the_server_are_those_of_the_clients_copy(prepared, folder, request_):
    names = prepared.class_names
    bins = torch.arange(100, 100 + len(names))
    own_counts(FinishedRun(prepared, folder), no_other, {**request_, "thresholds": bins}, 1)
    found: Any = read_thresholds(RunFolder(folder))
    assert found.chosen == FROM_SERVER
    assert found.bins(names) == bins.tolist()
    assert torch.equal(request_of({}, bins.tolist())["thresholds"], bins)
    user = TrainedModel(RunFolder(folder), "cpu").user()
    assert user.thresholds == found.shares


@pytest.mark.parametrize(
    "bins", [torch.arange(3), torch.full((10,), -1), torch.full((10,), 256), torch.full((10,), 100.0), torch.tensor(7)]
)
def test_thresholds_that_are_none_are_refused_and_change_nothing(bins, prepared, folder, request_):
    before = read_thresholds(RunFolder(folder))
    with pytest.raises(FedVLError, match="not one bin of scores for each class"):
        own_counts(FinishedRun(prepared, folder), no_other, {**request_, "thresholds": bins}, 1)
    assert read_thresholds(RunFolder(folder)) == before


# --- noise


def test_counts_with_noise_are_coarse_before_it_is_added(prepared, folder, request_):
    run = RunFolder(folder)
    labels, shares = shares_of(prepared, run.tensors()[0], {}, run)
    noisy = request_of(run.tensors()[0], noise=(1.0, 1e-5))
    found: Any = own_counts(FinishedRun(prepared, folder), no_other, noisy, 5)
    wanted = coarse(count(labels, shares))
    assert {name: table.tolist() for name, table in found.items()} == {n: t.tolist() for n, t in wanted.items()}
    both = {**noisy, "other_run": noisy["model"], "other_model": noisy["model"]}
    with pytest.raises(FedVLError, match="A comparison of two models has no noise"):
        own_counts(FinishedRun(prepared, folder), no_other, both, 5)


@pytest.mark.parametrize("shares", [1, 3])
def test_noise_spends_the_epsilon_that_is_requested_and_no_more(shares):
    noise = requested_noise({"noise": torch.tensor([2.0, 1e-5], dtype=torch.float64)}, 10, shares)
    assert noise is not None
    assert 1.9 < epsilon_of({noise.step: 1}, 1e-5, "rdp") <= 2.0
    assert noise.deviation == pytest.approx(noise.sigma * 11**0.5 / shares**0.5)
    assert requested_noise({}, 10, shares) is None


@pytest.mark.parametrize(
    "asked", [[0.0, 1e-5], [-1.0, 1e-5], [101.0, 1e-5], [1.0, 0.0], [1.0, 1.0], [float("nan"), 1e-5], [1.0]]
)
def test_noise_that_hides_nothing_is_refused(asked):
    with pytest.raises(FedVLError, match=r"out of range|not an epsilon and a delta"):
        requested_noise({"noise": torch.tensor(asked, dtype=torch.float64)}, 10, 1)
    with pytest.raises(FedVLError, match="not an epsilon and a delta"):
        requested_noise({"noise": torch.tensor([1.0, 1e-5])}, 10, 1)


def test_added_noise_is_whole_and_of_the_stated_deviation():
    noise = requested_noise({"noise": torch.tensor([2.0, 1e-5], dtype=torch.float64)}, 10, 1)
    assert noise is not None
    tables = {"scores": torch.zeros(10, 2, 16, dtype=torch.long), "hits": torch.zeros(10, dtype=torch.long)}
    first, again, other = (noise.added(tables, seed, 0, 3) for seed in (7, 7, 8))
    assert all(torch.equal(first[name], again[name]) for name in tables), "who draws again gets the same"
    assert not torch.equal(first["scores"], other["scores"])
    assert first["scores"].dtype == torch.int64
    assert first["scores"].double().std() == pytest.approx(noise.deviation, rel=0.2)
