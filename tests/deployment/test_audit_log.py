"""The log of which each line holds the hash of the one before: what changes show, crashes, and two sides compared."""

import hashlib
import json
import os
import stat
from types import SimpleNamespace

import pytest

from fedvl.deployment import audit_log
from fedvl.deployment.audit_log import FILE, FIRST, Log, verify
from fedvl.deployment.messages import Header, write
from fedvl.errors import FedVLError


@pytest.fixture
def path(tmp_path):
    """A log of five entries."""
    log = Log(tmp_path / FILE)
    for number in range(5):
        log.append("approved", experiment=f"{number}")
    return tmp_path / FILE


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
    assert Log(path).head == FIRST  # not read yet
    (checked,) = verify([path.parent])
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
    log = Log(path)
    log.entries("approved")
    changed = b"".join(change(lines(path)))
    path.write_bytes(changed)
    for use in (lambda: verify([path.parent]), lambda: log.append("sent"), lambda: Log(path).entries("approved")):
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
            verify([path])


@pytest.mark.parametrize("cut", [1, 2, 50, 200])
def test_a_line_that_a_crash_cut_is_told_and_taken_out_by_the_next_entry(cut, path):
    whole = lines(path)
    path.write_bytes(b"".join(whole)[:-cut])
    (checked,) = verify([path])
    assert len(checked.chain.entries) == 4
    assert checked.chain.torn == whole[4][:-cut]
    log = Log(path)
    log.append("approved", experiment="5")
    (checked,) = verify([path])
    assert [entry["kind"] for entry in checked.chain.entries[4:]] == ["torn", "approved"]
    torn = checked.chain.entries[4]
    assert (torn["bytes"], torn["sha256"]) == (len(whole[4]) - cut, hashlib.sha256(whole[4][:-cut]).hexdigest())
    assert checked.chain.head == log.head
    assert [entry["experiment"] for entry in log.entries("approved")] == list("01235")


def test_a_full_disk_leaves_a_log_that_can_be_continued(path, monkeypatch):
    log = Log(path)
    log.append("approved", experiment="5")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            log.append("approved", experiment="lost?")
    log.append("approved", experiment="6")
    (checked,) = verify([path])
    assert checked.chain.head == log.head


def test_two_processes_write_one_log(path):
    one, other = Log(path), Log(path)
    for number in range(6):
        (one, other)[number % 2].append("approved", experiment=f"{5 + number}")
    assert len(verify([path])[0].chain.entries) == 11
    assert len(one.entries("approved")) == len(other.entries("approved")) == 11


def test_a_flood_does_not_fill_the_disk(path, monkeypatch):
    log = Log(path)
    log.append("received")
    monkeypatch.setattr(audit_log, "MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(FedVLError, match="somebody sends far too much"):
        log.append("received")


def test_a_link_is_not_followed(path, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    os.symlink(path, tmp_path / "elsewhere" / FILE)
    with pytest.raises(OSError, match="symbolic links"):
        Log(tmp_path / "elsewhere" / FILE).append("sent")


# --- two sides


def header(round_index, **changes):
    told = {"run": "a", "experiment": "b", "round": round_index, "attempt": 0, "kind": "train", "client": 1}
    return Header(**{**told, **changes})


@pytest.fixture
def sides(tmp_path):
    """The logs of a server and of client 1, after three rounds."""
    server, party = tmp_path / "clinic", tmp_path / "north"
    for folder in (server, party):
        folder.mkdir()
    (party / "party.json").write_text('{"number": 1}')
    logs = Log(server / FILE), Log(party / FILE)
    for round_index in range(3):
        asked = logs[0].send(write(header(round_index), b"shared"))
        logs[1].receive(asked.read_header(), asked.payload)
        told = logs[1].send(write(header(round_index, loss=0.25, examples=7, weight=7.0), b"update"))
        logs[0].receive(told.read_header(), told.payload)
    return server, party


def test_both_sides_hold_the_same_hash_of_a_message(sides):
    server, party = (checked.chain.entries for checked in verify(sides))
    for sent, received in ((server[0::2], party[0::2]), (party[1::2], server[1::2])):
        assert [entry["kind"] for entry in sent] == ["sent"] * 3
        assert [entry["kind"] for entry in received] == ["received"] * 3
        assert [entry["sha256"] for entry in sent] == [entry["sha256"] for entry in received]
    assert len({entry["sha256"] for entry in server}) == 6
    assert [entry["bytes"] for entry in party] == [6] * 6


@pytest.mark.parametrize("side", [0, 1])
def test_a_log_whose_end_was_cut_fits_alone_and_not_with_the_other(side, sides):
    path = sides[side] / FILE
    path.write_bytes(b"".join(lines(path)[:-2]))
    verify([sides[side]])
    with pytest.raises(FedVLError, match=rf"{path} lacks a line .* \(round 3, train\): the log was cut"):
        verify(sides)


def test_what_a_line_says_cannot_be_guessed_from_its_hash(monkeypatch):
    """The server is told the hash, and could try out what it does not know, such as a number of images."""
    noon = SimpleNamespace(isoformat=lambda timespec: "noon")
    monkeypatch.setattr(audit_log, "datetime", SimpleNamespace(now=lambda zone: noon))
    logs = [Log(), Log()]
    for log in logs:
        log.append("budget", rate=0.1)
    assert logs[0].head != logs[1].head


def test_a_folder_without_a_log_is_told(tmp_path):
    with pytest.raises(FedVLError, match=r"There is no log .* give the folder of a party"):
        verify([tmp_path])
