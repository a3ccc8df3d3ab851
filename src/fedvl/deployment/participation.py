"""What the logs say of a run's participants: when each answered, and the bytes of its messages."""

import shlex
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from fedvl.deployment.audit_log import Chain, Entry, read_log
from fedvl.run_folder import RunFolder


def who_took_part(place: Path, folder: RunFolder, names: list[str]) -> dict[str, Any]:
    """Return what a server's result says of its parties, and leaves out that it cannot know."""
    assert folder.federation is not None
    carried, answers = Counter[tuple[str, int]](), dict[tuple[int, int], str]()
    for entry in messages_of(read_log(place).chain, folder.federation["run"]):
        carried[entry["kind"], entry["client"]] += entry["bytes"]
        if entry["kind"] == "received" and entry["message"] == "train":
            answers[entry["round"], entry["client"]] = entry["time"]
    return {
        "partition": None,  # the parties hold what they hold
        "command": commands_for(place, folder, names),
        "parties": [
            {"name": name, "bytes_up": carried["received", client], "bytes_down": carried["sent", client]}
            for client, name in enumerate(names)
        ],
        "answers": [
            {"round": round_, "client": client, "time": time} for (round_, client), time in sorted(answers.items())
        ],
    }


def commands_for(place: Path, folder: RunFolder, names: list[str]) -> str:
    """Return the commands of the server and of each party, a line each."""
    shown = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    several = len(list((place / "experiments").glob("*.toml"))) > 1
    chosen = ["--experiment", folder.experiment.method.label] if several else []
    clients = [["fedvl", "client", name, "--data", "IMAGES"] for name in names]
    return "\n".join(map(shlex.join, [["fedvl", "server", str(shown), *chosen], *clients]))


def own_rounds(folder: Path, run: str, client: int, rounds: int) -> list[dict[str, Any]]:
    """Return the rounds in which a party was asked, with what it sent, received and refused."""
    found: dict[int, dict[str, Any]] = {}
    asked = dict[int, datetime]()
    for entry in messages_of(read_log(folder).chain, run):
        if entry["round"] > rounds:  # the end of the run, or what no round is
            continue
        record = found.setdefault(entry["round"], empty_record(entry["round"], client))
        moment = datetime.fromisoformat(entry["time"])
        if entry["kind"] == "received":
            record["bytes_down"] += entry["bytes"]
            asked[entry["round"]] = moment
        elif entry["kind"] == "sent":
            record["bytes_up"] += entry["bytes"]
            record["seconds"] += (moment - asked.get(entry["round"], moment)).total_seconds()
            record["dropped"] = []
        elif (refusal := {"client": client, "reason": entry["reason"]}) not in record["refused"]:
            record["refused"].append(refusal)
    return [found[number] for number in sorted(found)]


def empty_record(number: int, client: int) -> dict[str, Any]:
    """Return the record of a round that this client, the only one known, has not answered."""
    nothing: dict[str, Any] = {"loss": None, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}
    return {"round": number, "cohort": [client], "dropped": [client], "refused": [], **nothing}


def messages_of(chain: Chain, run: str) -> list[Entry]:
    """Return the entries of a run's messages: received, sent or, at a party, refused."""
    return [entry for entry in chain.entries if entry.get("run") == run and "message" in entry and "bytes" in entry]
