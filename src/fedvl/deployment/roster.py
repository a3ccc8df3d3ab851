"""The roster of a federation: the keys of all admitted clients, which each compares and pins.

The server's operator is the certificate authority, and could certify clients that it invented. A
client therefore pins the roster after its person has compared one short fingerprint with the other
clients, and takes part in secure aggregation with these keys and no others.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from fedvl.config import Experiment
from fedvl.deployment.files import FederationFile, Frozen, ParticipantName, PartyFile
from fedvl.deployment.keys import authority_fingerprint, certified_key, public_key_of, signed_by
from fedvl.deployment.state import log_of, read_party, state_folder
from fedvl.errors import FedVLError
from fedvl.files import read_file, write_whole
from fedvl.runs.folder import PARTY

FILE, PENDING = "roster.json", "roster.pending.json"
MAX_ROSTER_BYTES = 2**24
# An operator who chooses keys for two rosters looks for a collision: 160 bits make that 2^80 attempts.
FINGERPRINT_BYTES, GROUP = 20, 4


class Listed(Frozen):
    """An admitted client."""

    number: Annotated[int, Field(ge=0)]
    name: ParticipantName
    public_key: Annotated[str, Field(max_length=1000)]
    certificate: Annotated[str, Field(max_length=4000)]


class Roster(Frozen):
    authority: Annotated[str, Field(max_length=200)]  # fingerprint
    members: tuple[Listed, ...]

    @property
    def fingerprint(self) -> str:
        """Return one short text for the names, numbers and keys of all, and the authority."""
        keys = sorted([member.number, member.name, member.public_key] for member in self.members)
        digest = hashlib.sha256(json.dumps(["fedvl roster", self.authority, keys]).encode()).digest()
        text = base64.b32encode(digest[:FINGERPRINT_BYTES]).decode()
        return " ".join(text[start : start + GROUP] for start in range(0, len(text), GROUP))


def roster_of(folder: Path, federation: FederationFile) -> Roster:
    """Return the roster of a federation, at its server."""
    members = tuple(
        Listed(number=number, name=member.name, public_key=member.public_key, certificate=member.certificate)
        for number, member in federation.admitted.items()
    )
    return Roster(authority=authority_fingerprint(folder), members=members)


def write_roster(path: Path, roster: Roster) -> None:
    write_whole(path, roster.model_dump_json(indent=1).encode())


def read_roster(path: Path) -> Roster:
    """Read a roster that somebody else may have written."""
    try:
        return Roster.model_validate_json(read_file(path, MAX_ROSTER_BYTES))
    except (OSError, ValidationError) as error:
        raise FedVLError(
            f"{path} is not a roster; ask the operator for the file of fedvl federation roster."
        ) from error


# --- at a client


def import_roster(folder: Path, path: Path) -> Roster:
    """Check a received roster, and keep it until it is approved."""
    roster = read_roster(path)
    check_roster(folder, read_party(folder), roster)
    write_roster(state_folder(folder) / PENDING, roster)
    return roster


def pending_roster(folder: Path) -> Roster | None:
    path = state_folder(folder) / PENDING
    return read_roster(path) if path.exists() else None


def pin_roster(folder: Path, roster: Roster) -> None:
    """Trust the keys of a roster in secure aggregation, and no others."""
    check_roster(folder, read_party(folder), roster)
    log_of(folder).append("roster", fingerprint=roster.fingerprint)
    write_roster(state_folder(folder) / FILE, roster)
    (state_folder(folder) / PENDING).unlink(missing_ok=True)


def pinned_roster(folder: Path) -> Roster:
    path = state_folder(folder) / FILE
    if not path.exists():
        raise FedVLError(
            f"Secure aggregation needs a pinned roster: get roster.json from the operator, run fedvl federation roster "
            f"{folder.name} roster.json, compare the fingerprint with the other clients, then fedvl federation approve "
            f"{folder.name}."
        )
    return read_roster(path)


def needed_roster(folder: Path, experiment: Experiment) -> str:
    """Return the fingerprint of the pinned roster, or nothing if an experiment needs none."""
    return pinned_roster(folder).fingerprint if experiment.federation.secure_sum else ""


def check_roster(folder: Path, party: PartyFile, roster: Roster) -> None:
    """Refuse a roster of another federation, without this client, or with uncertified keys."""
    if roster.authority != authority_fingerprint(folder):
        raise FedVLError(
            "The roster is of another federation: its authority is not the one of ca.crt; ask for the right one."
        )
    for member in roster.members:
        if party.names[member.number : member.number + 1] != (member.name,):
            raise FedVLError(
                f"The roster has {member.name} as client {member.number}, and {PARTY} does not; ask the operator."
            )
        if certified_key(folder, member.name, member.certificate) != member.public_key:
            raise FedVLError(
                f"The key of {member.name} in the roster has no valid certificate of this federation's authority; ask the "
                "operator to admit it again."
            )
    for what in ("number", "public_key"):
        if len({getattr(member, what) for member in roster.members}) < len(roster.members):
            raise FedVLError(f"Two clients of the roster have the same {what.replace('_', ' ')}; ask the operator.")
    own = [member.public_key for member in roster.members if member.number == party.number]
    if own != [public_key_of(state_folder(folder) / "key")]:
        raise FedVLError(
            f"The roster does not hold the key of this client ({party.name}); send the operator your request, and ask for "
            "the roster after fedvl federation admit."
        )


def check_signed(folder: Path, party: PartyFile, client: int, content: bytes, signature: str) -> None:
    """Refuse what is not signed by the key that the pinned roster holds for a client."""
    name = party.names[client] if client < len(party.names) else f"client {client}"
    keys = {member.number: member for member in pinned_roster(folder).members}
    again = (
        f"if its key was renewed, get the new roster.json from the operator, run fedvl federation roster {folder.name} "
        f"roster.json and fedvl federation approve {folder.name}"
    )
    if client not in keys:
        raise FedVLError(f"{name} is not in the roster that this client has pinned; {again}.")
    if certified_key(folder, name, keys[client].certificate) is None:
        raise FedVLError(f"The certificate of {name} in the pinned roster is not valid now; {again}.")
    if not signed_by(keys[client].public_key, content, signature):
        raise FedVLError(f"The key of {name} is not the one in the roster that this client has pinned; {again}.")
