"""Who belongs to a federation: clients join with keys of their own making, and can be revoked.

A client makes its key on its own machine and sends a request (its public key, signed with it) to
the server's operator, who admits it after comparing fingerprints. No private key ever travels. The
other clients learn the keys from the roster (``roster.py``).
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedvl.config import Experiment
from fedvl.data.sources import open_dataset
from fedvl.deployment.files import (
    LOOPBACK,
    FederationFile,
    Frozen,
    Participant,
    ParticipantName,
    PartyFile,
    add_experiment,
    read_model,
)
from fedvl.deployment.keys import (
    authority_fingerprint,
    certify_party,
    fingerprint,
    make_authority,
    make_key,
    make_server_certificate,
    public_key_of,
    sign,
    signed_by,
)
from fedvl.deployment.policy import approve, identify, write_policy
from fedvl.deployment.roster import check_signed, needed_roster, pin_roster, roster_of
from fedvl.deployment.secure_sum import Credentials, Entry
from fedvl.deployment.state import (
    check_secret,
    log_of,
    make_secret,
    make_state,
    open_state,
    read_party,
    request_path,
    state_folder,
)
from fedvl.errors import FedVLError
from fedvl.files import write_whole

MAX_REQUEST_BYTES = 4096
KEY = "key"
MAKE_HINT = "make it with fedvl federation init."


def create(folder: Path, names: list[str], host: str, port: int, experiment: Experiment, listens: str = "") -> None:
    """Make the folder of a federation, with one to hand to each party.

    If the federation is within this machine, so are the parties: their keys are made at once, and
    they pin the roster and approve the experiment.
    """
    data = experiment.data
    dataset = open_dataset(data.dataset, Path(data.root) if data.root else None, data.classes)
    for taken in folder, *(folder / "parties" / name for name in names):
        taken.mkdir(parents=True, mode=0o700)
    make_authority(folder)
    make_server_certificate(folder, host)
    common: dict[str, Any] = {"class_names": dataset.class_names, "templates": dataset.templates}
    members = tuple(Participant(name=name) for name in names)
    whole = FederationFile(host=host, port=port, listens=listens, parties=members, **common)
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
            admit_participant(folder, make_join_request(folder / "parties" / name))
            request_path(folder / "parties" / name, name).unlink()
        for name in names:
            pin_roster(folder / "parties" / name, roster_of(folder, read_federation(folder)))
            approve_experiment(folder / "parties" / name, experiment)


def approve_experiment(folder: Path, experiment: Experiment) -> None:
    """Approve an experiment for a client, with the roster that it has pinned if it needs one."""
    approve(log_of(folder), identify(experiment), needed_roster(folder, experiment))


class JoinRequest(Frozen):
    """What a party sends to the server's operator: its public key, signed with it."""

    name: ParticipantName
    public_key: str
    authority: str  # its fingerprint: a request is for one federation
    signature: str

    @property
    def signed_part(self) -> bytes:
        return "\n".join(["fedvl federation join", self.name, self.public_key, self.authority]).encode()


def make_join_request(folder: Path, renew: bool = False) -> JoinRequest:
    """Make a client's state folder and key, and the request to be admitted with it."""
    state = open_state(folder) if renew else make_state(folder)
    party, log = read_party(folder), log_of(folder)
    if not renew:
        log.append("joined", name=party.name, client=party.number, authority=authority_fingerprint(folder))
    make_secret(log, state, KEY, make_key())
    unsigned = JoinRequest(
        name=party.name,
        public_key=public_key_of(state / KEY),
        authority=authority_fingerprint(folder),
        signature="",
    )
    request = unsigned.model_copy(update={"signature": sign(state / KEY, unsigned.signed_part)})
    write_whole(request_path(folder, party.name), request.model_dump_json(indent=1).encode())
    write_policy(state)
    return request


def read_request(path: Path) -> JoinRequest:
    """Read a request that a stranger may have written."""
    try:
        with open(path, "rb") as file:
            request = JoinRequest.model_validate_json(file.read(MAX_REQUEST_BYTES + 1))
    except FileNotFoundError as error:
        raise FedVLError(
            f"There is no file {path}; fedvl federation join writes it in the party's folder, as PARTY/PARTY.request.json: "
            "look there, or ask the party for it again."
        ) from error
    except (OSError, ValidationError) as error:
        raise FedVLError(f"{path} is no request of fedvl federation join; ask the party for it again.") from error
    if not signed_by(request.public_key, request.signed_part, request.signature):
        raise FedVLError(f"{path} is not signed with the key that it names; ask the party for it again.")
    return request


def admit_participant(folder: Path, request: JoinRequest) -> None:
    """Write a party's key, with the authority's certificate of it, into the federation's file."""
    federation = read_federation(folder)
    if request.authority != authority_fingerprint(folder):
        raise FedVLError("The request is for another federation; the party joins with the folder of this one.")
    if any(member.public_key == request.public_key and member.name != request.name for member in federation.parties):
        raise FedVLError(f"{request.name} shows the key of another party; each party makes its own.")
    member = find_member(federation, request.name)
    admitted = Participant(
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
    replace_member(folder, federation, Participant(name=name))


def renew(folder: Path) -> None:
    """Make the server's certificate and key anew, by the same authority."""
    make_server_certificate(folder, read_federation(folder).host)


def absence_note(folder: Path) -> str:
    """Say who is not admitted, and what secure aggregation needs then; empty: all are."""
    absent = [member.name for member in read_federation(folder).parties if not member.public_key]
    if not absent:
        return ""
    return (
        f"Not admitted, or revoked: {', '.join(absent)}. A run goes on without them while its sums have enough clients; for a "
        f"new one hand out the new roster (fedvl federation roster {folder}), which every client imports and approves, then "
        f"start it with fedvl server {folder}."
    )


@contextmanager
def absence_explained(folder: Path) -> Iterator[None]:
    """Add to an error of secure aggregation that clients are missing because they were revoked."""
    try:
        yield
    except FedVLError as error:
        raise FedVLError(f"{error} {absence_note(folder)}".strip()) from error


def read_federation(folder: Path) -> FederationFile:
    return read_model(folder / "federation.json", FederationFile, MAKE_HINT)


def find_member(federation: FederationFile, name: str) -> Participant:
    for member in federation.parties:
        if member.name == name:
            return member
    names = ", ".join(member.name for member in federation.parties)
    raise FedVLError(f"{name!r} is no party of this federation; its parties are {names}.")


def replace_member(folder: Path, federation: FederationFile, member: Participant) -> None:
    parties = tuple(member if old.name == member.name else old for old in federation.parties)
    whole = federation.model_copy(update={"parties": parties})
    write_whole(folder / "federation.json", whole.model_dump_json(indent=1).encode())


def credentials(folder: Path, party: PartyFile) -> Credentials:
    """Return how this client signs its keys for secure aggregation, and checks those of others."""

    def check(entry: Entry, content: bytes) -> None:
        check_signed(folder, party, entry.client, content, entry.signature)

    return Credentials(partial(sign, state_folder(folder) / KEY), check)


def check_key(folder: Path) -> None:
    """Refuse to take part without a key, or with one that others can read or made."""
    state = open_state(folder)
    if not (state / KEY).exists():
        raise FedVLError(f"This client has no key; make it with fedvl federation join {folder} --renew.")
    check_secret(log_of(folder), state, KEY)
