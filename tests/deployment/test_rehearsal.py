"""The dry run of a client: what it shows is what a first round would send, without the mask."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.audited import CLIENTS, prepared_of
from helpers.parties import EXPERIMENT, local_federation
from helpers.small import RAGGED

from fedvl.audit import own_update
from fedvl.deployment.party import Party
from fedvl.deployment.rehearsal import answer_round, in_the_open, rehearse
from fedvl.errors import FedVLError
from fedvl.runs.experiment import local_engine

SECURE = {"secure_sum": True, "least_clients": 5}


@pytest.fixture
def audited(monkeypatch):
    """What the attacks are given."""
    given: list[Any] = []

    def attack(*words):
        given.append(words)
        return {"made": "up"}

    monkeypatch.setattr(own_update, "audit_own", attack)
    return given


def test_what_a_first_round_sends_is_the_update_of_that_client_alone():
    engine, client = local_federation("linear").engine, 3
    before = engine.method.first_shared(0)
    handed, sent, last = answer_round(engine, EXPERIMENT, client, 0)
    assert all(torch.equal(handed[name], before[name]) for name in before)
    assert sent.keys() == {"train"}
    assert sent["train"].keys() == before.keys()
    assert not torch.equal(sent["train"]["weight"], before["weight"])
    assert (last.weight, last.examples, last.idle) == (RAGGED[client], RAGGED[client], False)


def test_a_report_is_settled_and_adopted_before_training():
    engine = local_federation("fedpp").engine
    adopted, adopt = list[Any](), engine.adopt

    def watched(settlements):
        adopted.append(settlements)
        adopt(settlements)

    engine.adopt = watched
    _, sent, _ = answer_round(engine, EXPERIMENT, 3, 0)
    assert sent.keys() == {"report", "train"}
    assert 0 < float(sent["report"]["images"]) <= RAGGED[3]
    ((settled,),) = [found.items() for found in adopted]
    total = engine.method.consultation().settle(0, sent["report"], None)
    assert settled[0] == 3
    assert all(torch.equal(settled[1][name], total[name]) for name in total)


def test_private_tensors_of_one_request_are_there_in_the_next(monkeypatch):
    """Each request names those that the answer before it ended with, as the server's do."""
    named, answer = [], Party.answer

    def watched(party, message):
        reply = answer(party, message)
        named.append((message.header.kind, message.header.state, reply.header.state))
        return reply

    monkeypatch.setattr(Party, "answer", watched)
    answer_round(local_federation("fedpp").engine, EXPERIMENT, 3, 0)
    (report, none, first), (adopt, second, third), (train, fourth, _) = named
    assert (report, adopt, train) == ("report", "adopt", "train")
    assert (none, second, fourth) == ("", first, third)
    assert first
    assert third


def test_a_client_without_images_sends_nothing():
    client = RAGGED.index(0)
    _, sent, last = answer_round(local_federation("linear").engine, EXPERIMENT, client, 0)
    assert (sent, last.idle) == ({}, True)


def test_a_refusal_is_raised_in_its_words(monkeypatch):
    def refuse(party, message):
        return message._replace(header=message.header.model_copy(update={"problem": "No budget is left."}))

    monkeypatch.setattr(Party, "answer", refuse)
    with pytest.raises(FedVLError, match=r"No budget is left\."):
        answer_round(local_federation("linear").engine, EXPERIMENT, 3, 0)


def test_only_secure_aggregation_is_switched_off():
    prepared = prepared_of(federation=SECURE)
    shown = in_the_open(prepared)
    plain = prepared.experiment.federation.model_copy(update={"secure_sum": False})
    assert shown.experiment == prepared.experiment.model_copy(update={"federation": plain})
    assert prepared.experiment.federation.secure_sum


@pytest.mark.parametrize("secure", [False, True])
def test_a_rehearsal_shows_the_unmasked_update_and_attacks_it(secure, audited):
    prepared = prepared_of(federation=SECURE if secure else None)
    found = rehearse(prepared, EXPERIMENT, 2)
    update = found["leaves"]["train"]
    assert update.keys() == {"weight", "bias"}
    assert found["least_clients"] == (5 if secure else None)
    assert found["numbers"]["weight"] == found["images"] == 20
    assert found["audit"] == {"made": "up"}
    ((given, client, message, _),) = audited
    assert given is prepared  # the attacks know that the server sees a sum
    assert (client, message.client, message.round_index) == (2, 2, 0)
    assert message.update.tensors is update
    engine = local_engine(in_the_open(prepared))
    (trained,) = engine.train(0, [2], prepared.method.first_shared(0))  # one batch: no order, so no secret
    torch.testing.assert_close(update["weight"], trained.update.tensors["weight"])
    torch.testing.assert_close(message.before["weight"], prepared.method.first_shared(0)["weight"])


def test_two_rehearsals_draw_the_attackers_randomness_anew(audited):
    for _ in range(2):
        rehearse(prepared_of(), EXPERIMENT, CLIENTS - 1)
    assert audited[0][3] != audited[1][3]
