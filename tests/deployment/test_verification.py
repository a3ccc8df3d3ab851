"""Logs of a server and its clients compared: heads, every message in both directions, survivor lists."""

import json
from types import SimpleNamespace

import pytest

from fedvl.deployment.audit_log import LOG_FILE, AuditLog
from fedvl.deployment.messages import Header, Message
from fedvl.deployment.verification import verify
from fedvl.errors import FedVLError


class Sides:
    """The logs of a server and of client 1, which write what they send and receive."""

    def __init__(self, folder):
        self.folders = folder / "clinic", folder / "north"
        for each in self.folders:
            each.mkdir()
        (self.folders[1] / "party.json").write_text(json.dumps({"number": 1}))
        self.server, self.client = (AuditLog(each / LOG_FILE) for each in self.folders)
        self.attempt = 0

    def ask(self, logged=True, arrives=True, **changes):
        """Send a request; return it as it travels."""
        self.attempt += 1
        told = {"run": "a", "experiment": "b", "round": self.attempt - 1, "attempt": self.attempt, "kind": "train"}
        message = Message(Header(**{**told, "client": 1, **changes}), b"shared")
        request = self.server.send(message) if logged else Message(
            message.header.model_copy(update={"log": self.server.head}), message.payload
        )  # fmt: skip
        if arrives:
            self.client.receive(request.header, request.payload)
        return request

    def answer(self, request, logged=True, arrives=True, **changes):
        told = {"loss": 0.25, "examples": 7, "weight": 7.0, **changes}
        answer = self.client.send(Message(request.header.model_copy(update=told), b"update"))
        if arrives and logged:
            self.server.receive(answer.header, answer.payload)

    def verify(self):
        return verify(self.folders)


@pytest.fixture
def sides(tmp_path):
    """After three rounds."""
    found = Sides(tmp_path)
    for _ in range(3):
        found.answer(found.ask())
    return found


def counts(verified):
    return [(traffic.sent, traffic.received, traffic.matched) for traffic in verified.traffic]


def test_both_sides_hold_the_same_hash_of_a_message_and_all_are_matched(sides):
    found = sides.verify()
    assert counts(found) == [(3, 3, 3), (3, 3, 3)]
    server, client = (checked.chain.entries for checked in found.logs)
    for sent, received in ((server[0::2], client[0::2]), (client[1::2], server[1::2])):
        assert [entry["kind"] for entry in sent] == ["sent"] * 3
        assert [entry["kind"] for entry in received] == ["received"] * 3
        assert [entry["sha256"] for entry in sent] == [entry["sha256"] for entry in received]
    assert len({entry["sha256"] for entry in server}) == 6
    assert not any(traffic.in_flight or traffic.lost for traffic in found.traffic)


@pytest.mark.parametrize("side", [0, 1])
def test_a_log_whose_end_was_cut_fits_alone_and_not_with_the_other(side, sides):
    path = sides.folders[side] / LOG_FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    verify([sides.folders[side]])
    with pytest.raises(FedVLError, match=rf"{path} lacks a line .* \(round 3, train\): the log was cut"):
        sides.verify()


def test_a_request_that_the_server_did_not_write_down_is_named(sides):
    """It carries a head that the log has, so that heads alone fit: 36 received and 4 logged."""
    for _ in range(32):
        sides.answer(sides.ask(logged=False), arrives=False)
    sides.answer(sides.ask())
    with pytest.raises(
        FedVLError,
        match=r"north/audit.jsonl received a message .* \(round 4, train, .* does not have as sent: 36 were received and 4 logged",
    ):
        sides.verify()  # fmt: skip


def test_an_answer_that_the_server_did_not_write_down_is_named_unless_it_is_the_very_last(sides):
    sides.answer(sides.ask(), logged=False)
    found = sides.verify()
    assert counts(found) == [(4, 4, 4), (4, 3, 3)]
    assert [entry["round"] for entry in found.traffic[1].in_flight] == [4]
    sides.answer(sides.ask())
    with pytest.raises(
        FedVLError,
        match=r"north/audit.jsonl sent a message on .* \(round 4, train\) that .*clinic/audit.jsonl did not log",
    ):
        sides.verify()  # fmt: skip


def test_a_restart_of_another_run_does_not_explain_a_lost_answer(sides):
    sides.answer(sides.ask(), arrives=False)
    for log, told in ((sides.server, {"kind": "run", "run": "c"}), (sides.server, {"kind": "round", "run": "a"})):
        log.append(**told)  # of another run, or of none
    sides.answer(sides.ask())
    with pytest.raises(FedVLError, match=r"\(round 4, train\) that .* did not log"):
        sides.verify()


@pytest.mark.parametrize("killed", ["server", "client"])
def test_an_answer_in_flight_when_a_side_was_killed_is_reported(killed, sides):
    sides.answer(sides.ask(), arrives=False)
    sides.server.append("run", run="a") if killed == "server" else sides.client.append("started")
    sides.answer(sides.ask())
    assert [entry["round"] for entry in sides.verify().traffic[1].in_flight] == [4]


def test_the_last_of_each_run_may_be_in_flight(sides):
    sides.answer(sides.ask(run="c"), arrives=False)
    sides.answer(sides.ask(run="d"))
    assert [entry["run"] for entry in sides.verify().traffic[1].in_flight] == ["c"]


def test_a_server_that_logs_requests_and_no_answers_is_found(sides):
    for _ in range(5):
        sides.answer(sides.ask(), logged=False)
    with pytest.raises(FedVLError, match=r"\(round 4, train\) that .* did not log"):
        sides.verify()


def test_a_request_that_never_arrived_is_reported_and_a_contradiction_if_it_was_answered(sides):
    lost = sides.ask(arrives=False)
    sides.answer(sides.ask())
    found = sides.verify()
    assert counts(found) == [(5, 4, 4), (4, 4, 4)]
    assert [entry["round"] for entry in found.traffic[0].lost] == [4]
    sides.answer(lost)
    with pytest.raises(FedVLError, match=r"has an answer to a message \(round 4, train\) that .* never received"):
        sides.verify()


def test_a_request_on_its_way_is_in_flight(sides):
    sides.ask(arrives=False)
    found = sides.verify().traffic[0]
    assert ([entry["round"] for entry in found.in_flight], found.lost) == ([4], [])


def test_an_answer_that_the_client_did_not_write_down_is_named(sides):
    request = sides.ask()
    forged = Message(request.header.model_copy(update={"log": sides.client.head, "loss": 0.5}), b"forged")
    sides.server.receive(forged.header, forged.payload)
    with pytest.raises(
        FedVLError,
        match=r"clinic/audit.jsonl received a message .* does not have as sent: 4 were received and 3 logged",
    ):
        sides.verify()  # fmt: skip


def test_a_refusal_is_a_message_too(sides):
    sides.answer(sides.ask(), problem="Not at this hour.", loss=0.0, examples=0, weight=0.0)
    assert counts(sides.verify()) == [(4, 4, 4), (4, 4, 4)]


def test_a_message_that_was_sent_again_must_be_there_as_often(sides):
    again = sides.ask()
    sides.client.receive(again.header, again.payload)
    with pytest.raises(FedVLError, match="5 were received and 4 logged"):
        sides.verify()


def test_a_message_for_another_client_is_not_one_that_the_server_sent_to_this(sides):
    sides.ask(client=2)
    with pytest.raises(FedVLError, match="4 were received and 3 logged"):
        sides.verify()


def test_entries_that_somebody_wrote_by_hand_match_nothing_and_end_in_a_sentence(sides):
    sides.client.append("sent", message=["train"], sha256=None, run=1)
    sides.client.append("survivors")
    assert counts(sides.verify()) == [(3, 3, 3), (3, 3, 3)]


# --- survivor lists


def survivors(log, digest, **changes):
    log.append("survivors", **{"run": "a", "round": 1, "message": "train", "attempt": 0, "digest": digest, **changes})


def test_survivor_lists_agree_in_all_logs(sides, tmp_path):
    """Two clients that compare their logs need no log of the server."""
    other = tmp_path / "south"
    other.mkdir()
    (other / "party.json").write_text(json.dumps({"number": 2}))
    logs = SimpleNamespace(server=sides.server, north=sides.client, south=AuditLog(other / LOG_FILE))
    for log in vars(logs).values():
        survivors(log, "f" * 64)
        survivors(log, "1" * 64, attempt=1)
    verify([*sides.folders, other])
    survivors(logs.north, "2" * 64, round=2)
    survivors(logs.south, "3" * 64, round=2)
    for folders in ([*sides.folders, other], [sides.folders[1], other]):
        with pytest.raises(
            FedVLError,
            match=r"north/audit.jsonl and .*south/audit.jsonl hold different survivor lists .* \(round 2, train\)",
        ):
            verify(folders)  # fmt: skip


def test_one_log_with_two_lists_of_one_sum_is_refused(sides):
    survivors(sides.client, "f" * 64)
    survivors(sides.client, "1" * 64)
    with pytest.raises(FedVLError, match="hold different survivor lists"):
        verify([sides.folders[1]])
