"""What a party's policy and its log refuse, in a whole federation: one sentence, and nothing leaves."""

import json
from importlib.util import find_spec

import pytest
from helpers.lazy import lazily
from helpers.small import RAGGED, run_quietly

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import CLIENTS, EXPERIMENT, NODE, RUN, SmallClient, altered, fake_grid, local_federation

from fedvl.config import PrivacyConfig
from fedvl.deployment.audit_log import LOG_FILE, NO_HEAD, AuditLog, read_log
from fedvl.deployment.policy import approve, write_policy
from fedvl.deployment.remote import Identity, RemoteEngine
from fedvl.deployment.verification import verify
from fedvl.errors import FedVLError
from fedvl.federation.accounting import Step, epsilon_of

flower = lazily("fedvl.deployment.flower")

VICTIM = 3
WIDE = "least_images = 0\n"
RECORD = PrivacyConfig(unit="record", epsilon=3.0, clip=1.0)
CLIENT = PrivacyConfig(unit="client", epsilon=3.0, clip=0.05)
SECURE = {"secure_sum": True, "least_clients": 2}


def federation_of(folder, run=RUN, privacy=None, **settings):
    """The small federation, with every client as ``fedvl client`` has it, and the log of its server."""
    clients = []
    for number in range(CLIENTS):
        place = folder / str(number)
        if place.exists():  # it was here before: it starts again
            clients.append(SmallClient(number, place, privacy=privacy, **settings))
            continue
        clients.append(SmallClient.joined(number, place, privacy=privacy, **settings))
        (place / "state" / "policy.toml").write_text(WIDE)
        (place / "party.json").write_text(json.dumps({"number": number}))
    federation = local_federation("linear", privacy=privacy, **settings)
    grid = fake_grid(clients)
    (folder / "clinic").mkdir(exist_ok=True)
    federation.engine = RemoteEngine(
        flower.GridTransport(grid, {client: NODE + client for client in range(CLIENTS)}),
        federation.method,
        federation.config,
        CLIENTS,
        Identity(run, EXPERIMENT),
        log=AuditLog(folder / "clinic" / LOG_FILE),
    )
    return federation, clients


def spied(client):
    """What this client answers from now on."""
    replies, answer = [], client.answer

    def remembered(message):
        replies.append(answer(message))
        return replies[-1]

    client.answer = remembered
    return replies


def refused_by(federation, client):
    return [item.reason for record in federation.records for item in record.refused if item.client == client]


def check_nothing_left(replies):
    """Nothing but the sentence: no tensors, no number of this client."""
    assert replies
    for reply in replies:
        header = reply.header
        assert header.problem.count(". ") <= 1, header.problem
        assert (reply.payload, header.weight, header.loss, header.examples, header.state) == (b"", 0, 0, 0, "")


def sent_entries(folder, client):
    return [e for e in read_log(folder / str(client)).chain.entries if e["kind"] == "sent"]


def test_both_logs_hold_a_whole_run_and_agree(tmp_path):
    federation, _ = federation_of(tmp_path)
    run_quietly(federation)
    folders = [tmp_path / "clinic", *(tmp_path / str(client) for client in range(CLIENTS))]
    server, *parties = (checked.chain.entries for checked in verify(folders).logs)
    with_images = [client for client, size in enumerate(RAGGED) if size]
    for client in with_images:
        told = [entry["sha256"] for entry in parties[client] if entry["kind"] == "sent"]
        came = [e["sha256"] for e in server if e["kind"] == "received" and e["client"] == client]
        assert told == came
        assert len(told) == 3


def test_answers_that_come_too_late_are_in_both_logs(tmp_path):
    """A round goes on without a slow client; its answer, which is not used, must match all the same."""
    federation, _ = federation_of(tmp_path, deadline=0.2)
    grid, held = federation.engine.transport.grid, []

    def slow(message, party):
        held.append((f"ticket {grid.number}", party.answer(message)))
        return []

    grid.faults[VICTIM, 0, "train"] = slow
    pull = grid.pull_messages

    def late(tickets):
        """Hand out what was held once it is asked for beside the requests of the next round."""
        if held and tickets == [held[0][0]] and grid.number > CLIENTS:
            ticket, answer = held.pop()
            grid.waiting[ticket] = [grid.as_message(answer, grid.asked[ticket])]
        return pull(tickets)

    grid.asked, push = {}, grid.push

    def remember(envelope):
        grid.asked[f"ticket {grid.number + 1}"] = envelope
        return push(envelope)

    grid.push, grid.pull_messages = remember, late
    run_quietly(federation)
    assert refused_by(federation, VICTIM) == ["its answer of round 1 came too late"]
    (there, back) = verify([tmp_path / "clinic", tmp_path / str(VICTIM)]).traffic
    assert (there.sent, there.matched, back.sent, back.matched) == (3, 3, 3, 3)


def test_a_server_refuses_an_answer_without_the_head_of_its_clients_log(tmp_path):
    federation, _ = federation_of(tmp_path, rounds=2)
    federation.engine.transport.grid.faults[VICTIM, 0, "train"] = altered(log="")
    run_quietly(federation)
    assert refused_by(federation, VICTIM) == [NO_HEAD]
    assert [VICTIM in record.dropped for record in federation.records] == [True, False]


def test_a_tampered_log_is_refused_and_nothing_is_sent(tmp_path):
    federation, clients = federation_of(tmp_path)
    log = tmp_path / str(VICTIM) / "state" / LOG_FILE
    clients[VICTIM].log.append("refused", reason="hours")
    log.write_bytes(log.read_bytes().replace(b'"reason": "hours"', b'"reason": "other"'))
    before, replies = log.read_bytes(), spied(clients[VICTIM])
    run_quietly(federation)
    check_nothing_left(replies)
    assert refused_by(federation, VICTIM)[0].startswith(
        "it says: audit.jsonl was changed: line 2 is not as it was written."
    )
    assert log.read_bytes() == before
    assert not (tmp_path / str(VICTIM) / "state" / "runs").exists()
    assert all(VICTIM in record.dropped for record in federation.records)  # the others go on
    with pytest.raises(FedVLError, match="line 2 "):
        verify([log])


def test_a_tampered_log_of_the_server_stops_it_before_anything_is_sent(tmp_path):
    log = AuditLog(tmp_path / LOG_FILE)
    log.append("run", run=RUN)
    path = tmp_path / LOG_FILE
    path.write_bytes(path.read_bytes().replace(b'"run": "a', b'"run": "b'))
    federation, clients = federation_of(tmp_path / "all")
    federation.engine.log = AuditLog(path)
    replies = [spied(client) for client in clients]
    with pytest.raises(FedVLError, match="was changed: line 1 is not as it was written"):
        run_quietly(federation)
    assert not any(replies)


def test_a_run_that_was_not_approved_is_refused_and_nothing_is_sent_until_it_is(tmp_path):
    (tmp_path / str(VICTIM) / "state").mkdir(parents=True)
    write_policy(tmp_path / str(VICTIM) / "state")
    federation, clients = federation_of(tmp_path, rounds=2)
    replies = spied(clients[VICTIM])
    run_quietly(federation)
    check_nothing_left(replies)
    (first, *_) = refused_by(federation, VICTIM)
    assert "This party has not approved the experiment bbbbbbbbbbbb" in first
    assert "fedvl federation approve 3" in first
    assert not sent_entries(tmp_path, VICTIM)
    approve(AuditLog(tmp_path / str(VICTIM) / "state" / LOG_FILE), EXPERIMENT)  # as another process does
    assert clients[VICTIM].problem(round=0) == ""
    assert len(sent_entries(tmp_path, VICTIM)) == 1


def test_a_spent_budget_is_refused_over_runs_and_restarts_and_nothing_is_sent(tmp_path):
    """Each run by itself keeps below its epsilon of 3; the second would take the sum of both above 3.5."""
    first, _ = federation_of(tmp_path, privacy=RECORD)
    (tmp_path / str(VICTIM) / "state" / "policy.toml").write_text("epsilon = 3.5\ndelta = 1e-5")
    run_quietly(first)
    assert refused_by(first, VICTIM) == []
    second, clients = federation_of(tmp_path, run="c" * 32, privacy=RECORD)
    replies = spied(clients[VICTIM])
    run_quietly(second)
    answered = [reply for reply in replies if not reply.header.problem]
    check_nothing_left(replies[len(answered) :])
    assert len(answered) < 3
    assert "The line epsilon of this party's policy.toml is 3.5" in refused_by(second, VICTIM)[0]
    budget = [e for e in read_log(tmp_path / str(VICTIM)).chain.entries if e["kind"] == "budget"]
    assert len(budget) == 3 + len(answered)
    steps = Step(budget[0]["rate"], budget[0]["sigma"])
    each = budget[0]["steps"]
    assert epsilon_of({steps: each * len(budget)}, 1e-5) <= 3.5 < epsilon_of({steps: each * (len(budget) + 1)}, 1e-5)
    assert all(not refused_by(second, client) for client in range(CLIENTS) if client != VICTIM)


def test_a_spent_budget_at_client_level_is_refused_over_runs_and_nothing_is_sent(tmp_path):
    """The client adds its share of the noise itself, so that its policy counts these rounds too."""
    first, clients = federation_of(tmp_path, privacy=CLIENT, **SECURE)
    (tmp_path / str(VICTIM) / "state" / "policy.toml").write_text("epsilon = 3.5\ndelta = 1e-5")
    run_quietly(first)
    assert refused_by(first, VICTIM) == []
    budget = [e for e in read_log(tmp_path / str(VICTIM)).chain.entries if e["kind"] == "budget"]
    assert [(e["unit"], e["rate"], e["steps"]) for e in budget] == [("client", 1.0, 1)] * 3
    assert budget[-1]["epsilon"] == pytest.approx(first.records[-1].privacy.epsilon)
    assert budget[-1]["sigma"] == pytest.approx(clients[VICTIM].parties[RUN].engine.shared_noise.sigma)
    second, clients = federation_of(tmp_path, run="c" * 32, privacy=CLIENT, **SECURE)
    replies = spied(clients[VICTIM])
    run_quietly(second)
    trained = [reply for reply in replies if reply.header.kind == "train"]
    answered = [reply for reply in trained if not reply.header.problem]
    check_nothing_left(trained[len(answered) :])
    assert "policy.toml is 3.5, and this round would take the sum over all runs to" in refused_by(second, VICTIM)[0]
    rounds = len([e for e in read_log(tmp_path / str(VICTIM)).chain.entries if e["kind"] == "budget"])
    assert rounds == 3 + len(answered) < 6
    step = Step(1.0, budget[0]["sigma"])
    assert epsilon_of({step: rounds}, 1e-5) <= 3.5 < epsilon_of({step: rounds + 1}, 1e-5)
    assert all(not refused_by(second, client) for client in range(CLIENTS) if client != VICTIM)


@pytest.mark.parametrize("settings", [{}, {"privacy": CLIENT}])
def test_a_party_with_a_ceiling_sends_nothing_without_noise_of_its_own(settings, tmp_path):
    federation, clients = federation_of(tmp_path, rounds=1, **settings)
    (tmp_path / str(VICTIM) / "state" / "policy.toml").write_text("epsilon = 100.0")
    replies = spied(clients[VICTIM])
    run_quietly(federation)
    check_nothing_left(replies)
    assert "allows only runs in which this client adds noise itself" in refused_by(federation, VICTIM)[0]


def test_a_sum_of_too_few_clients_is_refused_and_nothing_is_sent(tmp_path):
    """The experiment allows sums of two; one party's policy wants all five, and one of them is away."""
    federation, clients = federation_of(tmp_path, deadline=0.2, **SECURE)
    (tmp_path / str(VICTIM) / "state" / "policy.toml").write_text("least_clients = 5")
    federation.engine.transport.grid.online.discard(0)
    replies = spied(clients[VICTIM])
    run_quietly(federation)
    refused = [reply for reply in replies if reply.header.kind != "keys"]
    check_nothing_left(refused)
    assert "A sum of 4 clients is too few; this client takes part in sums of 5" in refused_by(federation, VICTIM)[0]
    assert {entry["message"] for entry in sent_entries(tmp_path, VICTIM)} == {"keys"}
    assert all(VICTIM in record.dropped for record in federation.records)


def test_without_secure_sums_a_party_that_wants_them_sends_nothing(tmp_path):
    federation, clients = federation_of(tmp_path, rounds=1)
    (tmp_path / str(VICTIM) / "state" / "policy.toml").write_text("least_clients = 3")
    replies = spied(clients[VICTIM])
    run_quietly(federation)
    check_nothing_left(replies)
    assert "the server would see this party's update by itself" in refused_by(federation, VICTIM)[0]
