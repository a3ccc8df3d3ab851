"""Letters over Flower's Grid, in one process: the same bits as the local engine, whatever happens to clients."""

import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from helpers.lazy import lazily
from helpers.small import RAGGED, run_quietly, small_method

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import (
    AT_ONCE,
    CLIENTS,
    METHODS,
    NODE,
    failed,
    local_federation,
    party_of,
    remote_federation,
    request,
    same,
    silent,
    twice,
    with_payload,
    without,
)

from fedvl.methods import method_names
from fedvl.tensors import digest

flower_app = lazily("flwr.app")
ONE_EPOCH = {"local_epochs": 1}  # of a round, where what is shown is who is in it

# --- the same result


def takes_part(name):
    method = small_method(name)
    trains = method.start(torch.Generator()) or method.role.trained_private
    return bool(trains) and method.scope != "pooled"


def test_what_is_tried_below_is_every_method_that_can_take_part():
    assert [name for name in method_names() if takes_part(name)] == METHODS


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_bits_of_the_local_engine_and_keeps_private_tensors_with_clients(name, tmp_path):
    remote, grid = remote_federation(name, tmp_path, rounds=2)
    alone = bool(small_method(name).role.statistics)  # sums over all samples together have other bits
    local = run_quietly(local_federation(name, rounds=2, one_by_one=alone))
    assert same(run_quietly(remote), local)
    for figure in ("loss", "dropped", "bytes_up", "bytes_down"):
        assert [getattr(record, figure) for record in remote.records] == [
            getattr(record, figure) for record in local.records
        ]
    assert remote.engine.private.keys() == local.engine.private.keys()
    for client, private in local.engine.private.items():
        (state,) = remote.engine.private[client].values()  # a name; the party has what it stands for
        assert state.shape == (32,)
        party = grid.parties[client]
        party._begin(request(client=client, state=bytes(state.numpy()).hex()))
        assert digest(party.engine.private[client]) == digest(private)


@pytest.mark.parametrize("counts", ["summed", "sent"])
def test_the_exchange_before_a_round_gives_the_same_labels(counts, tmp_path):
    options, settings = {"counts": counts, "visual_prompts": False}, {"rounds": 3, "per_round": 2}
    remote, grid = remote_federation("fedpp", tmp_path, options={**options, "interval": 2}, **settings)
    local = run_quietly(local_federation("fedpp", {**options, "interval": 2}, **settings))
    run_quietly(remote)
    assert [header["kind"] for header in grid.headers].count("report") == 2 * CLIENTS  # rounds 1 and 3
    for client, private in local.engine.private.items():
        assert torch.equal(grid.parties[client].engine.private[client]["labels"], private["labels"])


# --- clients that fail


def killed_after_training(message, party):
    party.answer(message)  # its files are written, its answer is not sent
    party.engine.private.clear()
    return []


def killed_while_writing(message, party):
    party.answer(message)
    newest = max(party.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is not None and message.header.state not in newest.name:
        newest.write_bytes(newest.read_bytes()[:40])
    return []


PHASES = {
    "before it is asked": None,
    "before training": silent,
    "while writing": killed_while_writing,
    "after training": killed_after_training,
    "with an error": failed,
}


@pytest.mark.parametrize("name", ["fst-cbdg", "fed-mp", "cachefl", "fedpp", "fed-prime"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [client for client, size in enumerate(RAGGED) if size])
def test_a_client_killed_in_any_phase_is_as_one_that_was_not_there(name, phase, victim, tmp_path):
    faults = {(victim, 1, "train"): PHASES[phase]} if PHASES[phase] else {}
    remote, grid = remote_federation(name, tmp_path, faults, training=ONE_EPOCH, deadline=AT_ONCE)
    if PHASES[phase] is None:
        grid.online.discard(victim)
        remote.run(after_round=lambda record: grid.online.add(victim) if record.round == 2 else None)
        expected = without(name, (victim, 0), (victim, 1), epochs=1)
        if name == "fedpp":  # it missed the exchange before the first round as well, and has nothing to train on
            assert [victim in record.dropped for record in remote.records] == [True] * len(remote.records)
            return
    else:
        run_quietly(remote)
        expected = without(name, (victim, 1), epochs=1)
    assert same(remote, expected)
    assert [record.dropped for record in remote.records] == [record.dropped for record in expected.records]


@pytest.mark.parametrize("draw", range(8))
def test_letters_that_are_lost_at_random_cost_no_more_than_their_clients_round(draw, tmp_path):
    chance = random.Random(draw)
    clients = [client for client in range(CLIENTS) if client != 3]  # one gets all its messages: a round needs an answer
    lost = [(client, number) for client in clients for number in range(6) if chance.random() < 0.2]
    faults = {(client, number, "train"): silent for client, number in lost}
    remote, _ = remote_federation("fst-cbdg", tmp_path, faults, training=ONE_EPOCH, deadline=AT_ONCE, rounds=6)
    assert same(run_quietly(remote), without("fst-cbdg", *lost, epochs=1, rounds=6))


def test_nobody_is_waited_for_who_is_gone(tmp_path):
    def vanish(message, party):
        grid.online.discard(3)
        return []

    remote, grid = remote_federation("linear", tmp_path, {(3, 1, "train"): vanish}, deadline=10_000)
    assert same(run_quietly(remote), without("linear", (3, 1), (3, 2)))


def test_a_letter_that_the_server_could_not_deliver_is_no_answer(tmp_path):
    """Flower tells so when an envelope is past its time."""
    remote, grid = remote_federation("linear", tmp_path, {(3, 0, "train"): silent}, deadline=0.2)

    def expire(record):
        for ticket in remote.engine.late:
            envelope = flower_app.Message(flower_app.RecordDict(), dst_node_id=NODE + 3, message_type="train")
            envelope.metadata.__dict__["_message_id"] = ticket
            grid.waiting[ticket] = [grid.as_message(flower_app.Error(code=1, reason="expired"), envelope)]

    remote.run(after_round=expire)
    assert same(remote, without("linear", (3, 0)))
    assert [record.refused for record in remote.records] == [[], [], []]


def test_a_client_that_starts_again_goes_on_with_what_was_counted(tmp_path):
    remote, grid = remote_federation("fst-cbdg", tmp_path, {(3, 1, "train"): killed_after_training}, deadline=0.2)
    template = local_federation("fst-cbdg").engine

    def restart(record):
        grid.parties[3] = party_of(remote.method, 3, tmp_path, template)

    remote.run(after_round=restart)
    assert same(remote, without("fst-cbdg", (3, 1)))


def test_a_client_that_lost_its_folder_is_named_and_left_out(tmp_path):
    remote, grid = remote_federation("fst-cbdg", tmp_path)

    def lose(record):
        for path in grid.parties[3].folder.glob("*.safetensors"):
            path.unlink()

    remote.run(after_round=lose)
    assert same(remote, without("fst-cbdg", (3, 1), (3, 2)))
    assert "private tensors of an earlier round are lost" in remote.records[1].refused[0].reason


@pytest.mark.parametrize("name", METHODS)
def test_late_double_and_malformed_answers_are_refused_whatever_the_method(name, tmp_path):
    held = []

    def straggle(message, party):
        held.append(party.answer(message))
        return []

    faults = {(3, 0, "train"): straggle, (0, 1, "train"): twice, (4, 1, "train"): with_payload(lambda p: p[:-3])}
    remote, grid = remote_federation(name, tmp_path, faults, training=ONE_EPOCH, deadline=AT_ONCE, rounds=2)

    def deliver(record):
        if record.round == 1:
            ticket = next(ticket for ticket, late in remote.engine.late.items() if late.client == 3)
            envelope = flower_app.Message(flower_app.RecordDict(), dst_node_id=NODE + 3, message_type="train")
            envelope.metadata.__dict__["_message_id"] = ticket
            grid.waiting[ticket] = [grid.as_message(held[0], envelope)]

    remote.run(after_round=deliver)
    assert same(remote, without(name, (3, 0), (4, 1), epochs=1, rounds=2))
    assert 3 in remote.records[0].dropped
    assert {item.client: item.reason.split(":")[0] for item in remote.records[1].refused} == {
        3: "its answer of round 1 came too late",
        0: "it answered twice, or what it was not asked",
        4: "its message is not whole safetensors",
    }


# --- Flower's own processes


def test_they_load_no_torch_for_they_never_open_a_message():
    code = "import sys, fedvl.deployment.flower; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
