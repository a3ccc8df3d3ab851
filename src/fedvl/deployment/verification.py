"""Compare the logs of a server and its clients: heads, messages by SHA-256, survivor lists."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedvl.deployment.audit_log import CheckedLog, LogEntry, read_log
from fedvl.errors import FedVLError

SENT = ("sent", "refused")  # a refusal is a message too
RESTART_KINDS = ("run", "started")  # of a server, which names the run, and of a client
MESSAGE = {"kind": str, "time": str, "run": str, "message": str, "sha256": str, "attempt": int, "client": int}

ATTEMPT = ("run", "round", "message", "attempt")  # at a secure sum


class Traffic(NamedTuple):
    """The messages from one side to another, as both logs have them."""

    sender: CheckedLog
    receiver: CheckedLog
    sent: int
    received: int
    matched: int
    in_flight: list[LogEntry]  # the last of a run before a side was stopped, or at the end of its log
    lost: list[LogEntry]  # requests that never arrived, and that nobody answered


class Verified(NamedTuple):
    logs: list[CheckedLog]
    traffic: list[Traffic]


def verify(folders: Sequence[Path]) -> Verified:
    """Check logs; with several, also what each says of the others. Raise on a contradiction."""
    logs = [read_log(folder) for folder in folders]
    traffic = []
    for server in (log for log in logs if log.client is None):
        for client in (log for log in logs if log.client is not None):
            check_heads(server, client)
            traffic += match(server, client)
    check_survivors(logs)
    return Verified(logs, traffic)


def check_heads(server: CheckedLog, client: CheckedLog) -> None:
    """Refuse a log that lacks lines of which the other side was told."""
    of_client = [entry for entry in server.chain.entries if entry.get("client") == client.client]
    for witness, log, entries in ((server, client, of_client), (client, server, client.chain.entries)):
        known = set(log.chain.hashes)
        for entry in entries:
            head = entry.get("head")
            if head and head not in known:
                raise FedVLError(
                    f"{log.path} lacks a line that {witness.path} was told of on {entry.get('time')} "
                    f"({entry_name(entry)}): the log was cut or written anew."
                )


# --- messages


def match(server: CheckedLog, client: CheckedLog) -> list[Traffic]:
    """Match every message between a server and a client, in both directions."""
    requests, answers = outgoing(server, client.client), outgoing(client, client.client)
    arrived, came = incoming(client), incoming(server, client.client)
    check_sent(requests, arrived, server, client)
    check_sent(answers, came, client, server)
    answered = {asked(entry) for entry in came}
    last_requests = last_of_each_life(server, requests)
    last = last_requests | last_of_each_life(client, answers)
    unheard, unseen = missing_entries(requests, arrived), missing_entries(answers, came)
    for entry in unheard:
        if asked(entry) in answered:
            raise FedVLError(
                f"{server.path} has an answer to a message ({entry_name(entry)}) that {client.path} never received: one of the logs "
                "is not complete."
            )
    for entry in unseen:
        if asked(entry) not in last:
            raise FedVLError(
                f"{client.path} sent a message on {entry['time']} ({entry_name(entry)}) that {server.path} did not log: it was lost "
                "on its way, or the server did not write it down."
            )
    in_flight = [entry for entry in unheard if asked(entry) in last_requests]
    lost = [entry for entry in unheard if entry not in in_flight]
    return [
        Traffic(server, client, len(requests), len(arrived), len(requests) - len(unheard), in_flight, lost),
        Traffic(client, server, len(answers), len(came), len(answers) - len(unseen), unseen, []),
    ]


def outgoing(log: CheckedLog, client: int | None) -> list[LogEntry]:
    return [entry for entry in messages(log) if entry["kind"] in SENT and entry["client"] == client]


def incoming(log: CheckedLog, client: int | None = None) -> list[LogEntry]:
    """Return what a side received: of one client, or all of it, for whomever it was meant."""
    return [entry for entry in messages(log) if entry["kind"] == "received" and client in (None, entry["client"])]


def messages(log: CheckedLog) -> list[LogEntry]:
    """Return the entries of messages; what somebody else wrote in their place matches nothing."""
    return [
        entry for entry in log.chain.entries if all(isinstance(entry.get(name), kind) for name, kind in MESSAGE.items())
    ]


def check_sent(
    sent: Sequence[LogEntry], received: Sequence[LogEntry], sender: CheckedLog, receiver: CheckedLog
) -> None:
    """Refuse a message that arrived and that its sender did not write down."""
    for entry in missing_entries(received, sent):
        raise FedVLError(
            f"{receiver.path} received a message on {entry['time']} ({entry_name(entry)}, SHA-256 {entry['sha256'][:12]}) that "
            f"{sender.path} does not have as sent: {len(received)} were received and {len(sent)} logged."
        )


def missing_entries(entries: Sequence[LogEntry], others: Sequence[LogEntry]) -> list[LogEntry]:
    """Return the entries that have no counterpart of the same SHA-256 among the others."""
    left = Counter(entry["sha256"] for entry in others)
    found = []
    for entry in entries:
        if left[entry["sha256"]]:
            left[entry["sha256"]] -= 1
        else:
            found.append(entry)
    return found


def last_of_each_life(log: CheckedLog, sent: Sequence[LogEntry]) -> set[tuple[Any, ...]]:
    """Return the last requests of each run before a side was stopped, and at the end."""
    wanted, found, last = {id(entry) for entry in sent}, set(), dict[str, tuple[Any, ...]]()
    for entry in log.chain.entries:
        if id(entry) in wanted:
            last[entry["run"]] = asked(entry)
        elif entry.get("kind") in RESTART_KINDS:
            found |= {request for run, request in last.items() if entry.get("run", run) == run}
    return found | set(last.values())


def asked(entry: LogEntry) -> tuple[Any, ...]:
    """Return which request a message is, or answers."""
    return entry["run"], entry["message"], entry["attempt"]


def entry_name(entry: LogEntry) -> str:
    return f"round {entry.get('round')}, {entry.get('message')}"


# --- secure aggregation


def check_survivors(logs: Sequence[CheckedLog]) -> None:
    """Refuse logs that hold different survivor lists for one attempt at a sum."""
    known: dict[tuple[str, ...], tuple[str, Path]] = {}
    for log in logs:
        for entry in log.chain.entries:
            if entry.get("kind") == "survivors":
                attempt, own = tuple(str(entry.get(name)) for name in ATTEMPT), str(entry.get("digest"))
                digest, path = known.setdefault(attempt, (own, log.path))
                if digest != own:
                    raise FedVLError(
                        f"{path} and {log.path} hold different survivor lists of the same sum ({entry_name(entry)}): the server "
                        "named different lists to different clients."
                    )
