"""A client counts its own test images by its own finished model, and by no other."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedvl.deployment.own_counts import MODEL_HASH, as_tensors, own_counts, request_of
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import count, shapes_of_counts, withheld
from fedvl.runs.evaluation import shares_of
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import prepare
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
    assert equal(own_counts(prepared, folder, request_, 1), count(labels, shares))
    assert equal(own_counts(prepared, folder, request_, 5), withheld(labels, shares, 5))
    found: Any = own_counts(prepared, folder, request_, 1)
    assert found["confusion"].sum() == len(prepared.test.samples) > 0


def test_without_test_images_there_is_nothing_but_zeros_in_a_secure_sum(prepared, folder, request_):
    none = prepared.test.samples.take(torch.zeros(0, dtype=torch.long))
    untested = replace(prepared, test=replace(prepared.test, samples=none))
    assert own_counts(untested, folder, request_, 5) is None
    zeros: Any = own_counts(untested, folder, request_, 1)
    assert {name: tuple(table.shape) for name, table in zeros.items()} == shapes_of_counts(len(prepared.class_names))
    assert not any(table.any() for table in zeros.values())


def test_another_model_is_not_evaluated(prepared, folder, request_):
    crafted = request_of({name: tensor + 1 for name, tensor in RunFolder(folder).tensors()[0].items()})
    for request in (crafted, {}, {**request_, "more": torch.zeros(1)}, {"other": request_[MODEL_HASH]}):
        with pytest.raises(FedVLError, match="requested of another model than the one that this run ended with"):
            own_counts(prepared, folder, request, 1)


def test_a_run_that_is_not_finished_has_no_model_to_evaluate(prepared, folder, request_, tmp_path):
    unfinished = shutil.copytree(folder, tmp_path / "run")
    (unfinished / "result.json").unlink()
    with pytest.raises(FedVLError, match="This client has not finished that run"):
        own_counts(prepared, unfinished, request_, 1)


def test_tables_become_tensors_of_the_same_numbers():
    counts = count(np.array([0, 1]), np.array([[0.9, 0.1], [0.8, 0.2]]))
    assert equal(as_tensors(counts), counts)
    assert as_tensors(counts)["confusion"].tolist() == [[1, 0], [1, 0]]
    assert as_tensors(counts)["confusion"].dtype == torch.int64
