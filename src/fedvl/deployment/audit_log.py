"""A log that is only added to, of which each line holds the SHA-256 of the line before.

A line that is changed, added or taken out between others no longer fits. Whoever can write the file
can also write all of it anew, or cut its end: so each message carries the hash of its sender's last
line (the head of its log), which the other side writes into its own log, and a message without it
is refused. ``verification.py`` compares the logs of several sides. A random salt in each line keeps
others from guessing what a line says by its hash.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedvl.deployment.messages import Header, Message
from fedvl.errors import FedVLError
from fedvl.federation.records import Record, Refused, RoundFigures
from fedvl.files import parse_json, read_json, regular
from fedvl.runs.contents import Answer, Figures, PartyBytes
from fedvl.runs.folder import PARTY, STATE, RunFolder

LOG_FILE = "audit.jsonl"
MAX_LOG_BYTES = 2**28  # some 600,000 lines; a flood of messages fills no more of the disk
FIRST = "0" * 64  # what the first line holds in place of a hash
LINE = re.compile(rb'(\{.*), "hash": "([0-9a-f]{64})"\}')
# kinds of entries that decide about later answers
COUNTED = ("approved", "declined", "surveyed", "begun", "budget", "round", "secret")
NO_HEAD = "The message does not carry the head of its sender's log, by which both logs are compared; it is refused."

LogEntry = dict[str, Any]


class Chain(NamedTuple):
    """What a log holds: its entries, their hashes, and what a crash left of a last line."""

    entries: list[LogEntry]
    hashes: list[str]
    torn: bytes

    @property
    def head(self) -> str:
        return self.hashes[-1] if self.hashes else FIRST


def read_chain(content: bytes, path: Path) -> Chain:
    """Read a log; raise a FedVLError that names the first line that does not fit."""
    *lines, torn = content.split(b"\n")
    found = Chain([], [], torn)
    for number, line in enumerate(lines, 1):
        parts = LINE.fullmatch(line)
        if parts is None or hashlib.sha256(parts[1]).hexdigest() != parts[2].decode():
            raise log_changed(path, f"line {number} is not as it was written")
        entry = parse_entry(parts[1] + b"}")
        if entry.get("before") != found.head:
            raise log_changed(path, f"line {number} does not hold the hash of the line before it")
        found.entries.append(entry)
        found.hashes.append(parts[2].decode())
    return found


def parse_entry(content: bytes) -> LogEntry:
    try:
        return dict(parse_json(content))
    except ValueError:
        return {}


def log_changed(path: Path, what: str) -> FedVLError:
    return FedVLError(
        f"{path} was changed: {what}. Find out who did it, and restore the file from a copy; nothing is sent before."
    )


class AuditLog:
    """The log of a party or a server; without a path it stays in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.head = path, FIRST
        self.counted: list[LogEntry] = []
        self.known: tuple[int, ...] = ()  # size, time and place of the file as it was read or written last

    def append(self, kind: str, **told: Any) -> None:
        """Add an entry, which is on disk when this returns; refuse if lines do not fit."""
        if self.path is None:
            self._make_line(kind, told)
            return
        with locked(self.path) as file:
            torn = self._read(file, self.path)
            self.known = ()  # until all of it is written
            if torn:  # of a line that nobody was told of: it is written before anything is sent
                file.truncate(file.seek(0, os.SEEK_END) - len(torn))
                told_of = {"bytes": len(torn), "sha256": hashlib.sha256(torn).hexdigest()}
                file.write(self._make_line("torn", told_of))
            file.write(self._make_line(kind, told))
            file.flush()
            os.fsync(file.fileno())
            self.known = signature(file)

    def _make_line(self, kind: str, told: LogEntry) -> bytes:
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry = {"time": moment, "kind": kind, **told, "salt": secrets.token_hex(16), "before": self.head}
        body = json.dumps(entry)[:-1].encode()
        self.head = hashlib.sha256(body).hexdigest()
        if kind in COUNTED:
            self.counted.append(entry)
        return body + f', "hash": "{self.head}"}}\n'.encode()

    def entries(self, *kinds: str) -> list[LogEntry]:
        """Check the log; return all entries of kinds that count, from any writer, in order."""
        if self.path is not None and self.path.exists():
            with locked(self.path) as file:
                self._read(file, self.path)
        elif self.path is not None:
            self.counted = []
        return [entry for entry in self.counted if entry["kind"] in kinds]

    def _read(self, file: BinaryIO, path: Path) -> bytes:
        """Read the whole log again if somebody else wrote to it; return what is torn of it."""
        if signature(file) == self.known:
            return b""
        file.seek(0)
        chain = read_chain(file.read(), path)
        self.head, self.counted = chain.head, [entry for entry in chain.entries if entry.get("kind") in COUNTED]
        self.known = () if chain.torn else signature(file)
        return chain.torn

    # --- messages

    def receive(self, header: Header, payload: bytes) -> None:
        """Write down a message that came, with the head of its sender's log; refuse one without.

        A client whose log is damaged has no head, and may say so.
        """
        self.append("received", **message_entry(header, payload), head=header.log)
        if not header.log and (payload or not header.problem):
            raise FedVLError(NO_HEAD)

    def send(self, message: Message) -> Message:
        """Write down a message, or why there is none; return it with the head of this log."""
        header = message.header
        if header.problem:
            self.append("refused", **message_entry(header, message.payload), reason=header.problem)
        else:
            self.append("sent", **message_entry(header, message.payload))
        return Message(header.model_copy(update={"log": self.head}), message.payload)


class RehearsalLog(AuditLog):
    """The log of a client in a rehearsal, which books no privacy budget: its noise is public."""

    def append(self, kind: str, **told: Any) -> None:
        if kind != "budget":
            super().append(kind, **told)


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """Open a log for this process alone, never by a link or of any size."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_size > MAX_LOG_BYTES:
            raise FedVLError(
                f"{path} has more than {MAX_LOG_BYTES:,} bytes: somebody sends far too much. Nothing more is answered; keep the "
                "file, and begin with a new folder."
            )
        yield file


def signature(file: BinaryIO) -> tuple[int, ...]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino


def message_entry(header: Header, payload: bytes) -> LogEntry:
    """Say which message it is, with one hash at both sides: all of it but the head of a log."""
    content = header.model_copy(update={"log": ""}).model_dump_json().encode() + payload
    return {
        "run": header.run,
        "round": header.round + 1,
        "message": header.kind,
        "attempt": header.attempt,
        "client": header.client,
        "bytes": len(payload),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


# --- reading


class CheckedLog(NamedTuple):
    """A log that fits."""

    path: Path
    client: int | None  # the client's number; None: the server
    chain: Chain


def read_log(folder: Path) -> CheckedLog:
    """Read the log of a client's or federation's folder, or a log file."""
    path = folder
    if folder.is_dir():
        path = (folder / STATE if (folder / STATE).is_dir() else folder) / LOG_FILE
    if not path.is_file():
        raise FedVLError(f"There is no log {path}; give the folder of a client, or of a federation at its server.")
    chain = read_chain(regular(path, MAX_LOG_BYTES).read_bytes(), path)
    return CheckedLog(path, whose(path, chain), chain)


def whose(path: Path, chain: Chain) -> int | None:
    """Return the number of the client that wrote a log, by its entries or the file beside it."""
    joined = next((entry.get("client") for entry in chain.entries if entry.get("kind") == "joined"), None)
    if isinstance(joined, int):
        return joined
    party = read_json((path.parent.parent if path.parent.name == STATE else path.parent) / PARTY)
    return None if party is None else int(party["number"])


def participation_of(place: Path, folder: RunFolder, names: list[str]) -> Figures:
    """Return what a server's result says of its parties, and leaves out that it cannot know."""
    assert folder.federation is not None
    carried, answers = Counter[tuple[str, int]](), dict[tuple[int, int], str]()
    for entry in messages_of(read_log(place).chain, folder.federation.run):
        carried[entry["kind"], entry["client"]] += entry["bytes"]
        if entry["kind"] == "received" and entry["message"] == "train":
            answers[entry["round"], entry["client"]] = entry["time"]
    revoked: dict[str, str] = {}
    for entry in read_log(place).chain.entries:
        if entry["kind"] == "revoked":
            revoked[entry["party"]] = entry["time"]
        elif entry["kind"] == "admitted":
            revoked.pop(entry["party"], None)
    return Figures(
        partition=None,  # the parties hold what they hold
        command=commands_for(place, folder, [name for name in names if name not in revoked]),
        parties=[
            PartyBytes(
                name=name,
                bytes_up=carried["received", client],
                bytes_down=carried["sent", client],
                **({"revoked": revoked[name]} if name in revoked else {}),
            )
            for client, name in enumerate(names)
        ],
        answers=[Answer(round=round_, client=client, time=time) for (round_, client), time in sorted(answers.items())],
    )


def commands_for(place: Path, folder: RunFolder, names: list[str]) -> str:
    """Return the commands of the server and of each party, a line each."""
    shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    several = len(list((place / "experiments").glob("*.toml"))) > 1
    chosen = ["--experiment", folder.experiment.method.label] if several else []
    clients = [["fedvl", "client", name, "--data", "IMAGES"] for name in names]
    return "\n".join(map(shlex.join, [["fedvl", "server", str(shown), *chosen], *clients]))


def own_rounds(folder: Path, run: str, client: int, rounds: int) -> list[Record]:
    """Return the rounds in which a party was asked, with what it sent, received and refused."""
    found: dict[int, Record] = {}
    asked = dict[int, datetime]()
    for entry in messages_of(read_log(folder).chain, run):
        number: int = entry["round"]
        if number > rounds:  # the end of the run, or what no round is
            continue
        record = found.get(number) or empty_record(number, client)
        moment = datetime.fromisoformat(entry["time"])
        if entry["kind"] == "received":
            change = RoundFigures(bytes_down=record.bytes_down + entry["bytes"])
            asked[number] = moment
        elif entry["kind"] == "sent":
            took = (moment - asked.get(number, moment)).total_seconds()
            change = RoundFigures(bytes_up=record.bytes_up + entry["bytes"], seconds=record.seconds + took, dropped=[])
        else:
            refusal = Refused(client=client, reason=entry["reason"])
            change = RoundFigures(refused=[*record.refused, *([refusal] if refusal not in record.refused else [])])
        found[number] = record.joined(change)
    return [found[number] for number in sorted(found)]


def empty_record(number: int, client: int) -> Record:
    """Return the record of a round that this client, the only one known, has not answered."""
    nothing = RoundFigures(refused=[], loss=None, bytes_up=0, bytes_down=0, seconds=0.0)
    return Record(round=number, cohort=[client], dropped=[client]).joined(nothing)


def messages_of(chain: Chain, run: str) -> list[LogEntry]:
    """Return the entries of a run's messages: received, sent or, at a party, refused."""
    return [entry for entry in chain.entries if entry.get("run") == run and "message" in entry and "bytes" in entry]
