"""Merging: the last updates of clients, in the order of their numbers."""

import math

import pytest
import torch
from helpers.small import small_task

from fedvl.federation.merging import drift, last_updates, merge
from fedvl.federation.robust import median
from fedvl.federation.stacks import Updates
from fedvl.methods.base import Method, Update
from fedvl.methods.roles import Shared


class Keeping(Method):
    """The server keeps the last w of every client, and needs v in sum only."""

    def roles(self):
        return {"w": Shared(needs="last")}

    def start(self, generator):
        return {"w": torch.zeros(1), "v": torch.zeros(1)}


def update(client, value):
    return Update(client, {"w": torch.tensor([value]), "v": torch.zeros(1)}, 1.0)


def values(last):
    return [(client, {name: tensor.item() for name, tensor in own.items()}) for client, own in last.items()]


def test_last_updates_are_in_the_order_of_clients_whatever_the_order_of_arrival():
    method = Keeping(Method.options_type(), small_task())
    first = last_updates(method, {}, [update(4, 1.0), update(2, 2.0)])
    assert values(first) == [(2, {"w": 2.0}), (4, {"w": 1.0})]
    second = last_updates(method, first, [update(3, 3.0), update(0, 4.0), update(4, 5.0)])
    assert values(second) == [(0, {"w": 4.0}), (2, {"w": 2.0}), (3, {"w": 3.0}), (4, {"w": 5.0})]


def test_what_is_kept_does_not_change_with_the_updates():
    method = Keeping(Method.options_type(), small_task())
    updates = Updates.of([update(1, 1.0), update(2, 2.0)])
    last = last_updates(method, {}, updates)
    updates.column("w").fill_(9.0)
    assert values(last) == [(1, {"w": 1.0}), (2, {"w": 2.0})]


def test_drift_diversity_and_cosine_distance_by_hand():
    before = [{"visual": torch.tensor([[1.0, 0.0]]), "context": torch.zeros(1, 2)}] * 2
    after = [{"visual": torch.tensor([[2.0, 0.0]]), "context": torch.tensor([[1.0, 0.0]])}]
    after += [{"visual": torch.tensor([[1.0, 1.0]]), "context": torch.tensor([[2.0, 0.0]])}]
    figures = drift(before, after, ["visual", "context"])
    assert figures["drift_diversity_visual"] == pytest.approx((1 + 1) / 2)  # eq. 6: moves (1, 0) and (0, 1)
    assert figures["drift_diversity_context"] == pytest.approx((1 + 4) / 9)
    assert figures["cosine_distance_visual"] == pytest.approx(1 - 2 / math.sqrt(8))
    assert figures["cosine_distance_context"] == pytest.approx(0)
    assert drift(before[:1], after[:1], ["visual", "context"]) == {}


def test_moves_that_cancel_out_have_no_diversity_and_stay_numbers():
    before = [{"visual": torch.zeros(2)}] * 2
    after = [{"visual": torch.tensor([1.0, 0.0])}, {"visual": torch.tensor([-1.0, 0.0])}]
    assert drift(before, after, ["visual"]) == {"cosine_distance_visual": pytest.approx(2)}
    assert all(math.isfinite(value) for value in drift(before, before, ["visual"]).values())


class Summing(Method):
    """The server needs v in sum, and the method adds up w of each client."""

    def roles(self):
        return {"w": Shared(needs="each")}

    def merge(self, shared, updates):
        assert shared.keys() == {"w"}
        assert {name for update in updates for name in update.tensors} == {"w"}
        return {"w": sum(update.tensors["w"] for update in updates)}


def test_what_is_needed_in_sum_is_averaged_by_the_rule_and_the_rest_is_the_methods():
    method, shared = Summing(Method.options_type(), small_task()), {"w": torch.zeros(2), "v": torch.ones(1, 2)}
    updates = [
        Update(client, {"w": torch.tensor([client, 1.0]), "v": 1 + torch.tensor([[move, -move]])}, weight)
        for client, (move, weight) in enumerate([(3.0, 1.0), (6.0, 3.0), (90.0, 1.0)])
    ]
    merged = merge(method, shared, updates)
    assert list(merged) == ["w", "v"]
    assert merged["w"].tolist() == [3.0, 3.0]
    mean = (3 + 3 * 6 + 90) / 5
    torch.testing.assert_close(merged["v"], torch.tensor([[1 + mean, 1 - mean]]))
    by_rule = merge(method, shared, updates, median)
    torch.testing.assert_close(by_rule["v"], torch.tensor([[7.0, -5.0]]))
    assert by_rule["w"].tolist() == [3.0, 3.0]
