"""Sums of statistics: the same for every partition, order and drop-out, in the open and in whole numbers."""

import pytest
import torch
from helpers.small import RAGGED, run_quietly, small_federation, small_method, small_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.federation.statistics import statistics_over, sum_of_statistics, unfit
from fedvl.methods import method_names
from fedvl.methods.roles import Shapes
from fedvl.seeding import torch_generator

COUNT = 40
NAMES = [name for name in method_names() if small_method(name).role.statistics]


def engine_of(method, rows, **federation):
    return LocalEngine(method, small_samples(method, COUNT), rows, TrainingConfig(), FederationConfig(**federation), 0)


def solved(method, engine, cohort):
    shared = method.start(torch_generator(0, "start"))
    return method.solve(shared, engine.sum_statistics(0, cohort, shared).total)


def assert_near(one, two, tolerance):
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=tolerance, atol=tolerance)


def test_ridge_is_one_of_them():
    assert "ridge" in NAMES


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10**6), clients=st.integers(1, 9), missing=st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_a_federation_equals_pooled_data_for_any_partition_order_and_drop_out(name, seed, clients, missing):
    """Of the clients that answer; client by client, all at once, and in fixed point."""
    method, generator = small_method(name), torch.Generator().manual_seed(seed)
    owners = torch.randint(clients, (COUNT,), generator=generator)
    order = torch.randperm(COUNT, generator=generator)
    rows = [order[owners[order] == client] for client in range(clients)]
    cohort = list(range(min(missing, clients - 1), clients))
    there = torch.cat([rows[client] for client in cohort])
    if not len(there):
        return
    shared = method.start(torch_generator(0, "start"))
    pooled = method.solve(shared, method.statistics(shared, small_samples(method, COUNT).take(there)))
    together, alone = (engine_of(method, rows, one_by_one=one) for one in (False, True))
    assert_near(solved(method, together, cohort), pooled, 1e-10)
    assert_near(solved(method, alone, cohort), pooled, 1e-10)
    sums = [
        engine.sum_statistics(0, cohort, shared).total
        for engine in (alone, engine_of(method, rows, secure_sum=True, least_clients=2))
        if len(cohort) > 1 or not engine.federation.secure_sum
    ]
    if len(sums) == 2:
        assert_near(sums[0], sums[1], len(cohort) * 2.0**-30)


@pytest.mark.parametrize("name", NAMES)
def test_the_partition_changes_no_bit(name):
    method, ends = small_method(name), []
    for rows in (torch.arange(COUNT).split(7), [torch.arange(COUNT).flip(0)], torch.arange(COUNT).split(1)):
        found = solved(method, engine_of(method, list(rows)), list(range(len(rows))))
        ends.append(torch.cat([found[key].flatten() for key in sorted(found)]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("name", NAMES)
def test_statistics_of_two_parts_add_up_to_those_of_both(name):
    method = small_method(name)
    shared, samples = method.start(torch_generator(0, "start")), small_samples(method, COUNT)
    parts = [method.statistics(shared, samples.take(rows)) for rows in torch.arange(COUNT).split([3, COUNT - 3])]
    whole = method.statistics(shared, samples)
    for key, tensor in whole.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(parts[0][key] + parts[1][key], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaves_but_the_declared_statistics(name):
    method = small_method(name)
    federation = small_federation(method, rounds=1)
    sent = federation.engine.statistics_of(0, 0, federation.shared)
    assert sent.keys() == method.role.statistics.keys()
    federation.engine.train = lambda *arguments: pytest.fail("a training-free method trains nobody")  # type: ignore[method-assign]
    run_quietly(federation)


@pytest.mark.parametrize("name", NAMES)
def test_no_sample_adds_more_than_the_declared_norm(name):
    method = small_method(name)
    shared, samples = method.start(torch_generator(0, "start")), small_samples(method, COUNT)
    for row in torch.arange(COUNT).split(1):
        found = method.statistics(shared, samples.take(row))
        for key, role in method.role.statistics.items():
            assert role.norm is None or float(found[key].norm()) <= role.norm + 1e-9


def test_blocks_of_samples_add_up(monkeypatch):
    monkeypatch.setattr("fedvl.federation.statistics.SAMPLES_AT_ONCE", 7)
    method = small_method("ridge")
    samples = small_samples(method, COUNT)
    rows = torch.arange(COUNT)
    assert_near(statistics_over(method, samples, rows, {}), method.statistics({}, samples), 1e-12)


def test_a_run_has_one_outcome_with_its_sums_and_no_loss():
    method = small_method("ridge")
    federation = run_quietly(small_federation(method, rounds=1))
    (record,) = federation.records
    assert record.loss is None
    assert record.bytes_up == 4 * 8 * (21 + 24 + 4)  # of four clients with samples: G, H and k in float64
    assert record.dropped == [1]  # which has no samples
    pooled = method.statistics({}, small_samples(method))
    assert_near(federation.server, pooled, 1e-12)


def test_too_few_clients_are_no_quorum():
    federation = small_federation(small_method("ridge"), rounds=1, quorum=len(RAGGED))
    with pytest.raises(FedVLError, match="got 4 usable updates in its last of 3 attempts, fewer than the quorum of 5"):
        run_quietly(federation)


def test_clients_whose_statistics_do_not_fit_are_refused():
    shapes: Shapes = {"sum": (2,)}
    good, short = torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0]).double()
    each = {
        4: {"sum": good},
        1: {"sum": short},
        2: {"sum": good.float()},
        3: {"sum": good / 0},
        0: {},
        5: {"sum": good},
    }
    found, refusals = sum_of_statistics(each, shapes, "cpu")
    assert (found.clients, found.bytes_up) == ([4, 5], 32)
    assert found.total["sum"].tolist() == [2.0, 4.0]
    assert [(one.client, one.reason.split()[-1]) for one in refusals] == [
        (0, "for"),
        (1, "(2,)"),
        (2, "(2,)"),
        (3, "finite"),
    ]


def test_statistics_of_another_shape_are_the_methods_mistake():
    method = small_method("ridge")
    method.statistics = lambda shared, samples: {"gram": torch.zeros(3)}
    with pytest.raises(FedVLError, match=r"Ridge\.statistics is not what its roles declare: tensors 'counts', 'cross'"):
        statistics_over(method, small_samples(method), torch.arange(4), {})
    assert unfit({"a": torch.zeros(2).double()}, {"a": (2,)}) is None
