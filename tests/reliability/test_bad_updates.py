"""Bad updates, from bytes to the merged model: refused, named, and without a trace in the result."""

from functools import cache

import pytest
import torch
from helpers.bad_updates import KINDS, bad_message, honest, received
from helpers.small import PAPERS, run_quietly, small_federation, small_method

import fedvl
from fedvl.federation.checks import sort_out
from fedvl.federation.round import Federation, last_updates, merge
from fedvl.methods.base import Update
from fedvl.tensors import Tensors, digest, flatten

# What the reason must say.
REASONS = {
    **dict.fromkeys(("NaN", "+Inf", "-Inf", "one NaN element"), "not finite"),
    **dict.fromkeys(("wrong shape", "broadcastable shape", "empty"), "has shape"),
    **dict.fromkeys(("wrong dtype", "complex"), "not torch.float32"),
    **dict.fromkeys(("missing key", "extra key"), "missing or not asked for"),
    **dict.fromkeys(("huge norm", "1e38"), "it moves by"),
    **dict.fromkeys(("weight 0", "weight negative", "weight NaN", "weight 1e15"), "weight"),
    "string": "unknown variant `STR`",
    "object": "claims a header of",
    "truncated payload": "incomplete metadata",
    "header that lies": "invalid shape",
    "3.6 TiB header": "not whole safetensors",
    "oversized message": "more than the 1,048,576",
    "invalid UTF-8 key": "invalid UTF-8",
}


@cache
def trained(name: str) -> tuple[Federation, list[Update]]:
    """A federation after one round, and its clients' updates of the next."""
    federation = run_quietly(small_federation(small_method(name), rounds=1))
    cohort = range(federation.engine.clients)
    return federation, [result.update for result in federation.engine.train(1, cohort, federation.shared)]


def merged(federation: Federation, updates: list[Update]) -> tuple[Tensors, Tensors]:
    last = last_updates(federation.method, federation.last, updates)
    return merge(federation.method, federation.shared, updates), flatten(last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAPERS)
def test_a_bad_update_is_refused_and_leaves_no_trace(name, kind):
    federation, updates = trained(name)
    bad = updates[1]
    messages = [bad_message(kind, u) if u is bad else honest(u.tensors, u.client, u.weight) for u in updates]
    readable, unreadable = received(messages)
    cohort = range(federation.engine.clients)
    shapes = federation.method.role.sent_shapes
    good, refused = sort_out(readable, cohort, federation.shared, shapes, federation.config)
    assert [refusal.client for refusal in unreadable + refused] == [bad.client]
    assert REASONS[kind] in (unreadable + refused)[0].reason
    others = [update for update in updates if update is not bad]
    for with_bad, without in zip(merged(federation, good), merged(federation, others), strict=True):
        assert digest(with_bad) == digest(without)
    assert not hasattr(fedvl, "canary")


def test_there_are_twenty_four_kinds():
    assert len(set(KINDS)) == len(KINDS) == 24
    assert REASONS.keys() == set(KINDS)


@pytest.mark.parametrize("name", PAPERS)
def test_denormal_numbers_are_numbers(name):
    """Finite, small, averaged exactly, and honest: a softmax over scores 95 apart gives them. Refusing them would be wrong."""
    federation, updates = trained(name)
    tensor = min(federation.shared)
    tiny = torch.full_like(federation.shared[tensor], 1e-40)
    first = updates[0]._replace(tensors={**updates[0].tensors, tensor: tiny})
    read, unreadable = received([honest(u.tensors, u.client, u.weight) for u in [first, *updates[1:]]])
    shapes = federation.method.role.sent_shapes
    good, refused = sort_out(read, range(5), federation.shared, shapes, federation.config)
    assert unreadable + refused == []
    total = sum(update.weight for update in good)
    expected = torch.zeros_like(tiny, dtype=torch.float64)
    for update in good:
        expected += update.tensors[tensor].double() * (update.weight / total)
    torch.testing.assert_close(merged(federation, good)[0][tensor], expected.float(), rtol=1e-6, atol=1e-44)


def test_what_a_client_writes_into_a_reason_has_an_end():
    federation, updates = trained(PAPERS[0])
    long = updates[0]._replace(tensors={**updates[0].tensors, "x" * 100_000: torch.ones(1)})
    _, refused = sort_out([long], range(5), federation.shared, {}, federation.config)
    assert len(refused[0].reason) < 400


def test_values_whose_squares_overflow_are_refused_and_do_not_end_the_run():
    shared = {"w": torch.zeros(3, dtype=torch.float64)}
    far = Update(0, {"w": torch.full((3,), 1e200, dtype=torch.float64)}, 1.0)
    good, refused = sort_out([far], [0], shared, {}, trained(PAPERS[0])[0].config)
    assert good == []
    assert "it moves by" in refused[0].reason
