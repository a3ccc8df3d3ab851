"""A client's state folder: its secrets and decisions, which only this machine writes.

    FOLDER/party.json  ca.crt  experiments/*.toml   from the server's operator
    FOLDER/NAME.request.json                        what the client sends back
    FOLDER/state/                                   made by ``fedvl federation join``

A folder that somebody sends can hold a state folder as well, whose secrets the sender knows. So
``origin.json`` records what a sender cannot know (the inodes and this machine's id), and a state
folder that was not made here is refused.
"""

import hashlib
import os
import secrets
import stat
from pathlib import Path

from fedvl.deployment.audit_log import LOG_FILE as LOG_FILE
from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.files import Frozen, PartyFile, read_model
from fedvl.deployment.keys import read_private, write_private
from fedvl.errors import FedVLError
from fedvl.runs.folder import PARTY, STATE

ORIGIN = "origin.json"
MACHINE_ID = Path("/etc/machine-id")
HANDED_FILES, EXPERIMENTS = (PARTY, "ca.crt"), "experiments"
RUNS = "runs"
SECRETS, SALT_BYTES = ("salt", "sum.key"), 32  # of a run: its random numbers, its key in secure aggregation
HANDED = f"{', '.join(HANDED_FILES)} and {EXPERIMENTS}/*.toml"


class Origin(Frozen):
    """What identifies a state folder on the machine that made it."""

    identity: str


def state_folder(folder: Path) -> Path:
    return folder / STATE


def log_of(folder: Path) -> AuditLog:
    """Return the log of a client's folder, or of a federation's folder at the server."""
    return AuditLog((state_folder(folder) if (folder / PARTY).exists() else folder) / LOG_FILE)


def request_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.request.json"


def read_party(folder: Path) -> PartyFile:
    return read_model(folder / PARTY, PartyFile, "give the folder that the server's operator handed you.")


# --- the folder that was handed over


def check_handed(folder: Path, *own: str) -> None:
    """Refuse anything in a client's folder but what an operator hands over, and ``own`` names."""
    if not folder.is_dir():
        raise FedVLError(f"There is no folder {folder}; give the folder that the server's operator handed you.")
    for path in sorted(folder.iterdir()):
        if path.name == EXPERIMENTS and is_folder(path):
            wrong = next((each for each in sorted(path.iterdir()) if not is_experiment(each)), None)
        else:
            wrong = None if path.name in own or (path.name in HANDED_FILES and is_regular(path)) else path
        if wrong is not None:
            raise FedVLError(
                f"{folder} holds {wrong.relative_to(folder)}, which an operator does not hand over: only {HANDED}, as "
                "regular files. Find out who put it there, then remove it or ask for a new folder."
            )


def is_experiment(path: Path) -> bool:
    return is_regular(path) and path.suffix == ".toml" and not path.name.startswith(".")


def is_regular(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


# --- making and opening


def make_state(folder: Path) -> Path:
    """Make the state folder of a client; refuse a folder that has one, or anything unexpected."""
    state = state_folder(folder)
    if os.path.lexists(state):
        raise FedVLError(
            f"{state} exists, and a folder that an operator hands over has none: if you joined before, --renew makes another "
            "key; if you moved or restored the folder, use --moved; otherwise ask for a new folder."
        )
    check_handed(folder)
    state.mkdir(mode=0o700)
    write_origin(state)
    return state


def open_state(folder: Path) -> Path:
    """Return the state folder; refuse one not made here, and unexpected files beside it."""
    check_handed(folder, STATE, request_path(folder, read_party(folder).name).name)
    state = state_folder(folder)
    if not os.path.lexists(state):
        raise FedVLError(f"This client has not joined yet; run fedvl federation join {folder}.")
    check_private(state)
    if not os.path.lexists(state / ORIGIN) or read_origin(state) != identity_of(state):
        raise FedVLError(
            f"{state} was not made here: whoever sent it may know its secrets. If you moved or restored this folder yourself, "
            f"run fedvl federation join {folder} --moved; otherwise ask the operator for a new folder."
        )
    return state


def adopt_state(folder: Path) -> None:
    """Take a state folder for one of this machine, after a person has confirmed it."""
    check_handed(folder, STATE, request_path(folder, read_party(folder).name).name)
    state = state_folder(folder)
    check_private(state)
    (state / ORIGIN).unlink(missing_ok=True)
    write_origin(state)
    log_of(folder).append("moved")


def check_private(state: Path) -> None:
    if not os.path.lexists(state) or not is_folder(state):
        raise FedVLError(f"{state} is not a folder; remove it, and run fedvl federation join {state.parent}.")
    if stat.S_IMODE(state.lstat().st_mode) & 0o077:
        raise FedVLError(f"Others can read {state}; run chmod 700 {state}, and make another key if they may have.")


def write_origin(state: Path) -> None:
    write_private(state / ORIGIN, b"")
    with open(state / ORIGIN, "wb") as file:  # the same inode, which is part of the identity
        file.write(Origin(identity=identity_of(state)).model_dump_json().encode())


def read_origin(state: Path) -> str:
    try:
        return Origin.model_validate_json(read_private(state / ORIGIN)).identity
    except ValueError:
        return ""


def identity_of(state: Path) -> str:
    """Hash what the sender of a folder cannot know: two inodes and the id of this machine."""
    machine = MACHINE_ID.read_text(encoding="utf-8").strip() if MACHINE_ID.is_file() else ""
    inodes = [path.lstat().st_ino for path in (state, state / ORIGIN)]
    return hashlib.sha256(f"fedvl state {machine} {inodes}".encode()).hexdigest()


# --- secrets


def make_secret(log: AuditLog, state: Path, name: str, content: bytes) -> None:
    """Write a secret whole, after its hash is in the log."""
    log.append("secret", file=name, sha256=hashlib.sha256(content).hexdigest())
    fresh = state / f"{name}.new"
    fresh.unlink(missing_ok=True)
    write_private(fresh, content)
    os.replace(fresh, state / name)


def check_secret(log: AuditLog, state: Path, name: str) -> None:
    """Refuse a secret whose hash is not in the log."""
    if hashlib.sha256(read_private(state / name)).hexdigest() not in logged(log, name):
        raise FedVLError(
            f"{state / name} is not a secret that this client made: its SHA-256 is not in {LOG_FILE}. Restore the folder from "
            "a copy, or begin with a new one."
        )


def logged(log: AuditLog, name: str) -> set[str]:
    """Return the hashes that the log has of a secret: of the present one, and of earlier ones."""
    return {entry["sha256"] for entry in log.entries("secret") if entry["file"] == name}


# --- runs


def begun(log: AuditLog, run: str, experiment: str) -> bool:
    """Return whether the log has a run; refuse one that began with another experiment."""
    found = [entry["experiment"] for entry in log.entries("begun") if entry["run"] == run]
    if found and found[0] != experiment:
        raise FedVLError("It takes part in this run with another experiment.")
    return bool(found)


def begin_run(log: AuditLog, state: Path, run: str, experiment: str) -> Path:
    """Return the folder of a run of one experiment; refuse one that the log does not have."""
    folder, names = state / RUNS / run, [f"{RUNS}/{run}/{name}" for name in SECRETS]
    if not begun(log, run, experiment):
        if os.path.lexists(folder):
            raise FedVLError(
                f"{folder} is not in this client's log; restore the log from a copy, or remove the folder."
            )
        log.append("begun", run=run, experiment=experiment)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.path.lexists(state / names[0]):
        make_secret(log, state, names[0], secrets.token_bytes(SALT_BYTES))
    check_secret(log, state, names[0])
    for name in names[1:]:  # which its own module makes, so that a crash can leave it without a line in the log
        if os.path.lexists(state / name) and logged(log, name):
            check_secret(log, state, name)
    return folder


def log_secrets(log: AuditLog, state: Path, run: str) -> None:
    """Write the hashes of a run's secrets into the log, before anything made with them leaves."""
    for name in (f"{RUNS}/{run}/{name}" for name in SECRETS):
        if os.path.lexists(state / name) and not logged(log, name):
            log.append("secret", file=name, sha256=hashlib.sha256(read_private(state / name)).hexdigest())
