"""The log of which each line holds the hash of the one before: what changes show, crashes, and two sides compared."""

import hashlib
import json
import os
import stat
from types import SimpleNamespace

import pytest
from helpers.parties import RUN, request

from fedvl.deployment import audit_log
from fedvl.deployment.audit_log import FIRST, LOG_FILE, AuditLog, own_rounds, participation_of, read_log
from fedvl.deployment.messages import Header, Message
from fedvl.errors import FedVLError
from fedvl.federation.records import Refused
from fedvl.runs.contents import Answer, Federation, PartyBytes
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment


@pytest.fixture
def path(tmp_path):
    """A log of five entries."""
    log = AuditLog(tmp_path / LOG_FILE)
    for number in range(5):
        log.append("approved", experiment=f"{number}")
    return tmp_path / LOG_FILE


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def test_each_line_holds_the_sha256_of_the_one_before(path):
    before = FIRST
    for line in lines(path):
        entry = json.loads(line)
        assert entry["before"] == before
        body = line[: line.index(b', "hash"')]
        before = entry["hash"]
        assert before == hashlib.sha256(body).hexdigest()
    assert AuditLog(path).head == FIRST  # not read yet
    checked = read_log(path.parent)
    assert checked.chain.head == before
    assert [entry["experiment"] for entry in checked.chain.entries] == list("01234")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def rehashed(line):
    """A line that was changed by somebody who knows how lines are hashed."""
    body = line[: line.index(b', "hash"')].replace(b'"2"', b'"7"')
    return body + f', "hash": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


CHANGES = {
    "a word in the middle": (lambda all: [*all[:2], all[2].replace(b'"2"', b'"7"'), *all[3:]], 3),
    "a word, and its hash": (lambda all: [*all[:2], rehashed(all[2]), *all[3:]], 4),
    "a word of the last line": (lambda all: [*all[:4], all[4].replace(b'"4"', b'"7"')], 5),
    "a line taken out": (lambda all: [*all[:1], *all[2:]], 2),
    "the first line taken out": (lambda all: all[1:], 1),
    "two lines exchanged": (lambda all: [all[0], all[2], all[1], *all[3:]], 2),
    "a line twice": (lambda all: [*all[:2], all[1], *all[2:]], 3),
    "an empty line": (lambda all: [*all[:3], b"\n", *all[3:]], 4),
    "a line of something else": (lambda all: [*all, b"hello\n"], 6),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_found_and_the_first_line_that_does_not_fit_is_named(what, path):
    change, number = CHANGES[what]
    log = AuditLog(path)
    log.entries("approved")
    changed = b"".join(change(lines(path)))
    path.write_bytes(changed)
    for use in (lambda: read_log(path.parent), lambda: log.append("sent"), lambda: AuditLog(path).entries("approved")):
        with pytest.raises(FedVLError, match=rf"was changed: line {number} "):
            use()
    assert path.read_bytes() == changed  # and nothing is added to it


def test_every_single_byte_counts(path):
    content = path.read_bytes()
    for place in range(0, len(content) - 1, 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(FedVLError, match="was changed: line"):
            read_log(path)


@pytest.mark.parametrize("cut", [1, 2, 50, 200])
def test_a_line_that_a_crash_cut_is_told_and_taken_out_by_the_next_entry(cut, path):
    whole = lines(path)
    path.write_bytes(b"".join(whole)[:-cut])
    checked = read_log(path)
    assert len(checked.chain.entries) == 4
    assert checked.chain.torn == whole[4][:-cut]
    log = AuditLog(path)
    log.append("approved", experiment="5")
    checked = read_log(path)
    assert [entry["kind"] for entry in checked.chain.entries[4:]] == ["torn", "approved"]
    torn = checked.chain.entries[4]
    assert (torn["bytes"], torn["sha256"]) == (len(whole[4]) - cut, hashlib.sha256(whole[4][:-cut]).hexdigest())
    assert checked.chain.head == log.head
    assert [entry["experiment"] for entry in log.entries("approved")] == list("01235")


def test_a_full_disk_leaves_a_log_that_can_be_continued(path, monkeypatch):
    log = AuditLog(path)
    log.append("approved", experiment="5")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            log.append("approved", experiment="lost?")
    log.append("approved", experiment="6")
    checked = read_log(path)
    assert checked.chain.head == log.head


def test_two_processes_write_one_log(path):
    one, other = AuditLog(path), AuditLog(path)
    for number in range(6):
        (one, other)[number % 2].append("approved", experiment=f"{5 + number}")
    assert len(read_log(path).chain.entries) == 11
    assert len(one.entries("approved")) == len(other.entries("approved")) == 11


def test_a_flood_does_not_fill_the_disk(path, monkeypatch):
    log = AuditLog(path)
    log.append("received")
    monkeypatch.setattr(audit_log, "MAX_LOG_BYTES", path.stat().st_size - 1)
    with pytest.raises(FedVLError, match="somebody sends far too much"):
        log.append("received")


def test_a_link_is_not_followed(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    os.symlink(path, tmp_path / "elsewhere" / LOG_FILE)
    with pytest.raises(OSError, match="symbolic links"):
        AuditLog(tmp_path / "elsewhere" / LOG_FILE).append("sent")


def test_what_a_line_says_cannot_be_guessed_from_its_hash(monkeypatch):
    """The server is told the hash, and could try out what it does not know, such as a number of images."""
    noon = SimpleNamespace(isoformat=lambda timespec: "noon")
    monkeypatch.setattr(audit_log, "datetime", SimpleNamespace(now=lambda zone: noon))
    logs = [AuditLog(), AuditLog()]
    for log in logs:
        log.append("budget", rate=0.1)
    assert logs[0].head != logs[1].head


def test_a_folder_without_a_log_is_told(tmp_path):
    with pytest.raises(FedVLError, match=r"There is no log .* give the folder of a client"):
        read_log(tmp_path)


def test_a_log_says_whose_it_is_by_its_own_entries_or_by_the_file_beside_it(tmp_path):
    """A client that sends its log to others sends no other file."""
    alone = tmp_path / "sent.jsonl"
    AuditLog(alone).append("approved", experiment="0")
    assert read_log(alone).client is None
    AuditLog(alone).append("joined", name="west", client=2)
    assert read_log(alone).client == 2
    (tmp_path / "west" / "state").mkdir(parents=True)
    (tmp_path / "west" / "party.json").write_text('{"number": 3}')
    AuditLog(tmp_path / "west" / "state" / LOG_FILE).append("approved", experiment="0")
    for given in (tmp_path / "west", tmp_path / "west" / "state" / LOG_FILE):
        assert read_log(given).client == 3


# --- the head of the sender's log


def header(**changes):
    told = {"run": "a", "experiment": "b", "round": 0, "attempt": 0, "kind": "train", "client": 1}
    return Header(**{**told, **changes})


def test_a_message_without_the_head_of_its_senders_log_is_written_down_and_refused(path):
    log = AuditLog(path)
    for refused, payload in ((header(), b"x"), (header(), b""), (header(problem="no"), b"x")):
        with pytest.raises(FedVLError, match="does not carry the head of its sender's log"):
            log.receive(refused, payload)
    log.receive(header(problem="audit.jsonl was changed"), b"")  # of one whose log is damaged: it has no head
    log.receive(header(log="e" * 64), b"x")
    assert [entry["head"] for entry in read_log(path).chain.entries[5:]] == ["", "", "", "", "e" * 64]


@pytest.fixture
def log(tmp_path):
    return AuditLog(tmp_path / LOG_FILE)


def entries(log):
    return [json.loads(line) for line in log.path.read_bytes().splitlines()]


def test_a_server_knows_the_bytes_of_each_party_and_when_it_answered_last_in_a_round(log, tmp_path, monkeypatch):
    for client in (0, 1):
        log.send(Message(request(round=0, client=client), b"12345"))
        log.receive(request(round=0, client=client), b"123")
    log.receive(request(round=0, client=1), b"1234")  # after a crash the round was run again
    log.receive(request(round=0, client=0, kind="report"), b"12")
    log.receive(request(round=0, client=0, run="c" * 32), b"of another run")
    log.append("refused", run=RUN, client=1, reason="it says: no")
    folder = RunFolder(tmp_path / "run")
    folder.experiment, folder.federation = resolve_experiment({}), Federation(federation="clinic", run=RUN)
    monkeypatch.chdir(tmp_path.parent)
    found = participation_of(tmp_path, folder, ["north", "south"])
    assert found.parties == [
        PartyBytes(name="north", bytes_up=5, bytes_down=5),
        PartyBytes(name="south", bytes_up=7, bytes_down=5),
    ]
    trained = [entry for entry in entries(log) if entry["kind"] == "received" and entry["run"] == RUN]
    assert found.answers == [
        Answer(round=1, client=0, time=trained[0]["time"]),
        Answer(round=1, client=1, time=trained[2]["time"]),
    ]
    assert found.partition is None
    clients = ["fedvl client north --data IMAGES", "fedvl client south --data IMAGES"]
    assert (found.command or "").splitlines() == [f"fedvl server {tmp_path.name}", *clients]


def test_a_party_whose_key_was_revoked_is_named_with_the_time_and_not_told_to_start(log, tmp_path):
    """North sent before it was revoked, south never sent; west was revoked and admitted again."""
    log.append("revoked", party="west", key="x")
    log.append("admitted", party="west", key="y")
    log.receive(request(round=0, client=0), b"123")
    log.append("revoked", party="north", key="x")
    log.append("revoked", party="south", key="x")
    folder = RunFolder(tmp_path / "run")
    folder.experiment, folder.federation = resolve_experiment({}), Federation(federation="clinic", run=RUN)
    found = participation_of(tmp_path, folder, ["north", "south", "west"])
    times = {entry["party"]: entry["time"] for entry in entries(log) if entry["kind"] == "revoked"}
    assert [party.revoked for party in found.parties] == [times["north"], times["south"], None]
    assert [party.took_part for party in found.parties] == [True, False, True]
    assert [line.split()[:3] for line in (found.command or "").splitlines()[1:]] == [["fedvl", "client", "west"]]


def test_a_server_of_several_experiments_is_told_which_to_run_again(log, tmp_path):
    (tmp_path / "experiments").mkdir()
    for name in ("linear", "fst-cbdg"):
        (tmp_path / "experiments" / f"{name}.toml").touch()
    log.append("run", run=RUN)
    folder = RunFolder(tmp_path / "run")
    folder.experiment, folder.federation = (
        resolve_experiment({"method": {"name": "fst-cbdg"}}),
        Federation(federation="clinic", run=RUN),
    )
    first = (participation_of(tmp_path, folder, ["north"]).command or "").splitlines()[0]
    assert first == f"fedvl server {tmp_path} --experiment fst-cbdg"


def test_a_party_knows_its_own_rounds_what_it_sent_and_what_it_refused(log, tmp_path):
    log.receive(request(round=0), b"1234")
    log.send(Message(request(round=0), b"12"))
    for _ in range(2):  # a server that asks again and again fills no page
        log.receive(request(round=1), b"1234")
        log.send(Message(request(round=1, problem="Not at this hour.")))
    log.receive(request(round=2, kind="finish"), b"123456")
    log.receive(request(round=0, run="c" * 32), b"of another run")
    first, second = own_rounds(tmp_path, RUN, 3, rounds=2)
    assert (first.round, first.bytes_down, first.bytes_up) == (1, 4, 2)
    assert (first.cohort, first.dropped, first.refused) == ([3], [], [])
    assert 0 <= first.seconds < 600
    assert (second.round, second.bytes_down, second.bytes_up) == (2, 8, 0)
    assert (second.dropped, second.refused) == ([3], [Refused(client=3, reason="Not at this hour.")])
