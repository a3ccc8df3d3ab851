import math

import pytest
import torch

from fedvl.config import FederationConfig
from fedvl.federation.checks import sort_out
from fedvl.methods.base import Update

SHARED = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
LIMITS = FederationConfig(max_update_norm=100.0)


def good(client=0, weight=1.0, **changes):
    return Update(client, {**{name: tensor + 1 for name, tensor in SHARED.items()}, **changes}, weight)


def with_value(value):
    tensor = torch.ones(2, 3)
    tensor[1, 2] = value
    return tensor


BAD = {
    "one NaN": Update(1, {**good().tensors, "weight": with_value(math.nan)}, 1.0),
    "infinity": Update(1, {**good().tensors, "weight": with_value(math.inf)}, 1.0),
    "minus infinity": Update(1, {**good().tensors, "weight": with_value(-math.inf)}, 1.0),
    "huge value": Update(1, {**good().tensors, "weight": with_value(1e38)}, 1.0),
    "huge norm": Update(1, {**good().tensors, "weight": torch.full((2, 3), 50.0)}, 1.0),
    "wrong shape": Update(1, {**good().tensors, "weight": torch.ones(3, 2)}, 1.0),
    "broadcastable shape": Update(1, {**good().tensors, "weight": torch.ones(1)}, 1.0),
    "empty": Update(1, {**good().tensors, "weight": torch.ones(0, 3)}, 1.0),
    "wrong dtype": Update(1, {**good().tensors, "weight": torch.ones(2, 3, dtype=torch.int64)}, 1.0),
    "double": Update(1, {**good().tensors, "weight": torch.ones(2, 3, dtype=torch.float64)}, 1.0),
    "complex": Update(1, {**good().tensors, "weight": torch.ones(2, 3, dtype=torch.complex64)}, 1.0),
    "missing name": Update(1, {"weight": torch.ones(2, 3)}, 1.0),
    "extra name": Update(1, {**good().tensors, "extra": torch.ones(1)}, 1.0),
    "weight 0": Update(1, good().tensors, 0.0),
    "negative weight": Update(1, good().tensors, -3.0),
    "NaN weight": Update(1, good().tensors, math.nan),
    "infinite weight": Update(1, good().tensors, math.inf),
    "absurd weight": Update(1, good().tensors, 1e15),
    "a stranger": good(client=7),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_update_is_refused_and_named_and_the_good_ones_stay(kind):
    accepted, refusals = sort_out([good(2), BAD[kind], good(0)], [0, 1, 2], SHARED, {}, LIMITS)
    assert [update.client for update in accepted] == [0, 2]
    assert [refusal.client for refusal in refusals] == [BAD[kind].client]
    assert refusals[0].reason


def test_a_second_answer_is_refused_and_the_first_stays():
    first = good(0, weight=2.0)
    accepted, refusals = sort_out([first, good(0, weight=9.0)], [0], SHARED, {}, LIMITS)
    assert accepted == [first]
    assert refusals[0].reason == "answered twice"


def test_the_norm_limit_is_on_the_move_not_on_the_value():
    shared = {"weight": torch.full((2, 3), 1e6), "bias": torch.zeros(2)}
    near = Update(0, {"weight": torch.full((2, 3), 1e6 + 1), "bias": torch.zeros(2)}, 1.0)
    assert sort_out([near], [0], shared, {}, LIMITS) == ([near], [])


@pytest.mark.parametrize(
    "sent, reason",
    [
        (torch.ones(3, 5), None),
        (torch.ones(7, 5), None),
        (torch.ones(3, 4), "has shape"),
        (torch.ones(5), "has shape"),
        (torch.full((3, 5), math.nan), "not finite"),
        (torch.ones(3, 5, dtype=torch.float64), "is torch.float64"),
        (None, "missing"),
    ],
)
def test_extras_are_checked_too(sent, reason):
    update = Update(0, {**good().tensors, **({} if sent is None else {"text": sent})}, 1.0)
    accepted, refusals = sort_out([update], [0], SHARED, {"text": (None, 5)}, LIMITS)
    assert len(accepted) == (reason is None)
    assert all(reason in refusal.reason for refusal in refusals)
