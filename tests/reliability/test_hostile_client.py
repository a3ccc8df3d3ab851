"""A client that lies: about its weight, its loss, its name, its tensors, or about another client.

Every case goes the whole way of an answer, from the bytes of a message to the merged model: what is refused is named, the
round is that of the others to the bit, and the run goes on.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers.bad_updates import KINDS, bad_message, honest, received
from helpers.lazy import lazily
from helpers.small import FIELD, PAPERS, RAGGED, run_quietly, small_federation, small_method

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import (
    UNREADABLE,
    Raw,
    altered,
    failed,
    local_federation,
    remote_federation,
    same,
    tensors_changed,
    with_payload,
    without,
)

import fedvl
from fedvl.deployment.messages import MAX_HEADER_CHARACTERS
from fedvl.deployment.remote import MAX_NOTED
from fedvl.federation.checks import sort_out
from fedvl.federation.journal import Journal
from fedvl.federation.local import LocalEngine
from fedvl.federation.merging import last_updates, merge
from fedvl.federation.records import Refused
from fedvl.federation.round import Federation
from fedvl.methods.base import Update
from fedvl.tensors import Tensors, digest, flatten

flower_app = lazily("flwr.app")
LIAR, ROUND = 3, 1  # it has answered round 0 honestly

# --- hostile messages over the transport: fault, and what the refusal must say


def header_text(change):
    """The header as text, changed."""

    def fault(message, party):
        reply = party.answer(message)
        return [Raw(change(reply.header.model_dump_json()), reply.payload)]

    return fault


def first_tensor(change):
    return tensors_changed(lambda tensors: {**tensors, min(tensors): change(tensors[min(tensors)])})


def records(**content):
    return lambda message, party: [
        flower_app.RecordDict({name: flower_app.ConfigRecord(values) for name, values in content.items()})
    ]


def replayed(message, party):
    """Its answer to this round, under the header of the round before."""
    reply = party.answer(message)
    earlier = reply.header.model_copy(update={"round": ROUND - 1, "attempt": reply.header.attempt - 1})
    return [reply._replace(header=earlier)]


OTHERS, HEADER = "another run, round or client", "header of its message"
HOSTILE: dict[str, tuple[Any, str]] = {
    # what it answers
    "another run": (altered(run="c" * 32), OTHERS),
    "another experiment": (altered(experiment="c" * 64), OTHERS),
    "the round before": (altered(round=0), OTHERS),
    "a round to come": (altered(round=2), OTHERS),
    "another attempt": (altered(attempt=1), OTHERS),
    "another kind": (altered(kind="report"), OTHERS),
    "the end of the run": (altered(kind="finish"), OTHERS),
    "in another client's name": (altered(client=0), OTHERS),
    "a replay": (replayed, OTHERS),
    # headers
    "no header": (header_text(lambda text: ""), HEADER),
    "a list": (header_text(lambda text: "[1]"), HEADER),
    "a number": (header_text(lambda text: "1e999"), HEADER),
    "half a header": (header_text(lambda text: text[:-9]), HEADER),
    "two headers": (header_text(lambda text: text + text), HEADER),
    "nested without end": (header_text(lambda text: "[" * 4000), HEADER),
    "a field too many": (altered(more=1), HEADER),
    "a kind of its own": (altered(kind="exec"), HEADER),
    "a client of text": (altered(client="3"), HEADER),
    "a client below 0": (altered(client=-1), HEADER),
    "a round of 2^63": (altered(round=2**63), HEADER),
    "a run of 10,000 digits": (altered(run="a" * 10_000), HEADER),
    "whitespace": (header_text(lambda text: text + " " * MAX_HEADER_CHARACTERS), HEADER),
    "a state that is a path": (altered(state="../../etc/passwd"), HEADER),
    "a state cut short": (altered(state="ab"), HEADER),
    "a problem of 501 characters": (altered(problem="!" * 501), HEADER),
    "a word for the terminal": (altered(problem="\x1b[2J!"), "it says: ?[2J!"),
    "idle with tensors": (altered(idle=True, weight=0.0, loss=0.0, examples=0), "no place for tensors"),
    "idle with a weight": (altered(idle=True), "no place for a weight"),
    # weights, examples, losses
    "a weight of NaN": (altered(weight=math.nan), HEADER),
    "an endless weight": (header_text(lambda text: text.replace('"weight":', '"weight":1e999,"x":')), HEADER),
    "a weight of text": (altered(weight="7"), HEADER),
    "a weight below 0": (altered(weight=-1.0), HEADER),
    "no weight": (altered(weight=0.0), "weight 0.0 is not between"),
    "a weight of 1e9": (altered(weight=1e9), "weight 1000000000.0 is not between 0 and 12"),
    "one more than it declared": (altered(weight=13.0), "weight 13.0 is not between 0 and 12"),
    "a new declaration": (altered(weight=500.0, examples=500), "weight 500.0 is not between 0 and 12"),
    "examples below 0": (altered(examples=-1), HEADER),
    "half an example": (altered(examples=11.5), HEADER),
    "a loss of -5e307": (altered(loss=-5e307), HEADER),
    "an endless loss": (altered(loss=math.inf), HEADER),
    "a loss of NaN": (altered(loss=math.nan), HEADER),
    # tensors
    "not finite": (first_tensor(lambda t: torch.full_like(t, math.nan)), "not finite"),
    "one infinity": (first_tensor(lambda t: torch.cat([t[:-1], t[-1:] * math.inf])), "not finite"),
    "a tensor too many": (tensors_changed(lambda t: {**t, "more": torch.zeros(1)}), "'more'"),
    "a tensor too few": (tensors_changed(lambda t: dict(list(t.items())[1:])), "missing"),
    "a private tensor's name": (tensors_changed(lambda t: {**t, "labels": torch.zeros(9)}), "'labels'"),
    "another shape": (first_tensor(lambda t: t[None]), "has shape"),
    "an empty tensor": (first_tensor(lambda t: t[:0]), "has shape"),
    "another type": (first_tensor(lambda t: t.double()), "is torch.float64"),
    "10 million numbers": (first_tensor(lambda t: torch.zeros(10_000_000)), "more than the"),
    "times 1e38": (first_tensor(lambda t: torch.full_like(t, 1e38)), "it moves by"),
    "no tensors": (with_payload(lambda payload: b""), "missing or not asked for"),
    "cut short": (with_payload(lambda payload: payload[:-3]), "not whole safetensors"),
    "a header of 2^62 bytes": (with_payload(lambda p: (2**62).to_bytes(8, "little") + p[8:]), "claims a header"),
    "bytes behind the tensors": (with_payload(lambda payload: payload + b"more"), "not whole safetensors"),
    "noise": (with_payload(lambda payload: bytes(range(256)) * 4), "claims a header"),
    # records of the transport
    "another record": (records(other={"x": 1}), "unexpected format"),
    "a record more": (records(message={"header": "{}", "payload": b""}, bomb={"x": bytes(2**20)}), "unexpected format"),
    "numbers for bytes": (records(message={"header": 1, "payload": "x"}), "unexpected format"),
    "not one of Flower's": (lambda message, party: [UNREADABLE], "none of Flower's (ValueError)"),
    "an error": (failed, "ran out of memory"),
}


@pytest.fixture(scope="module")
def without_the_liar():
    return without("linear", (LIAR, ROUND))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_lie_is_refused_and_changes_nothing(what, tmp_path, without_the_liar):
    fault, reason = HOSTILE[what]
    remote, _ = remote_federation("linear", tmp_path, {(LIAR, ROUND, "train"): fault}, max_message_bytes=2**16)
    run_quietly(remote)
    assert same(remote, without_the_liar)
    assert [record.loss for record in remote.records] == [record.loss for record in without_the_liar.records]
    ((client, said),) = [(item.client, item.reason) for record in remote.records for item in record.refused]
    assert client == LIAR
    assert reason in said


def test_there_are_more_than_forty_hostile_messages():
    assert len(HOSTILE) >= 40


# --- lies about others


def test_who_answers_in_anothers_name_is_named_and_the_other_still_counts(tmp_path):
    """The transport knows senders by their keys; the honest answer comes after the forged ones."""

    def forge(message, party):
        reply = party.answer(message)
        forged = tensors_changed(lambda t: {n: x * 0 for n, x in t.items()})(message, party)[0]
        return [(LIAR, forged), (None, forged), (LIAR, Raw("")), reply]

    remote, _ = remote_federation("linear", tmp_path, {(0, ROUND, "train"): forge})
    run_quietly(remote)
    assert same(remote, run_quietly(local_federation("linear")))
    told = [item for record in remote.records for item in record.refused]
    assert told == [Refused(client=LIAR, reason="it answered in the name of client 0")] * 2


def test_a_thousand_answers_are_one_and_a_few_lines_of_the_record(tmp_path):
    def flood(message, party):
        return [party.answer(message)] * 1000

    remote, _ = remote_federation("linear", tmp_path, {(LIAR, ROUND, "train"): flood})
    run_quietly(remote)
    assert same(remote, run_quietly(local_federation("linear")))
    told = [item for record in remote.records for item in record.refused]
    assert told == [Refused(client=LIAR, reason="it answered twice, or what it was not asked")] * MAX_NOTED


def test_another_clients_private_tensors_cannot_be_named(tmp_path):
    stolen: dict[str, str] = {}

    def spy(message, party):
        stolen["state"] = message.header.state
        return [party.answer(message)]

    def name_it(message, party):
        return altered(state=stolen["state"])(message, party)

    faults = {(0, ROUND, "train"): spy, (LIAR, ROUND, "train"): name_it}
    remote, _ = remote_federation("fst-cbdg", tmp_path, faults)
    run_quietly(remote)
    assert len(stolen["state"]) == 64
    assert same(remote, without("fst-cbdg", (LIAR, ROUND)))
    told = [item for record in remote.records for item in record.refused]
    assert told == [Refused(client=LIAR, reason="it names the private tensors of another client")]


# --- lies about itself


def test_what_was_declared_holds_after_a_server_starts_again(tmp_path):
    first, _ = remote_federation("linear", tmp_path / "parties", rounds=1)
    first.journal = Journal(tmp_path / "journal")
    run_quietly(first)
    assert first.records[0].declared == {"0": 7, "2": 1, "3": 12, "4": 5}
    fault = altered(weight=400.0, examples=400)
    again, _ = remote_federation("linear", tmp_path / "parties", {(LIAR, ROUND, "train"): fault}, rounds=2)
    again.journal = Journal(tmp_path / "journal")
    again.restore()
    run_quietly(again)
    assert again.records[1].refused[0].reason == "weight 400.0 is not between 0 and 12, what it declared"


def test_nobody_declares_more_than_the_server_takes(tmp_path):
    fault = altered(weight=1e8, examples=100_000_000)
    remote, _ = remote_federation("linear", tmp_path, {(LIAR, 0, "train"): fault})
    run_quietly(remote)
    assert same(remote, without("linear", (LIAR, 0)))
    assert "it declares 100000000 examples" in remote.records[0].refused[0].reason


@pytest.mark.parametrize("loss", [1e6, -1e6])
def test_a_loss_within_the_headers_bounds_does_not_spoil_the_record(loss, tmp_path):
    remote, _ = remote_federation("linear", tmp_path, {(LIAR, ROUND, "train"): altered(loss=loss)})
    run_quietly(remote)
    clean = run_quietly(local_federation("linear"))
    assert same(remote, clean)
    assert abs(remote.records[ROUND].loss - clean.records[ROUND].loss) < 1


@pytest.mark.parametrize("rows", [0, 5, 1000])
def test_fed_mps_texts_have_a_row_for_each_class_at_most(rows, tmp_path):
    """Tried on version 0.1: no rows ended the run, and 240,000 rows were written to the journal."""
    change = tensors_changed(lambda t: {**t, "perturbed_texts": torch.ones(rows, 6)})
    options = {"share": "classes"}
    remote, _ = remote_federation("fed-mp", tmp_path, {(LIAR, ROUND, "train"): change}, options)
    run_quietly(remote)
    told = [item for record in remote.records for item in record.refused]
    assert [item.client for item in told] == [LIAR]
    assert f"'perturbed_texts' has shape ({rows}, 6)" in told[0].reason


class Scaling(LocalEngine):
    """One client multiplies the move of the client that moves farthest."""

    factor = 1.0

    def train(self, round_index, cohort, shared, own=None):
        trained = list(super().train(round_index, cohort, shared, own))
        moves = [{name: r.update.tensors[name] - shared[name] for name in shared} for r in trained]
        farthest = max(moves, key=lambda move: sum(float(t.norm()) ** 2 for t in move.values()))
        for result in trained:
            if result.update.client == LIAR:
                result.update.tensors.update({name: shared[name] + self.factor * farthest[name] for name in shared})
        return trained


def of_ten(name, kind, **attributes):
    """Ten clients of the same kind, of which one may be another."""
    federation = small_federation(small_method(name), chunk=10)
    engine = federation.engine
    rows = torch.arange(sum(RAGGED)).repeat(2).split(5)
    federation.engine = kind(engine.method, engine.data, rows, engine.training, engine.federation, 0)
    for attribute, value in attributes.items():
        setattr(federation.engine, attribute, value)
    return run_quietly(federation)


@pytest.mark.parametrize("factor", [10.0, -10.0, -1000.0])
@pytest.mark.parametrize("name", ["linear", "fst-cbdg", "fed-mp"])
def test_a_scaled_update_of_one_in_ten_is_refused(name, factor):
    scaled_run = of_ten(name, Scaling, factor=factor)
    refused = {item.client for record in scaled_run.records for item in record.refused}
    assert refused == {LIAR}
    assert not any(record.refused for record in of_ten(name, LocalEngine).records)


# --- bad updates, of the methods of the five papers

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


DECLARED = dict(enumerate(RAGGED))


@cache
def trained(name: str) -> tuple[Federation, list[Update]]:
    """A federation after one round, and its clients' updates of the next."""
    federation = run_quietly(small_federation(small_method(name), rounds=1))
    cohort, method = range(federation.engine.clients), federation.method
    handed = {client: method.hand_out(federation.shared, federation.last, client) for client in cohort}
    return federation, [result.update for result in federation.engine.train(1, cohort, federation.shared, handed)]


def merged(federation: Federation, updates: Sequence[Update]) -> tuple[Tensors, Tensors]:
    last = last_updates(federation.method, federation.last, updates)
    return merge(federation.method, federation.shared, updates), flatten(last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAPERS)
def test_a_bad_update_is_refused_and_leaves_no_trace(name, kind):
    refuse(name, kind)


@pytest.mark.parametrize("name", FIELD)
def test_bad_updates_of_every_kind_are_refused_in_other_methods_too(name):
    for kind in KINDS:
        refuse(name, kind)


def refuse(name, kind):
    federation, updates = trained(name)
    bad = updates[1]
    messages = [bad_message(kind, u) if u is bad else honest(u.tensors, u.client, u.weight) for u in updates]
    readable, unreadable = received(messages)
    good, refused = sort_out(
        readable, DECLARED, dict.fromkeys(DECLARED, federation.shared), federation.method, federation.config
    )
    assert [refusal.client for refusal in unreadable + refused] == [bad.client]
    assert REASONS[kind] in (unreadable + refused)[0].reason
    others = [update for update in updates if update is not bad]
    for with_bad, with_none in zip(merged(federation, good), merged(federation, others), strict=True):
        assert digest(with_bad) == digest(with_none)
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
    good, refused = sort_out(
        read, DECLARED, dict.fromkeys(DECLARED, federation.shared), federation.method, federation.config
    )
    assert unreadable + refused == []
    total = sum(update.weight for update in good)
    expected = torch.zeros_like(tiny, dtype=torch.float64)
    for update in good:
        expected += update.tensors[tensor].double() * (update.weight / total)
    torch.testing.assert_close(merged(federation, good)[0][tensor], expected.float(), rtol=1e-6, atol=1e-44)


def test_what_a_client_writes_into_a_reason_has_an_end():
    federation, updates = trained(PAPERS[0])
    long = updates[0]._replace(tensors={**updates[0].tensors, "x" * 100_000: torch.ones(1)})
    _, refused = sort_out(
        [long], DECLARED, dict.fromkeys(DECLARED, federation.shared), federation.method, federation.config
    )
    assert len(refused[0].reason) < 400


def test_values_whose_squares_overflow_are_refused_and_do_not_end_the_run():
    shared = {"w": torch.zeros(3, dtype=torch.float64)}
    far = Update(0, {"w": torch.full((3,), 1e200, dtype=torch.float64)}, 1.0)
    federation, _ = trained(PAPERS[0])
    plain = small_method("linear")
    good, refused = sort_out([far], DECLARED, dict.fromkeys(DECLARED, shared), plain, federation.config)
    assert len(good) == 0
    assert "it moves by" in refused[0].reason
