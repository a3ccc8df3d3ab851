"""Answers that are none, and a server that is killed: nothing of it can be seen in the result."""

import threading
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.lazy import lazily
from helpers.small import run_quietly, small_task

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import (
    AT_ONCE,
    CLIENTS,
    EXPERIMENT,
    NODE,
    RUN,
    UNREADABLE,
    Raw,
    altered,
    failed,
    local_federation,
    remote_federation,
    same,
    silent,
    tensors_changed,
    with_payload,
    without,
)

from fedvl.deployment.class_lists import names_as_tensors
from fedvl.deployment.own_counts import as_tensors, image_noise
from fedvl.deployment.remote import Identity, RemoteEngine
from fedvl.errors import FedVLError
from fedvl.evaluation.counts import count, count_pair
from fedvl.evaluation.noisy_counts import coarse_shapes
from fedvl.federation.accounting import Step
from fedvl.federation.journal import Journal
from fedvl.federation.round import Federation
from fedvl.seeding import torch_generator

flower_app, flower = lazily("flwr.app"), lazily("fedvl.deployment.flower")

# --- answers that are none


BAD = {
    "another run's": (altered(run="c" * 32), "another run, round or client"),
    "another experiment's": (altered(experiment="c" * 64), "another run, round or client"),
    "a round before": (altered(round=0), "another run, round or client"),
    "an attempt before": (altered(attempt=1), "another run, round or client"),
    "another client's": (altered(client=0), "another run, round or client"),
    "another kind's": (altered(kind="report"), "another run, round or client"),
    "a weight that is none": (altered(weight=float("nan")), "header of its message"),
    "a loss that is none": (altered(loss=float("inf")), "header of its message"),
    "a weight of nothing": (altered(weight=0.0), "weight 0.0 is not between"),
    "a field too many": (altered(more=1), "header of its message"),
    "a state that is a path": (altered(state="../../etc/passwd"), "header of its message"),
    "no header": (lambda message, party: [Raw("")], "header of its message"),
    "a list for a header": (lambda message, party: [Raw("[1]")], "header of its message"),
    "cut short": (with_payload(lambda payload: payload[:-3]), "not whole safetensors"),
    "nothing inside": (with_payload(lambda payload: b""), "missing or not asked for"),
    "a header of 2^62 bytes": (with_payload(lambda payload: (2**62).to_bytes(8, "little") + payload[8:]), "header"),
    "a tensor too many": (tensors_changed(lambda t: {**t, "more": torch.zeros(1)}), "'more'"),
    "not finite": (tensors_changed(lambda t: {n: torch.full_like(x, torch.nan) for n, x in t.items()}), "not finite"),
    "another record": (
        lambda message, party: [flower_app.RecordDict({"other": flower_app.ConfigRecord({"x": 1})})],
        "unexpected format",
    ),
    "numbers for bytes": (
        lambda message, party: [
            flower_app.RecordDict({"message": flower_app.ConfigRecord({"header": 1, "payload": "x"})})
        ],
        "unexpected format",
    ),
    "not one of Flower's": (lambda message, party: [UNREADABLE], "none of Flower's (ValueError)"),
    "an error": (failed, "ran out of memory"),
    "a word for the terminal": (altered(problem="\x1b[2J" + 400 * "!"), "it says: ?[2J!!!"),
    "too large": (with_payload(lambda payload: payload + bytes(2**17)), "more than"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_answer_is_refused_and_changes_nothing(kind, tmp_path):
    fault, reason = BAD[kind]
    settings = {"max_message_bytes": 2**16} if kind == "too large" else {}
    remote, _ = remote_federation("fst-cbdg", tmp_path, {(3, 1, "train"): fault}, **settings)
    run_quietly(remote)
    assert same(remote, without("fst-cbdg", (3, 1)))
    ((client, said),) = [(item.client, item.reason) for record in remote.records for item in record.refused]
    assert client == 3
    assert reason in said


@pytest.mark.parametrize("fault", [silent, failed, altered(round=7), with_payload(lambda payload: payload[:9])])
def test_a_report_that_is_none_leaves_the_rest_to_agree(fault, tmp_path):
    remote, grid = remote_federation(
        "fedpp", tmp_path, {(3, 0, "report"): fault}, {"visual_prompts": False}, deadline=AT_ONCE
    )
    run_quietly(remote)
    labels = grid.parties[3].engine.private_of(3)["labels"]
    assert (labels == -1).all()
    others = [grid.parties[client].engine.private[client]["labels"] for client in (0, 4)]
    assert all((own >= 0).any() for own in others)


def test_two_runs_at_once_on_the_same_clients_do_not_meet(tmp_path):
    """Round by round in turns; both use the same clients' data, each its own private tensors."""
    first, _ = remote_federation("fst-cbdg", tmp_path / "first")
    second, _ = remote_federation("fst-cbdg", tmp_path / "second", training={"learning_rate": 0.2})

    def take_turns(record):
        second.config = second.config.model_copy(update={"rounds": record.round})
        run_quietly(second)

    first.run(after_round=take_turns)
    assert same(first, run_quietly(local_federation("fst-cbdg")))
    assert same(second, run_quietly(local_federation("fst-cbdg", training={"learning_rate": 0.2})))


# --- the server


@pytest.mark.parametrize("name", ["fst-cbdg", "fedpp", "fed-mp", "linear"])
@pytest.mark.parametrize("when", ["before the commit", "after the commit"])
def test_a_server_killed_in_a_round_goes_on_to_the_same_bits(name, when, tmp_path):
    class KilledError(Exception):
        pass

    class Mortal(Journal):
        def commit(self, round_number, tensors, record, adds=False):
            if round_number == 2 and when == "before the commit":
                raise KilledError
            super().commit(round_number, tensors, record, adds)
            if round_number == 2:
                raise KilledError

    remote, grid = remote_federation(name, tmp_path)
    remote.journal = Mortal(tmp_path / "journal")
    with pytest.raises(KilledError):
        run_quietly(remote)
    engine = RemoteEngine(
        flower.GridTransport(grid, {client: NODE + client for client in range(CLIENTS)}),
        remote.method,
        remote.config,
        CLIENTS,
        Identity(RUN, EXPERIMENT),
    )
    start = remote.method.start(torch_generator(0, "start"))
    again = Federation(remote.method, engine, remote.config, 0, start, journal=Journal(tmp_path / "journal"))
    again.restore()
    assert len(again.records) == (1 if when == "before the commit" else 2)
    assert same(run_quietly(again), run_quietly(local_federation(name)))


def test_without_a_quorum_the_run_stops_and_says_so(tmp_path):
    remote, grid = remote_federation("linear", tmp_path, deadline=0.1, quorum=3)
    grid.online = {0, 3}
    with pytest.raises(FedVLError, match=r"got 2 usable updates .* quorum of 3"):
        run_quietly(remote)
    assert remote.records == []


def test_a_client_that_is_back_before_the_deadline_is_waited_for(tmp_path):
    remote, grid = remote_federation("linear", tmp_path, quorum=4, deadline=30)
    grid.online = set()
    looks = iter(range(5))
    seen = grid.get_node_ids

    def come_back():
        if next(looks, None) is None:
            grid.online = set(range(CLIENTS))
        return seen()

    grid.get_node_ids = come_back
    assert same(run_quietly(remote), run_quietly(local_federation("linear")))


def test_an_answer_that_is_never_sent_whole_does_not_keep_others_from_being_received(tmp_path, monkeypatch):
    """Flower waits for minutes for one whose sender was killed while sending it."""
    monkeypatch.setattr("fedvl.deployment.flower.PULL_SECONDS", 0.01)
    whole = threading.Event()

    class Grid:
        def pull_messages(self, tickets):
            if tickets == ["stuck"]:
                whole.wait(60)
            return [SimpleNamespace(metadata=SimpleNamespace(src_node_id=NODE), ticket=tickets[0])]

    monkeypatch.setattr("fedvl.deployment.flower.unpack", lambda envelope: envelope.ticket)
    transport = flower.GridTransport(Grid(), {0: NODE})
    assert list(transport.collect(["stuck", "other"])) == [("other", 0, "other")]
    pull = transport.pulls["stuck"]
    assert list(transport.collect(["stuck"])) == []
    assert transport.pulls["stuck"] is pull  # it is pulled once
    whole.set()
    pull.join(60)
    assert list(transport.collect(["stuck"])) == [("stuck", 0, "stuck")]
    assert transport.pulls == {}


# --- counts of an evaluation


LABELS = np.array([0, 0, 1, 1, 2])
FIRST, SECOND = (np.eye(3)[answers] * 0.8 + 0.05 for answers in ([0, 0, 1, 2, 2], [0, 1, 1, 1, 0]))
THREE: dict[str, torch.Tensor] = {"model": torch.zeros(32, dtype=torch.uint8)}
PAIR_OF_MODELS = {
    **THREE,
    "other_run": torch.zeros(16, dtype=torch.uint8),
    "other_model": torch.ones(32, dtype=torch.uint8),
}


def counting(folder, tables, **settings):
    """The small federation, whose clients answer an evaluation with these tables."""
    federation, grid = remote_federation("linear", folder, **settings)
    for client, party in enumerate(grid.parties):
        party.counts = lambda request, least, client=client: tables(client)
    return federation.engine


def both_models(client):
    return as_tensors(count(LABELS, FIRST), count_pair(LABELS, FIRST, SECOND))


def test_counts_of_two_models_come_from_each_client_or_as_one_sum(tmp_path):
    each = counting(tmp_path / "each", both_models).evaluate(1, PAIR_OF_MODELS, 3)
    assert set(each) == set(range(CLIENTS))
    assert [found.paired.tolist() for found in each.values()] == [[2, 2, 1, 0]] * CLIENTS
    secure = counting(tmp_path / "sum", both_models, secure_sum=True, least_clients=2)
    (found,) = secure.evaluate(1, PAIR_OF_MODELS, 3).values()
    assert found.paired.tolist() == [2 * CLIENTS, 2 * CLIENTS, CLIENTS, 0]
    assert found.counts.confusion.tolist() == (CLIENTS * count(LABELS, FIRST).confusion).tolist()


def test_counts_of_two_models_that_cannot_be_are_refused(tmp_path):
    """Client 1 counts other images, client 2 sends none of both models, and client 3 counts that were not requested."""
    lies = {1: as_tensors(count(LABELS, FIRST), np.array([9, 9, 9, 9])), 2: as_tensors(count(LABELS, FIRST))}
    engine = counting(tmp_path / "pair", lambda client: lies.get(client) or both_models(client))
    assert set(engine.evaluate(1, PAIR_OF_MODELS, 3)) == {0, 3, 4}
    assert {each.client: each.reason for each in engine.refused()} == {
        1: "its counts of two models are of other images than its scores",
        2: "its counts are not those that were requested",
    }
    engine = counting(tmp_path / "one", lambda client: as_tensors(count(LABELS, FIRST)) if client < 3 else lies[1])
    found = engine.evaluate(1, THREE, 3)
    assert {client: each.paired for client, each in found.items()} == {0: None, 1: None, 2: None}


def test_an_evaluation_that_was_answered_is_not_answered_with_other_counts(tmp_path):
    """A comparison with each of many models would tell about single images."""
    engine = counting(tmp_path, both_models)
    first = engine.evaluate(1, PAIR_OF_MODELS, 3)
    again = engine.evaluate(1, PAIR_OF_MODELS, 3)
    assert [each.paired.tolist() for each in again.values()] == [each.paired.tolist() for each in first.values()]
    other = {**PAIR_OF_MODELS, "other_run": torch.ones(16, dtype=torch.uint8)}
    assert not engine.evaluate(1, other, 3)
    assert {each.reason for each in engine.refused()} == {
        "it says: This client has answered this evaluation with other counts; request another (--number)."
    }
    assert len(engine.evaluate(2, other, 3)) == CLIENTS


@pytest.mark.parametrize("settings", [{}, {"secure_sum": True, "least_clients": 2}], ids=["each", "secure sums"])
def test_class_names_come_from_each_client_that_sends_them(settings, tmp_path):
    """Also where all else is summed: client 1 is not there for a survey, and client 2 sends something else."""
    federation, grid = remote_federation("linear", tmp_path, **settings)
    for client, party in enumerate(grid.parties):
        party.survey = lambda least: {}
        party.names = lambda client=client: names_as_tensors([f"class of {client}"])
    grid.parties[1].survey = None
    grid.parties[2].names = lambda: {"names": torch.zeros(3)}
    found = federation.engine.class_names()
    assert found == {client: [f"class of {client}"] for client in (0, 3, 4)}
    assert {each.client: each.reason for each in federation.engine.refused()} == {
        1: "it says: This client is not there for a survey; its person starts fedvl client with --survey.",
        2: "its class names have an unexpected format",
    }


@pytest.mark.parametrize("settings", [{}, {"secure_sum": True, "least_clients": 2}], ids=["each", "secure sums"])
def test_noise_on_counts_is_added_and_booked_once(settings, tmp_path):
    """In a secure sum of five clients any two add the whole noise, so that the sum has 5/2 of its variance."""
    names = len(small_task().class_names)
    engine = counting(
        tmp_path, lambda client: {n: torch.full(s, 1000) for n, s in coarse_shapes(names).items()}, **settings
    )
    noisy = {**THREE, "noise": torch.tensor([2.0, 1e-5], dtype=torch.float64)}
    found = engine.evaluate_with_noise(1, noisy, names)
    parties = engine.transport.grid.parties
    noise = image_noise(2.0, 1e-5, names, 2 if settings else 1)
    for client, tables in found.items():
        clients = CLIENTS if client is None else 1
        assert tables["scores"].mean() == pytest.approx(1000 * clients, abs=4 * noise.deviation)
        assert tables["scores"].std() == pytest.approx(noise.deviation * clients**0.5, rel=0.35)
    again = engine.evaluate_with_noise(1, noisy, names) if not settings else found
    assert all((again[client]["scores"] == tables["scores"]).all() for client, tables in found.items())
    for party in parties:
        (entry,) = party.log.entries("budget")
        assert (entry["of"], entry["unit"], entry["account"]) == ("evaluate", "record", "rdp")
        assert 1.9 < entry["epsilon"] <= 2.0
        assert Step(entry["rate"], entry["sigma"]) == noise.step
    less = {**THREE, "noise": torch.tensor([8.0, 1e-5], dtype=torch.float64)}
    parties[0]._count(parties[0].engine.federation.rounds + 1, less)
    first, second = parties[0].log.entries("budget")
    assert second["sigma"] < first["sigma"], "less noise for the same evaluation, whose first sum was not opened"
    assert second["epsilon"] > 8


def test_counts_with_noise_that_cannot_be_are_refused(tmp_path):
    names = len(small_task().class_names)
    tables = {n: torch.zeros(s, dtype=torch.long) for n, s in coarse_shapes(names).items()}
    lies = {1: {**tables, "hits": torch.full((names,), 2**40)}, 2: {"scores": tables["scores"]}}
    engine = counting(tmp_path, lambda client: lies.get(client, tables))
    noisy = {**THREE, "noise": torch.tensor([2.0, 1e-5], dtype=torch.float64)}
    assert set(engine.evaluate_with_noise(1, noisy, names)) == {0, 3, 4}
    assert {each.client: each.reason for each in engine.refused()} == {
        1: "its counts are too large",
        2: "its counts are not those that were requested",
    }
