"""Sums in whole numbers: exact, the same in any order, and refused where they would not be."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvl.errors import FedVLError
from fedvl.federation.fixed_point import (
    FRACTION_BITS,
    RANGE_BITS,
    decode_updates,
    encode_update,
    flat_statistics,
    from_whole,
    moved,
    sum_of_parts,
    to_whole,
    unflat_statistics,
)
from fedvl.tensors import weighted_mean


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_a_sum_is_the_same_in_any_order_and_right_to_its_last_unit(values, chance):
    parts = [to_whole(torch.tensor([value], dtype=torch.float64), len(values)) for value in values]
    shuffled = chance.sample(parts, len(parts))
    assert torch.equal(sum_of_parts(parts, 2), sum_of_parts(shuffled, 2))
    assert abs(float(from_whole(sum_of_parts(parts, 2))) - math.fsum(values)) <= len(values) / 2**FRACTION_BITS


@pytest.mark.parametrize("value", [2.0**RANGE_BITS / 3, -(2.0**RANGE_BITS) / 3, math.nan, math.inf, -math.inf])
def test_what_a_sum_could_not_hold_is_refused(value):
    with pytest.raises(FedVLError, match="sum of 3 clients holds numbers below"):
        to_whole(torch.tensor([0.0, value], dtype=torch.float64), 3)


def test_the_largest_numbers_of_all_clients_fit():
    most = math.nextafter(2.0**RANGE_BITS / 3, 0)
    total = sum_of_parts([to_whole(torch.tensor([most], dtype=torch.float64), 3)] * 3, 3)
    assert float(from_whole(total)) == pytest.approx(3 * most)


def test_tensors_return_from_the_numbers_in_the_order_of_names():
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(7.0), "c": torch.zeros(0, 4)}
    found = unflat_statistics(flat_statistics(tensors), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert flat_statistics(tensors).tolist() == [7, 0, 1, 2, 3, 4, 5]
    assert all(torch.equal(found[name], tensors[name].double()) for name in tensors)


@pytest.mark.parametrize("draw", range(5))
def test_the_mean_of_moves_is_the_weighted_mean_of_tensors(draw):
    generator = torch.Generator().manual_seed(draw)
    shared = {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(4, generator=generator)}
    sent = [
        {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in shared.items()}
        for _ in range(5)
    ]
    weights = [3.0, 10.0, 1.0, 250.0, 7.0]
    parts = [
        encode_update(one, shared, weight, loss, 5) for one, weight, loss in zip(sent, weights, range(5), strict=True)
    ]
    total = decode_updates(sum_of_parts(parts, 2), shared)
    assert (total.weight, total.loss, total.trained) == (271.0, 10.0, 5.0)
    expected = weighted_mean(sent, weights)
    for name, tensor in moved(shared, total).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-7)


def test_a_sum_of_too_few_is_refused():
    with pytest.raises(FedVLError, match=r"A sum of 2 clients is too few to hide one of them; .* is 3"):
        sum_of_parts([torch.zeros(1, dtype=torch.long)] * 2, 3)


def test_a_counter_stays_whole():
    shared = {"count": torch.tensor(10)}
    total = decode_updates(encode_update({"count": torch.tensor(13)}, shared, 3.0, 0.0, 2), shared)
    assert moved(shared, total)["count"].item() == 13
