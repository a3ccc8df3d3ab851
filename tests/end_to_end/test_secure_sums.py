"""Rounds of which the server learns sums alone: the bits of the local engine, whoever is lost at which step."""

import json
from importlib.util import find_spec

import pytest
import torch
from helpers.lazy import lazily
from helpers.small import RAGGED, run_quietly, small_method

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import CLIENTS, METHODS, NODE, local_federation, party_of, remote_federation, request, same, silent

from fedvl.deployment.messages import pack_tensors, unpack_tensors, write
from fedvl.deployment.remote import Identity, RemoteEngine
from fedvl.errors import FedVLError
from fedvl.federation.fixed_point import count_numbers
from fedvl.federation.journal import Journal
from fedvl.federation.round import Federation

flower = lazily("fedvl.deployment.flower")

SECURE = {"secure_sum": True, "least_clients": 2, "rounds": 3}
WITH_DATA = [client for client, size in enumerate(RAGGED) if size]


def summable(name):
    method = small_method(name)
    start = method.start(torch.Generator())
    consultation = method.consultation()
    return bool(start) and not method.role.sent and all(method.role.needs(n) == "sum" for n in start) and (
        consultation is None or consultation.summed
    )  # fmt: skip


SUMMABLE = [name for name in METHODS if summable(name)]


def test_methods_that_need_single_updates_are_these():
    assert set(METHODS) - set(SUMMABLE) == {"fed-inter", "fed-mp", "fed-prime", "fedmsplit-p", "pfedmoap"}


@pytest.mark.parametrize("name", SUMMABLE)
def test_every_method_of_sums_gives_the_bits_of_the_local_engine(name, tmp_path):
    settings = {**SECURE, "rounds": 2, "training": {"local_epochs": 1}}
    remote, _grid = remote_federation(name, tmp_path, **settings)
    local = run_quietly(local_federation(name, **settings))
    assert same(run_quietly(remote), local)
    for figure in ("loss", "cohort", "dropped"):
        assert [record[figure] for record in remote.records] == [record[figure] for record in local.records]
    assert remote.engine.private.keys() == local.engine.private.keys()
    plain = run_quietly(local_federation(name, rounds=2, training={"local_epochs": 1}))
    for key in plain.shared:  # and, but for rounding, those of a run in the open
        torch.testing.assert_close(local.shared[key], plain.shared[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fst-cbdg", "cachefl", "fedpp", "pfedprompt", "linear"])
def test_no_answer_that_the_server_gets_says_anything_of_one_client(name, tmp_path):
    remote, grid = remote_federation(name, tmp_path, **{**SECURE, "rounds": 1})
    seen = []
    run_quietly(remote)
    for party in grid.parties:
        for path in party.folder.glob("*-train.answer"):
            seen.append(unpack_tensors(path.read_bytes(), 2**26))
            header = json.loads(path.with_suffix(".json").read_text())
            assert (header["weight"], header["loss"], header["examples"]) == (0, 0, 0)
    assert len(seen) == CLIENTS  # who has no images cannot be told from the others either
    for answer in seen:
        assert answer.keys() == {"cohort", "masked", "shares"}
        high = answer["masked"] >> 48  # 0 or -1 for numbers of these sizes that are not masked
        assert ((high == 0) | (high == -1)).float().mean() < 0.05
    assert len({tuple(answer["masked"][:8].tolist()) for answer in seen}) == len(seen)


STEPS = ["keys", "train", "reveal_train"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["fst-cbdg", "cachefl", "linear"])
def test_a_client_lost_at_any_step_costs_no_more_than_its_round(name, step, tmp_path):
    """Lost before the sum: it is not in it. Lost after it: it is, and the others open its mask."""
    victim = WITH_DATA[-1]
    late_round = 0 if step == "keys" else 1
    remote, _grid = remote_federation(name, tmp_path, {(victim, late_round, step): silent}, deadline=0.2, **SECURE)
    run_quietly(remote)
    dropped = [victim in record["dropped"] for record in remote.records]
    expected = {"keys": [True, False, False], "train": [False, True, False], "reveal_train": [False, False, False]}
    assert dropped == expected[step]
    assert all(torch.isfinite(tensor).all() for tensor in remote.shared.values())


def test_a_sum_waits_for_as_many_clients_as_it_needs(tmp_path):
    """A new SuperLink sees its clients come back one by one."""
    remote, grid = remote_federation("linear", tmp_path, deadline=30, **SECURE)
    coming = iter(range(CLIENTS))
    grid.online = set()
    seen = grid.get_node_ids

    def one_more():
        grid.online |= {client for client in [next(coming, None)] if client is not None}
        return seen()

    grid.get_node_ids = one_more
    run_quietly(remote)
    assert len(remote.records) == remote.config.rounds
    assert len(remote.records[0]["dropped"]) <= CLIENTS - SECURE["least_clients"]


def test_a_lost_client_gives_the_bits_of_a_round_without_it(tmp_path):
    from helpers.parties import Absent

    victim = WITH_DATA[-1]
    remote, _ = remote_federation("linear", tmp_path, {(victim, 1, "train"): silent}, deadline=0.2, **SECURE)
    local = local_federation("linear", **SECURE)
    local.engine.__class__ = Absent
    local.engine.missing = {(victim, 1)}
    assert same(run_quietly(remote), run_quietly(local))


def test_two_losses_that_leave_nothing_to_read_stop_the_run_and_it_goes_on_when_they_are_back(tmp_path):
    lost, silenced = WITH_DATA[0], WITH_DATA[-1]
    faults = {(lost, 1, "train"): silent, (silenced, 1, "reveal_train"): silent}
    remote, grid = remote_federation("linear", tmp_path, faults, deadline=0.2, **SECURE)
    remote.journal = Journal(tmp_path / "journal")
    remote.engine.notes = tmp_path / "sums.json"
    with pytest.raises(FedVLError, match=f"Clients {lost} were lost before the sum and {silenced} before"):
        run_quietly(remote)
    assert len(remote.records) == 1
    grid.faults.clear()
    nodes = {client: NODE + client for client in range(CLIENTS)}
    engine = RemoteEngine(
        flower.GridTransport(grid, nodes),
        remote.method,
        remote.config,
        CLIENTS,
        Identity("a" * 32, "b" * 64),
        notes=tmp_path / "sums.json",
    )
    again = Federation(remote.method, engine, remote.config, 0, dict(remote.shared), journal=remote.journal)
    again.restore()
    run_quietly(again)
    assert [record["round"] for record in again.records] == [1, 2, 3]
    assert lost in again.records[1]["dropped"]  # the sum that was begun is the one that is opened
    assert lost not in again.records[2]["dropped"]


def test_a_server_that_is_killed_after_the_masked_answers_goes_on_to_the_same_bits(tmp_path):
    local = run_quietly(local_federation("linear", **SECURE))
    remote, _grid = remote_federation("linear", tmp_path, **SECURE)
    engine = remote.engine
    exchange = engine._exchange

    def killed(kind, round_index, payloads, seconds=None):
        found = exchange(kind, round_index, payloads, seconds)
        if kind == "train" and round_index == 1:
            engine._exchange = exchange
            raise KeyboardInterrupt
        return found

    engine._exchange = killed
    with pytest.raises(KeyboardInterrupt):
        run_quietly(remote)
    assert same(run_quietly(remote), local)


def test_fedpps_counts_reach_the_server_as_totals_alone(tmp_path):
    options = {"counts": "summed", "visual_prompts": False, "interval": 2}
    remote, grid = remote_federation("fedpp", tmp_path, options=options, **SECURE)
    local = run_quietly(local_federation("fedpp", options, **SECURE))
    run_quietly(remote)
    for client, private in local.engine.private.items():
        assert torch.equal(grid.parties[client].engine.private[client]["labels"], private["labels"])
    shapes = remote.method.consultation().report_shapes
    for party in grid.parties:
        for path in party.folder.glob("*-report.answer"):
            answer = unpack_tensors(path.read_bytes(), 2**26)
            assert answer.keys() == {"cohort", "masked", "shares"}
            assert len(answer["masked"]) == count_numbers(shapes)


@pytest.mark.parametrize("name", ["fst-cbdg", "fedpp"])
def test_too_few_clients_are_refused_before_anything_is_sent(name, tmp_path):
    settings = {**SECURE, "least_clients": CLIENTS + 1}
    remote, grid = remote_federation(name, tmp_path, **settings)
    with pytest.raises(FedVLError, match="nothing was sent"):
        run_quietly(remote)
    assert not [header for header in grid.headers if header["kind"] in ("train", "report")]
    with pytest.raises(FedVLError, match="too few to hide one of them"):
        run_quietly(local_federation(name, **settings))


# --- a server that lies


@pytest.fixture
def party(tmp_path):
    template = local_federation("linear", **SECURE).engine
    return party_of(small_method("linear"), 3, tmp_path, template)


def answer(party, kind="train", round=0, **tensors):
    message = write(request(kind=kind, round=round), pack_tensors({**party.engine.start, **tensors}))
    return party.answer(message)


def test_a_request_without_a_list_of_clients_gets_nothing(party):
    reply = answer(party)
    assert "names no clients to sum over" in reply.read_header().problem
    assert reply.payload == b""


def test_a_list_of_this_client_alone_gets_nothing(party):
    entry = party.sums.entry()["roster"]
    reply = answer(party, roster=entry)
    assert "A sum of 1 clients is too few" in reply.read_header().problem
    assert reply.payload == b""


def test_nothing_is_revealed_that_was_not_sent(party):
    reply = party.answer(write(request(kind="reveal_train", round=0), pack_tensors({})))
    assert "what it never sent" in reply.read_header().problem


def test_a_party_outside_secure_sums_answers_none_of_their_requests(tmp_path):
    plain = party_of(small_method("linear"), 3, tmp_path, local_federation("linear").engine)
    for kind in ("keys", "reveal_train"):
        assert "no secure sums" in plain.answer(write(request(kind=kind, round=0))).read_header().problem


def test_one_sum_a_round_is_opened_whatever_is_asked_afterwards(tmp_path):
    remote, grid = remote_federation("linear", tmp_path, **{**SECURE, "rounds": 1})
    run_quietly(remote)
    party = grid.parties[3]
    before = next(party.folder.glob("000000-reveal_train.answer")).read_bytes()
    fewer = {"survivors": torch.tensor([0, 3]), "shares": torch.zeros(2, 82, dtype=torch.uint8)}
    again = party.answer(write(request(kind="reveal_train", round=0), pack_tensors(fewer)))
    assert again.payload == before
