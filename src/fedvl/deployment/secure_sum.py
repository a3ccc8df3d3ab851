"""Secure aggregation at a client, against a server that may lie (Bonawitz et al., CCS 2017).

    keys      once a run: each client sends its public keys, signed with its party's key
    share     each sends a fresh public key for its masks, and shares of its secrets for the others
    train     each trains and sends its numbers masked
    confirm   each signs the list of clients whose numbers arrived (the survivors)
    reveal    with enough signatures of one list, each opens its share of every survivor's self
              mask, and of the mask key of every client that was lost

A client signs one list in an attempt and reveals once a round, so it never opens both kinds of
share of one client. The masks are bound to the SHA-256 of everything the clients must have in
common: the received tensors, settings, round, roster and keys. If two clients received different
inputs, their masks do not cancel. ``masking.py`` has the arithmetic, ``sum_server.py`` the server's
side.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import Field, TypeAdapter, ValidationError

from fedvl.deployment.files import Frozen
from fedvl.deployment.keys import write_private
from fedvl.deployment.masking import (
    SEALED_BYTES,
    SECRET_BYTES,
    SHARE_BYTES,
    commitment,
    masked,
    pair_key,
    seal,
    shares_needed,
    split,
    unseal,
)
from fedvl.deployment.messages import Header
from fedvl.errors import FedVLError
from fedvl.files import read_file, write_whole
from fedvl.tensors import Tensors, digest

ROSTER, OFFER, OFFERS, SEALED, COMMITTED, SEED = "roster", "offer", "offers", "sealed", "committed", "seed"
MASKED, CONTEXT, SURVIVORS, SIGNERS, SIGNATURES, SHARES, FALSE = (
    "masked",
    "context",
    "survivors",
    "signers",
    "signatures",
    "shares",
    "false",
)
PROTOCOL = (ROSTER, OFFERS)  # in a request beside the tensors that the client works on
MAX_JSON_BYTES = 2**22
HASH_BYTES, SIGNATURE_BYTES = 32, 64

ClientNumber = Annotated[int, Field(ge=0, lt=2**31)]
HexKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
HexSignature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
Parsed = TypeVar("Parsed", bound=Frozen)


class Entry(Frozen):
    """A client's public keys for one run, signed with its party's key."""

    client: ClientNumber
    key: HexKey  # X25519: encrypts shares for the client
    verify: HexKey  # Ed25519: verifies what the client signs in a round
    signature: Annotated[str, Field(max_length=200)]
    certificate: Annotated[str, Field(max_length=4000)] = ""  # of the party's key; the server adds it


class Offer(Frozen):
    """A client's public key for the pairwise masks of one attempt, signed with its run key."""

    client: ClientNumber
    key: HexKey
    adopted: Digest  # SHA-256 of the last settlement that the client adopted before training
    signature: HexSignature


class SumId(NamedTuple):
    """One attempt at the sum of a round."""

    experiment: str
    kind: str  # what is summed: "train" or "report"
    round: int
    attempt: int

    @classmethod
    def of(cls, header: Header) -> "SumId":
        return cls(header.experiment, header.kind.rpartition("_")[2], header.round, header.sum_attempt)


class Credentials(NamedTuple):
    """How a client signs its run keys, and checks the run keys of others."""

    sign: Callable[[bytes], str]
    check: Callable[[Entry, bytes], None]  # raises unless the entry is signed by that client's pinned key


class Attempt(Frozen):
    """What a client remembers of its latest attempt at the sum of a round; secret."""

    attempt: int
    roster: tuple[Entry, ...]
    key: HexKey  # private key of the pairwise masks
    seed: HexKey  # of the self mask
    offers: tuple[Offer, ...] = ()
    context: Digest = ""
    survivors: tuple[ClientNumber, ...] = ()
    revealed: bool = False


# --- what is signed and hashed; the server computes the same


def entry_part(run: str, client: int, key: str, verify: str) -> bytes:
    return b"fedvl run keys " + hashed([run, client, key, verify]).encode()


def roster_digest(roster: Sequence[Entry]) -> str:
    return hashed([[entry.client, entry.key, entry.verify] for entry in roster])


def offer_part(run: str, step: SumId, roster: str, client: int, key: str, adopted: str) -> bytes:
    return b"fedvl mask key " + hashed([run, *step, roster, client, key, adopted]).encode()


def context_of(run: str, step: SumId, roster: Sequence[Entry], offers: Sequence[Offer], inputs: str) -> str:
    """Return the digest of what all clients of a sum must have in common."""
    keys = [[offer.client, offer.key, offer.adopted] for offer in offers]
    return hashed([run, *step, roster_digest(roster), keys, inputs])


def survivor_part(run: str, step: SumId, context: str, survivors: Sequence[int]) -> bytes:
    return b"fedvl survivors " + hashed([run, *step, context, list(survivors)]).encode()


def mask_purpose(context: str, one: int, two: int) -> bytes:
    return f"mask {context} {min(one, two)} {max(one, two)}".encode()


def hashed(content: list[object]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def signature_holds(key: str, content: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key(private: X25519PrivateKey | Ed25519PrivateKey) -> str:
    return private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


# --- the client


class SumMember:
    """One client in the secure aggregation of one run."""

    def __init__(
        self, run: str, client: int, folder: Path, credentials: Credentials, least: int, share: float = 2 / 3
    ) -> None:
        self.run, self.client, self.folder, self.credentials = run, client, folder, credentials
        self.least, self.share = least, share
        path = folder / "sum.key"
        if not path.is_file():
            write_private(path, secrets.token_bytes(2 * SECRET_BYTES))
        secret = path.read_bytes()
        self.private = X25519PrivateKey.from_private_bytes(secret[:SECRET_BYTES])
        self.signing = Ed25519PrivateKey.from_private_bytes(secret[SECRET_BYTES:])
        self.public, self.verify = public_key(self.private), public_key(self.signing)
        self.checked: set[Entry] = set()  # entries whose signatures were verified

    def entry(self) -> Tensors:
        """Return this client's entry of the roster."""
        signature = self.credentials.sign(entry_part(self.run, self.client, self.public, self.verify))
        return {
            ROSTER: as_tensor([Entry(client=self.client, key=self.public, verify=self.verify, signature=signature)])
        }

    def offer(self, step: SumId, roster: torch.Tensor | None, adopted: str) -> Tensors:
        """Begin an attempt: return a public mask key, and sealed shares of its secrets."""
        before = self._read(step)
        if before and before.revealed:
            raise FedVLError(f"This client has opened the sum of round {step.round + 1}; it takes part in no other.")
        if before and before.attempt >= step.attempt:
            raise FedVLError(f"Attempt {step.attempt} at round {step.round + 1} is over for this client.")
        entries = self._checked(read_items(roster, Entry))
        needed = shares_needed(len(entries), self.share)
        self._check_enough(len(entries))
        private, seed = X25519PrivateKey.generate(), secrets.token_bytes(SECRET_BYTES)
        holders = [entry.client for entry in entries]
        of_seed, of_key = (split(secret, holders, needed) for secret in (seed, private.private_bytes_raw()))
        listed = roster_digest(entries)
        sealed = [
            seal(of_seed[entry.client] + of_key[entry.client], self._sealing(step, listed, entry, self.client))
            for entry in entries
        ]
        committed = [commitment(share) for holder in holders for share in (of_seed[holder], of_key[holder])]
        self._write(
            step, Attempt(attempt=step.attempt, roster=entries, key=private.private_bytes_raw().hex(), seed=seed.hex())
        )
        key = public_key(private)
        signature = self.signing.sign(offer_part(self.run, step, listed, self.client, key, adopted)).hex()
        return {
            OFFER: as_tensor([Offer(client=self.client, key=key, adopted=adopted, signature=signature)]),
            SEALED: rows(sealed, SEALED_BYTES),
            COMMITTED: rows(committed, HASH_BYTES),
            SEED: rows([commitment(seed)], HASH_BYTES),
        }

    def mask(self, step: SumId, received: Tensors, numbers: Callable[[], torch.Tensor]) -> Tensors:
        """Return masked numbers; compute them once the request is known to be sound."""
        state = self._attempt(step)
        offers = read_items(received.get(OFFERS), Offer)
        self._check_offers(step, state, offers)
        inputs = digest({name: tensor for name, tensor in received.items() if name not in PROTOCOL})
        context = context_of(self.run, step, state.roster, offers, inputs)
        if state.context and context != state.context:
            raise FedVLError(f"This client has masked its numbers for other tensors in round {step.round + 1}.")
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(state.key))
        pairs = {
            offer.client: pair_key(private, bytes.fromhex(offer.key), mask_purpose(context, self.client, offer.client))
            for offer in offers
            if offer.client != self.client
        }
        result = masked(numbers(), self.client, pairs, bytes.fromhex(state.seed))
        self._write(step, state.model_copy(update={"offers": offers, "context": context}))
        return {MASKED: result, CONTEXT: rows([bytes.fromhex(context)], HASH_BYTES)}

    def confirm(self, step: SumId, request: Tensors) -> Tensors:
        """Sign the list of survivors, one in an attempt."""
        state = self._attempt(step)
        survivors = read_clients(request.get(SURVIVORS))
        offered = {offer.client for offer in state.offers}
        if not state.context or not set(survivors) <= offered or self.client not in survivors:
            raise FedVLError("The survivor list is not one of the clients that this client masked its numbers for.")
        if state.survivors and survivors != state.survivors:
            raise FedVLError(f"This client has signed another survivor list in round {step.round + 1}.")
        self._check_enough(len(survivors), shares_needed(len(state.roster), self.share))
        self._write(step, state.model_copy(update={"survivors": survivors}))
        return {SIGNATURES: rows([self.signing.sign(self._signed(step, state.context, survivors))], SIGNATURE_BYTES)}

    def reveal(self, step: SumId, request: Tensors) -> Tensors:
        """Open one share of each client, for a survivor list that a threshold of clients signed."""
        state = self._attempt(step)
        survivors = read_clients(request.get(SURVIVORS))
        if not state.survivors or survivors != state.survivors:
            raise FedVLError("This client did not sign that survivor list, and opens nothing for it.")
        self._check_signatures(step, state, request)
        count = len(state.offers)
        if not is_bytes(request.get(SEALED), count, SEALED_BYTES) or not is_bytes(
            request.get(COMMITTED), 2 * count, HASH_BYTES
        ):
            raise FedVLError("The request does not hold one sealed share of each client.")
        listed, entries = roster_digest(state.roster), {entry.client: entry for entry in state.roster}
        committed = as_bytes(request[COMMITTED])
        opened, false = [], []
        for place, (offer, sealed) in enumerate(zip(state.offers, as_bytes(request[SEALED]), strict=True)):
            key = self._sealing(step, listed, entries[offer.client], offer.client, self.client)
            both = unseal(sealed, key) or bytes(2 * SHARE_BYTES)
            of_key = offer.client not in survivors  # the key of a lost client, the seed of a survivor: never both
            share = both[SHARE_BYTES:] if of_key else both[:SHARE_BYTES]
            if commitment(share) != committed[2 * place + of_key]:
                false.append(offer.client)  # its sender dealt another share than it committed to
                share = bytes(SHARE_BYTES)
            opened.append(share)
        self._write(step, state.model_copy(update={"revealed": True}))
        return {SHARES: rows(opened, SHARE_BYTES), FALSE: torch.tensor(false, dtype=torch.int64)}

    def signed_digest(self, step: SumId) -> str:
        """Return the digest of the survivor list that this client signed, for the log."""
        state = self._attempt(step)
        return hashlib.sha256(self._signed(step, state.context, state.survivors)).hexdigest()

    def left_out(self, step: SumId) -> bool:
        """Return whether the last round's sum was opened without the numbers this client sent."""
        before = self._read(step._replace(round=step.round - 1)) if step.round else None
        return before is not None and bool(before.context) and not before.survivors

    # --- checks

    def _checked(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Return a roster with this client in it; refuse unknown clients and repeated keys."""
        clients = [entry.client for entry in entries]
        own = [entry for entry in entries if entry.client == self.client]
        if clients != sorted(set(clients)) or not own or (own[0].key, own[0].verify) != (self.public, self.verify):
            raise FedVLError("The roster of the secure sum does not list this client with its own keys, once.")
        if len({entry.key for entry in entries} | {entry.verify for entry in entries}) < 2 * len(entries):
            raise FedVLError("Two clients of a secure sum have the same key.")
        for entry in entries:
            if entry.client != self.client and entry not in self.checked:
                self.credentials.check(entry, entry_part(self.run, entry.client, entry.key, entry.verify))
                self.checked.add(entry)
        return tuple(entry.model_copy(update={"certificate": ""}) for entry in entries)

    def _check_offers(self, step: SumId, state: Attempt, offers: tuple[Offer, ...]) -> None:
        entries, listed = {entry.client: entry for entry in state.roster}, roster_digest(state.roster)
        clients = [offer.client for offer in offers]
        own = next((offer for offer in offers if offer.client == self.client), None)
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(state.key))
        if clients != sorted(set(clients)) or own is None or own.key != public_key(private):
            raise FedVLError("The mask keys of the secure sum do not list this client with its own key, once.")
        self._check_enough(len(offers), shares_needed(len(state.roster), self.share))
        if len({offer.key for offer in offers}) < len(offers):
            raise FedVLError("Two clients of a secure sum have the same mask key.")
        for offer in offers:
            content = offer_part(self.run, step, listed, offer.client, offer.key, offer.adopted)
            known = entries.get(offer.client)
            if known is None or not signature_holds(known.verify, content, bytes.fromhex(offer.signature)):
                raise FedVLError(f"The mask key of client {offer.client} is not signed by that client for this round.")
            if offer.adopted != own.adopted:
                raise FedVLError(
                    f"Client {offer.client} got another answer than this client before round {step.round + 1}."
                )

    def _check_signatures(self, step: SumId, state: Attempt, request: Tensors) -> None:
        """Refuse unless a threshold of clients signed this list for this client's inputs."""
        signers, signatures = read_clients(request.get(SIGNERS)), request.get(SIGNATURES)
        if not is_bytes(signatures, len(signers), SIGNATURE_BYTES):
            raise FedVLError("The signatures of the survivor list are malformed.")
        assert signatures is not None
        content = self._signed(step, state.context, state.survivors)
        keys = {entry.client: entry.verify for entry in state.roster if entry.client in state.survivors}
        valid = [
            signer
            for signer, signature in zip(signers, as_bytes(signatures), strict=True)
            if signer in keys and signature_holds(keys[signer], content, signature)
        ]
        needed = shares_needed(len(state.roster), self.share)
        if len(valid) < needed:
            raise FedVLError(
                f"{len(valid)} of {needed} necessary clients signed this survivor list for the tensors that this client "
                f"received in round {step.round + 1}; the server sent others another list or another model, so nothing is "
                "opened."
            )

    def _check_enough(self, clients: int, needed: int = 0) -> None:
        if clients < max(self.least, needed):
            raise FedVLError(
                f"A sum of {clients} clients is too few; this client takes part in sums of {max(self.least, needed)} or more "
                "(federation.least_clients and sum_threshold of the experiment, least_clients of its policy.toml)."
            )

    def _signed(self, step: SumId, context: str, survivors: Sequence[int]) -> bytes:
        return survivor_part(self.run, step, context, survivors)

    def _sealing(self, step: SumId, listed: str, other: Entry, sender: int, holder: int | None = None) -> bytes:
        """Return the key that seals shares between this client and another, used once."""
        to = other.client if holder is None else holder
        purpose = f"share {self.run} {' '.join(map(str, step))} {listed} {sender} {to}"
        return pair_key(self.private, bytes.fromhex(other.key), purpose.encode())

    # --- memory

    def _path(self, step: SumId) -> Path:
        return self.folder / f"{step.round:06d}-{step.kind}.sum"

    def _read(self, step: SumId) -> Attempt | None:
        path = self._path(step)
        return Attempt.model_validate_json(read_file(path, MAX_JSON_BYTES)) if path.is_file() else None

    def _write(self, step: SumId, state: Attempt) -> None:
        write_whole(self._path(step), state.model_dump_json().encode(), 0o600)

    def _attempt(self, step: SumId) -> Attempt:
        state = self._read(step)
        if state is None or state.attempt != step.attempt:
            raise FedVLError(f"This client is not in attempt {step.attempt} at the sum of round {step.round + 1}.")
        return state


# --- bytes and lists in tensors


def is_bytes(tensor: torch.Tensor | None, count: int, size: int) -> bool:
    return tensor is not None and tensor.dtype == torch.uint8 and tuple(tensor.shape) == (count, size)


def rows(items: Sequence[bytes], size: int) -> torch.Tensor:
    """Return byte strings of one size as the rows of a tensor."""
    return torch.frombuffer(bytearray(b"".join(items) or b"\0"), dtype=torch.uint8)[: len(items) * size].reshape(
        len(items), size
    )


def as_bytes(tensor: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in tensor.cpu()]


def read_clients(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Return client numbers in ascending order; raise if they are malformed."""
    if tensor is None or tensor.dtype != torch.int64 or tensor.dim() != 1:
        raise FedVLError("The list of clients in the request is malformed.")
    clients = tuple(tensor.tolist())
    if list(clients) != sorted(set(clients)):
        raise FedVLError("The list of clients in the request is not in order, or names one twice.")
    return clients


def as_tensor(items: Sequence[Frozen]) -> torch.Tensor:
    content = json.dumps([item.model_dump() for item in items]).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_items(tensor: torch.Tensor | None, item: type[Parsed]) -> tuple[Parsed, ...]:
    """Read entries or offers that somebody else may have written."""
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1 or len(tensor) > MAX_JSON_BYTES:
        raise FedVLError(f"Malformed list of {item.__name__.lower()} records in a secure sum.")
    try:
        return TypeAdapter(tuple[item, ...]).validate_json(tensor.cpu().numpy().tobytes())  # type: ignore[valid-type]
    except ValidationError as error:
        raise FedVLError(f"Malformed list of {item.__name__.lower()} records in a secure sum.") from error
