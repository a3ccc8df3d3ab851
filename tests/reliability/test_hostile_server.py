"""A server that lies: it asks for private tensors, asks twice, asks for what was not agreed, and sends bombs.

Whatever it sends, a client answers with what its method declares or with the reason why not, and keeps what it has.
"""

import copy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import METHODS, local_federation, party_of, request

from fedvl.deployment.messages import MAX_HEADER_CHARACTERS, Message, pack_tensors, read_header, unpack_tensors
from fedvl.errors import FedVLError
from fedvl.seeding import torch_generator
from fedvl.tensors import digest

CLIENT, LIMIT = 3, 2**28


def party(name, folder, options=None, **settings):
    federation = local_federation(name, options, **settings)
    return party_of(federation.method, CLIENT, folder, federation.engine)


def start_of(party):
    """What an honest server hands out in the first round."""
    method = party.engine.method
    shared, _ = method.role.split(method.start(torch_generator(0, "start")))
    return method.hand_out(shared, {}, CLIENT)


def ask(party, tensors, **changes):
    header = {"round": 0, "client": CLIENT, **changes}
    return party.answer(Message(request(**header), pack_tensors(tensors)))


def sent(reply):
    return unpack_tensors(reply.payload, LIMIT) if reply.payload else {}


def first_kind(method):
    consultation = method.consultation()
    return "report" if consultation and consultation.due(0) else "train"


def declared(method, kind, start):
    """The names that may leave in an answer."""
    consultation = method.consultation()
    if kind == "report":
        return set(consultation.report_shapes)
    if method.role.statistics:
        return set(method.role.statistics)
    return (start.keys() - method.role.given.keys()) | method.role.sent.keys()


def lies(start, private):
    """What a server may say instead of the shared tensors, and why each is refused."""
    some = next(iter(start), None)
    for name, tensor in private.items():
        yield f"private tensor {name}", {**start, name: torch.zeros_like(tensor)}
        yield f"private tensor {name} of one number", {**start, name: torch.zeros(1)}
    yield (
        "every private tensor",
        {**start, **{name: torch.zeros_like(t) for name, t in private.items()}, "x": torch.ones(1)},
    )
    yield "a tensor of its own", {**start, "spy": torch.zeros(4)}
    yield "the client's inputs", {**start, "features": torch.zeros(12, 6), "labels": torch.zeros(12, dtype=torch.long)}
    if some is None:
        return
    yield "nothing", {}
    yield "one less", {name: tensor for name, tensor in start.items() if name != some}
    yield "another type", {**start, some: start[some].half()}
    yield "one more dimension", {**start, some: start[some][None]}
    yield "ten million numbers", {**start, some: torch.zeros(10_000_000)}
    yield "not finite", {**start, some: torch.full_like(start[some], torch.nan)}
    yield "infinite", {**start, some: torch.full_like(start[some], torch.inf)}


@pytest.mark.parametrize("name", METHODS)
def test_a_server_cannot_take_what_the_method_does_not_declare(name, tmp_path):
    """Tried on version 0.1: a server that named ``memory`` got the features of all of pFedPrompt's images."""
    victim = party(name, tmp_path)
    method, start = victim.engine.method, start_of(victim)
    private, kind = victim.engine.private_of(CLIENT), first_kind(method)
    tried = 0
    for what, tensors in lies(start, private):
        if what == "every private tensor" and not private:
            continue
        reply = ask(victim, tensors, kind=kind)
        assert "is refused" in reply.header.problem, what
        assert reply.payload == b"", what
        tried += 1
    assert tried >= (9 if start else 2)
    assert not list(tmp_path.rglob("*.safetensors"))
    honest = ask(victim, start, kind=kind)
    assert honest.header.problem == ""
    assert sent(honest).keys() == declared(method, kind, start)
    assert digest(sent(honest)) == digest(sent(ask(party(name, tmp_path / "other"), start, kind=kind)))


@pytest.mark.parametrize("name", METHODS)
def test_the_engine_itself_refuses_too(name, tmp_path):
    victim = party(name, tmp_path)
    engine, shared = victim.engine, start_of(victim)
    for stolen in (*engine.private_of(CLIENT), "spy"):
        with pytest.raises(FedVLError, match="is refused"):
            engine.train(0, [CLIENT], {**shared, stolen: torch.zeros(1)})
        with pytest.raises(FedVLError, match="is refused"):
            engine.train(0, [CLIENT], shared, {CLIENT: {**shared, stolen: torch.zeros(1)}})


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_tensors_are_named_nothing_undeclared_leaves(data):
    name = data.draw(st.sampled_from(["pfedprompt", "fedotp", "fst-cbdg", "fed-mp", "fedtpg"]))
    with TemporaryDirectory() as folder:
        name_any_tensors(data, party(name, Path(folder)))


def name_any_tensors(data, victim):
    start, private = start_of(victim), victim.engine.private_of(CLIENT)
    names = data.draw(st.sets(st.sampled_from([*start, *private, "candidates", "features", "labels", "context"])))
    tensors = {name: {**private, **start}.get(name, torch.zeros(2, 2)) for name in names}
    reply = ask(victim, tensors)
    assert sent(reply).keys() <= declared(victim.engine.method, "train", start)
    assert bool(reply.payload) == (names == start.keys())


def test_a_round_has_one_answer(tmp_path):
    """The difference of two answers, from tensors of the server's choice, would give single images away."""
    victim = party("linear", tmp_path)
    start = start_of(victim)
    first = ask(victim, start)
    other = {name: tensor + 0.1 for name, tensor in start.items()}
    again = ask(victim, other, attempt=1)
    assert again.payload == first.payload
    assert again.header.attempt == 1
    assert (again.header.weight, again.header.loss) == (
        first.header.weight,
        first.header.loss,
    )
    restarted = party("linear", tmp_path)  # the same folder, another process
    assert ask(restarted, other).payload == first.payload
    assert ask(restarted, start).payload == first.payload
    assert ask(restarted, other, round=1).payload != first.payload  # the next round is another question


def test_a_round_whose_answer_was_forgotten_is_not_answered_again(tmp_path):
    """Answers of old rounds are removed; asking many rounds must not buy a second answer to the first."""
    victim = party("linear", tmp_path, rounds=100)
    start = start_of(victim)
    first = ask(victim, start, round=5)
    other = {name: tensor + 0.1 for name, tensor in start.items()}
    for number in (6, 7, 99):
        assert ask(victim, start, round=number).payload
    again = ask(victim, other, round=5)
    assert first.payload
    assert again.payload == b""
    assert "long over" in again.header.problem
    assert ask(victim, other, round=8).payload  # a round that it was never asked is


def test_a_report_and_an_adoption_happen_once_too(tmp_path):
    victim = party("fedpp", tmp_path, {"visual_prompts": False})
    report = ask(victim, {}, kind="report")
    answer = victim.engine.method.consultation().settle(0, sent(report), None)
    adopted = ask(victim, answer, kind="adopt", state=report.header.state)
    labels = victim.engine.private_of(CLIENT)["labels"].clone()
    greedy = {"totals": answer["totals"] * 0 + 1, "quota": answer["quota"] * 1000}
    again = ask(victim, greedy, kind="adopt", state=report.header.state)
    assert again.header.state == adopted.header.state
    trained = ask(victim, {}, state=again.header.state)
    assert trained.header.problem == ""
    assert torch.equal(victim.engine.private_of(CLIENT)["labels"], labels)


NOT_AGREED: dict[str, dict[str, Any]] = {
    "a round beyond the last": {"round": 3},
    "a round far beyond": {"round": 2**31 - 1},
    "the end in the middle": {"kind": "finish", "round": 1},
    "an end after the end": {"kind": "finish", "round": 4},
    "a report that the method does not have": {"kind": "report"},
    "an adoption that the method does not have": {"kind": "adopt"},
    "a request for another client": {"client": 2},
    "a state that it never had": {"round": 1, "state": "ab" * 32},
}


@pytest.mark.parametrize("what", NOT_AGREED)
def test_what_was_not_agreed_is_refused_and_nothing_is_lost(what, tmp_path):
    victim = party("fst-cbdg", tmp_path, rounds=3)
    state = ask(victim, start_of(victim)).header.state
    before = sorted(path.name for path in victim.folder.iterdir())
    reply = ask(victim, start_of(victim), **NOT_AGREED[what])
    assert reply.header.problem
    assert reply.payload == b""
    assert sorted(path.name for path in victim.folder.iterdir()) == before
    good = ask(victim, start_of(victim), round=1, state=state)
    assert good.header.problem == ""


def test_an_adoption_before_a_report_is_refused(tmp_path):
    victim = party("fedpp", tmp_path, {"visual_prompts": False})
    classes = len(victim.engine.method.task.class_names)
    reply = ask(victim, {"totals": torch.ones(classes), "quota": torch.ones(2)}, kind="adopt")
    assert "asked to adopt the answer to a report that it never sent" in reply.header.problem
    ask(victim, {}, kind="report")
    for wrong in ({}, {"totals": torch.ones(classes)}, {"totals": torch.ones(99), "quota": torch.ones(2)}):
        assert "is refused" in ask(victim, wrong, kind="adopt").header.problem


def test_after_the_end_nothing_is_answered(tmp_path):
    victim = party("linear", tmp_path, rounds=2)
    ask(victim, start_of(victim))
    assert "is refused" in ask(victim, {"spy": torch.ones(1)}, kind="finish", round=2).header.problem
    assert ask(victim, start_of(victim), kind="finish", round=2).header.problem == ""
    for changes in ({"round": 1}, {"kind": "finish", "round": 2}):
        assert "over" in ask(victim, start_of(victim), **changes).header.problem


def test_a_late_round_does_not_make_a_client_forget(tmp_path):
    victim = party("fst-cbdg", tmp_path, rounds=100)
    state = ""
    for number in range(3):
        state = ask(victim, start_of(victim), round=number, state=state).header.state
    held = {path.name for path in victim.folder.glob("*.safetensors")}
    ask(victim, start_of(victim), round=99)
    assert ask(victim, start_of(victim), round=3, state=state).header.problem == ""
    assert len(held) >= 3


BOMBS = {
    "no tensors": b"",
    "a few bytes": b"abc",
    "a header of 2^62 bytes": (2**62).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (4).to_bytes(8, "little") + b"{{{{",
    "a tensor beyond its bytes": (60).to_bytes(8, "little")
    + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(60),
    "more than may be sent": bytes(2**17),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_a_sentence(what, tmp_path):
    victim = party("linear", tmp_path, max_message_bytes=2**16)
    reply = victim.answer(Message(request(client=CLIENT, round=0), BOMBS[what]))
    assert reply.header.problem
    assert reply.payload == b""


@pytest.mark.parametrize("header", ["", "{}", "[]", "null", " " * (MAX_HEADER_CHARACTERS + 1), '{"run": "../x"}'])
def test_a_header_that_is_none_is_refused_before_it_is_read(header):
    with pytest.raises(FedVLError, match="header of its message"):
        read_header(header)


def test_a_client_is_not_changed_by_refusals(tmp_path):
    victim = party("pfedprompt", tmp_path)
    before = copy.deepcopy(victim.engine.private_of(CLIENT))
    for _, tensors in lies(start_of(victim), before):
        ask(victim, tensors)
    assert digest(victim.engine.private_of(CLIENT)) == digest(before)
