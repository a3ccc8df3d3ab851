"""Who belongs to a federation: parties join with keys of their own making, and can be revoked.

A party makes its key on its own machine and sends a request (its public key, signed with it) to the
server's operator, who admits it after comparing fingerprints. No private key ever travels.
"""

import json
import os
import shutil
import stat
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedvl.config import Experiment
from fedvl.data.sources import open_dataset
from fedvl.deployment import audit_log
from fedvl.deployment.files import LOOPBACK, FederationFile, Frozen, Member, PartyFile, add_experiment, read_file
from fedvl.deployment.keys import (
    authority_fingerprint,
    certified_key,
    certify_party,
    fingerprint,
    make_authority,
    make_party_key,
    make_server_certificate,
    sign,
    signed_by,
)
from fedvl.deployment.policy import approve, identify, write_policy
from fedvl.deployment.secure_sum import Credentials, Entry
from fedvl.errors import FedVLError
from fedvl.files import read_json, write_whole

MOST_REQUEST_BYTES = 4096
KNOWN = "known_parties.json"  # fingerprints of the other parties' keys, as first seen in a secure sum
MAKE_HINT = "make it with fedvl federation init."


def create(folder: Path, names: list[str], host: str, port: int, experiment: Experiment) -> None:
    """Make the folder of a federation, with one to hand to each party.

    If the federation is within this machine, so are the parties: their keys are made at once, and
    they approve the experiment.
    """
    identity = identify(experiment) if host in LOOPBACK else ""
    data = experiment.data
    dataset = open_dataset(data.dataset, Path(data.root) if data.root else None, data.classes)
    for taken in folder, *(folder / "parties" / name for name in names):
        taken.mkdir(parents=True, mode=0o700)
    make_authority(folder)
    make_server_certificate(folder, host)
    common: dict[str, Any] = {"class_names": dataset.class_names, "templates": dataset.templates}
    whole = FederationFile(host=host, port=port, parties=tuple(Member(name=name) for name in names), **common)
    write_whole(folder / "federation.json", whole.model_dump_json(indent=1).encode())
    add_experiment(folder, experiment)
    for number, name in enumerate(names):
        place = folder / "parties" / name
        party = PartyFile(name=name, number=number, names=tuple(names), server=f"{host}:{port}", **common)
        write_whole(place / "party.json", party.model_dump_json(indent=1).encode())
        shutil.copyfile(folder / "ca.crt", place / "ca.crt")
        shutil.copytree(folder / "experiments", place / "experiments")
    if host in LOOPBACK:
        for name in names:
            admit(folder, join(folder / "parties" / name))
            request_path(folder / "parties" / name, name).unlink()
            approve(log_of(folder / "parties" / name), identity)


class JoinRequest(Frozen):
    """What a party sends to the server's operator: its public key, signed with it."""

    name: str
    public_key: str
    authority: str  # its fingerprint: a request is for one federation
    signature: str

    @property
    def signed_part(self) -> bytes:
        return "\n".join(["fedvl federation join", self.name, self.public_key, self.authority]).encode()


def join(folder: Path, renew: bool = False) -> JoinRequest:
    """Make a party's key in its folder, and the request to be admitted with it."""
    party = read_file(folder / "party.json", PartyFile, "give the folder that the server's operator handed you.")
    fresh = folder / "key.new"
    if (folder / "key").exists() and not renew:
        raise FedVLError(f"{folder} has a key already; --renew makes another, which the operator must admit again.")
    if (folder / audit_log.FILE).exists() and not renew:
        raise FedVLError(
            f"{folder} holds approvals ({audit_log.FILE}) but no key; if you did not make them, ask for a new folder, else use "
            "--renew."
        )
    fresh.unlink(missing_ok=True)
    public_key = make_party_key(fresh)
    unsigned = JoinRequest(
        name=party.name, public_key=public_key, authority=authority_fingerprint(folder), signature=""
    )
    request = unsigned.model_copy(update={"signature": sign(fresh, unsigned.signed_part)})
    os.replace(fresh, folder / "key")
    write_whole(request_path(folder, party.name), request.model_dump_json(indent=1).encode())
    write_policy(folder)
    return request


def log_of(folder: Path) -> audit_log.Log:
    return audit_log.Log(folder / audit_log.FILE)


def request_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.request.json"


def read_request(path: Path) -> JoinRequest:
    """Read a request that a stranger may have written."""
    try:
        with open(path, "rb") as file:
            request = JoinRequest.model_validate_json(file.read(MOST_REQUEST_BYTES + 1))
    except (OSError, ValidationError) as error:
        raise FedVLError(f"{path} is no request of fedvl federation join; ask the party for it again.") from error
    if not signed_by(request.public_key, request.signed_part, request.signature):
        raise FedVLError(f"{path} is not signed with the key that it names; ask the party for it again.")
    return request


def admit(folder: Path, request: JoinRequest) -> None:
    """Write a party's key, with the authority's certificate of it, into the federation's file."""
    federation = read_federation(folder)
    if request.authority != authority_fingerprint(folder):
        raise FedVLError("The request is for another federation; the party joins with the folder of this one.")
    if any(member.public_key == request.public_key and member.name != request.name for member in federation.parties):
        raise FedVLError(f"{request.name} shows the key of another party; each party makes its own.")
    member = find_member(federation, request.name)
    admitted = Member(
        name=member.name,
        public_key=request.public_key,
        certificate=certify_party(folder, member.name, request.public_key),
    )
    log_of(folder).append("admitted", party=member.name, key=fingerprint(request.public_key))
    replace_member(folder, federation, admitted)


def revoke(folder: Path, name: str) -> None:
    """Take a party's key out of the federation; a server at work refuses it from now on."""
    federation = read_federation(folder)
    member = find_member(federation, name)
    if not member.public_key:
        raise FedVLError(f"{name} has no key that could be revoked.")
    log_of(folder).append("revoked", party=name, key=fingerprint(member.public_key))
    replace_member(folder, federation, Member(name=name))


def renew(folder: Path) -> None:
    """Make the server's certificate and key anew, by the same authority."""
    make_server_certificate(folder, read_federation(folder).host)


def read_federation(folder: Path) -> FederationFile:
    return read_file(folder / "federation.json", FederationFile, MAKE_HINT)


def find_member(federation: FederationFile, name: str) -> Member:
    for member in federation.parties:
        if member.name == name:
            return member
    names = ", ".join(member.name for member in federation.parties)
    raise FedVLError(f"{name!r} is no party of this federation; its parties are {names}.")


def replace_member(folder: Path, federation: FederationFile, member: Member) -> None:
    parties = tuple(member if old.name == member.name else old for old in federation.parties)
    whole = federation.model_copy(update={"parties": parties})
    write_whole(folder / "federation.json", whole.model_dump_json(indent=1).encode())


def credentials(folder: Path, party: PartyFile) -> Credentials:
    """Return how this party vouches for its keys in secure sums, and checks those of others."""
    return Credentials(partial(sign, folder / "key"), partial(check_entry, folder, party))


def check_entry(folder: Path, party: PartyFile, entry: Entry, content: bytes) -> None:
    """Refuse a client's key that its party did not sign, or of a party that has changed its own."""
    name = party.names[entry.client] if entry.client < len(party.names) else ""
    public_key = certified_key(folder, name, entry.certificate)
    if public_key is None or not signed_by(public_key, content, entry.signature):
        raise FedVLError(f"The key of client {entry.client} in a secure sum is not its party's.")
    known = read_json(folder / KNOWN) or {}
    shown = fingerprint(public_key)
    if known.setdefault(name, shown) != shown:
        raise FedVLError(
            f"{name} has another key ({shown}) than before ({known[name]}); if it renewed it, delete its line from {KNOWN}."
        )
    write_whole(folder / KNOWN, json.dumps(known, indent=1).encode())


def check_key(folder: Path) -> None:
    """Refuse to take part without a key, or with one that others on the machine can read."""
    key = folder / "key"
    if not key.is_file():
        raise FedVLError(f"This party has no key yet; make it with fedvl federation join {folder}.")
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        raise FedVLError(f"Others can read {key}; make another with fedvl federation join {folder} --renew.")
