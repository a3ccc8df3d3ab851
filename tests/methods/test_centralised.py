"""centralised: the linear classifier on all data in one place."""

import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, run_quietly, small_federation, small_method, small_samples


def test_it_is_the_linear_classifier_but_pools_all_data():
    method, plain = small_method("centralised"), small_method("linear")
    assert method.scope == "pooled"
    assert plain.scope == "row"
    start = method.start(torch.Generator())
    assert {name: tensor.tolist() for name, tensor in start.items()} == {
        name: tensor.tolist() for name, tensor in plain.start(torch.Generator()).items()
    }
    batch = batch_of(small_samples(plain, 5))
    assert torch.equal(method.objective(start, batch)[0], plain.objective(start, batch)[0])


def test_it_learns():
    federation = small_federation(small_method("centralised"), rounds=5)
    run_quietly(federation)
    assert federation.records[-1].loss < federation.records[0].loss


def test_it_declares_what_the_table_says():
    assert_declared("centralised")
