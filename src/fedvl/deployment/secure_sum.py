"""A sum over clients of which the server learns nothing but the sum.

    keys     once a run: each client sends a public key, signed with its party's key
    train    each trains, and sends its numbers masked, with shares of its own mask for the others
    reveal   each hands over the shares that open the masks of those who answered, and its keys with
             those who did not

``masking.py`` has the arithmetic. A client answers each of these once a round (``party.py``), so
that the server can open one sum and no other. It refuses one of too few clients, or of strangers.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pydantic import Field, TypeAdapter, ValidationError

from fedvl.deployment.files import Frozen
from fedvl.deployment.keys import write_private
from fedvl.deployment.masking import (
    SEALED_BYTES,
    SEED_BYTES,
    SHARE_BYTES,
    join_shares,
    masked,
    pair_key,
    seal,
    split,
    threshold,
    unmask,
    unseal,
)
from fedvl.errors import FedVLError
from fedvl.tensors import Tensors

ROSTER, COHORT, MASKED, SHARES, SURVIVORS, PAIR_KEYS = "roster", "cohort", "masked", "shares", "survivors", "pair_keys"
MOST_ROSTER_BYTES = 2**22


class Entry(Frozen):
    """A client's public key for the masks of one run, signed with its party's key."""

    client: Annotated[int, Field(ge=0, lt=2**31)]
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(max_length=200)]
    certificate: Annotated[str, Field(max_length=4000)] = ""  # of the party's key; the server adds it


ROSTERS = TypeAdapter(tuple[Entry, ...])


class Credentials(NamedTuple):
    """How a client vouches for itself, and checks that others are who the server says."""

    sign: Callable[[bytes], str]
    check: Callable[[Entry, bytes], None]  # raises where an entry is not of that client's party


def signed_part(run: str, client: int, key: str) -> bytes:
    return f"fedvl secure sum\n{run}\n{client}\n{key}".encode()


class Member:
    """One client in the secure sums of one run."""

    def __init__(self, run: str, client: int, folder: Path, credentials: Credentials, least: int) -> None:
        self.run, self.client, self.credentials, self.least = run, client, credentials, least
        path = folder / "sum.key"
        if not path.is_file():
            fresh = X25519PrivateKey.generate()
            write_private(path, fresh.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()))
        self.private = X25519PrivateKey.from_private_bytes(path.read_bytes())
        self.public = self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def entry(self) -> Tensors:
        """Return this client's entry of the roster."""
        signature = self.credentials.sign(signed_part(self.run, self.client, self.public))
        return {ROSTER: as_tensor([Entry(client=self.client, key=self.public, signature=signature)])}

    def read(self, roster: torch.Tensor) -> dict[int, bytes]:
        """Return the keys of a cohort with this client in it; refuse strangers and too few."""
        entries = read_roster(roster)
        keys = {entry.client: bytes.fromhex(entry.key) for entry in entries}
        if len(keys) < len(entries) or keys.get(self.client, b"").hex() != self.public:
            raise FedVLError("The list of clients for a secure sum is not one with this client in it.")
        if len(set(keys.values())) < len(keys):
            raise FedVLError("Two clients of a secure sum have the same key.")
        self._check_enough(len(keys))
        for entry in entries:
            if entry.client != self.client:
                self.credentials.check(entry, signed_part(self.run, entry.client, entry.key))
        return keys

    def mask(self, purpose: str, keys: Mapping[int, bytes], numbers: torch.Tensor) -> Tensors:
        """Return numbers that say nothing but in this cohort's sum, and shares of the mask."""
        seed, cohort = secrets.token_bytes(SEED_BYTES), sorted(keys)
        pairs = {c: self._pair(keys[c], purpose, self.client, c) for c in cohort if c != self.client}
        shares = split(seed, cohort, threshold(len(keys)))
        sealed = [seal(shares[c], self._sealing(keys[c], purpose, self.client, c)) for c in cohort]
        return {
            COHORT: torch.tensor(cohort),
            MASKED: masked(numbers, self.client, pairs, seed),
            SHARES: rows(sealed, SEALED_BYTES),
        }

    def reveal(self, purpose: str, keys: Mapping[int, bytes], request: Tensors) -> Tensors:
        """Return the shares of those who answered, and the pair keys with those who did not."""
        survivors = [int(client) for client in request[SURVIVORS]]
        if survivors != sorted(set(survivors)) or not set(survivors) <= keys.keys() or self.client not in survivors:
            raise FedVLError("The clients of a sum are not those that it was masked for.")
        self._check_enough(len(survivors))
        if not is_bytes(request[SHARES], len(survivors), SEALED_BYTES):
            raise FedVLError("The shares of a sum are not one of each client.")
        opened = [
            unseal(sealed, self._sealing(keys[client], purpose, client, self.client))
            for client, sealed in zip(survivors, as_bytes(request[SHARES]), strict=True)
        ]
        lost = [client for client in sorted(keys) if client not in survivors]
        pairs = [self._pair(keys[client], purpose, self.client, client) for client in lost]
        return {
            SURVIVORS: torch.tensor(survivors),
            SHARES: rows(opened, SHARE_BYTES),
            PAIR_KEYS: rows(pairs, SEED_BYTES),
        }

    def _check_enough(self, clients: int) -> None:
        if clients < self.least:
            raise FedVLError(
                f"A sum of {clients} clients is too few; this client takes part in sums of {self.least}, by its experiment "
                "or least_clients of its policy.toml: wait for the others."
            )

    def _pair(self, other: bytes, purpose: str, one: int, two: int) -> bytes:
        return pair_key(self.private, other, f"mask {self.run} {purpose} {min(one, two)} {max(one, two)}")

    def _sealing(self, other: bytes, purpose: str, sender: int, holder: int) -> bytes:
        return pair_key(self.private, other, f"share {self.run} {purpose} {sender} {holder}")


class OpenSum(NamedTuple):
    """What the server has after a reveal: the sum in whole numbers, and whose numbers are in it."""

    total: torch.Tensor
    clients: tuple[int, ...]


class Collected:
    """The masked answers of one exchange, at the server."""

    def __init__(self, answers: Mapping[int, Tensors], length: int) -> None:
        lists = {client: tuple(int(item) for item in answer[COHORT]) for client, answer in answers.items()}
        counts = {cohort: list(lists.values()).count(cohort) for cohort in set(lists.values())}
        # all have the same, unless some answer again what they were asked before the server was killed
        self.cohort = max(counts, key=lambda cohort: (counts[cohort], cohort), default=())
        self.answers = {
            client: answer
            for client, answer in sorted(answers.items())
            if lists[client] == self.cohort and client in self.cohort and well_formed(answer, len(self.cohort), length)
        }

    def keep_to(self, survivors: Sequence[int] | None) -> None:
        """Open the sum that was begun before the server was killed, and no other."""
        if survivors is not None and set(survivors) <= self.answers.keys():
            self.answers = {client: self.answers[client] for client in survivors}

    @property
    def survivors(self) -> list[int]:
        return list(self.answers)

    @property
    def lost(self) -> list[int]:
        return [client for client in self.cohort if client not in self.answers]

    def requests(self) -> dict[int, Tensors]:
        """Return what each survivor is asked to reveal."""
        return {
            client: {SURVIVORS: torch.tensor(self.survivors), SHARES: self._sealed_for(client)}
            for client in self.survivors
        }

    def _sealed_for(self, holder: int) -> torch.Tensor:
        place = self.cohort.index(holder)
        return torch.stack([answer[SHARES][place] for answer in self.answers.values()])

    def open(self, reveals: Mapping[int, Tensors]) -> OpenSum:
        """Return the sum; raise where too few revealed, or a lost client's masks cannot be had."""
        told = {client: reveal for client, reveal in reveals.items() if self._fits(client, reveal)}
        silent = [client for client in self.survivors if client not in told]
        if self.lost and silent:
            raise FedVLError(
                f"Clients {', '.join(map(str, self.lost))} were lost before the sum and "
                f"{', '.join(map(str, silent))} before it could be opened; nothing of the round can be read."
            )
        opened = {holder: as_bytes(reveal[SHARES]) for holder, reveal in told.items()}
        needed = threshold(len(self.cohort))
        seeds = [
            join_shares({holder: shares[place] for holder, shares in opened.items()}, needed)
            for place in range(len(self.survivors))
        ]
        pairs = {
            gone: {client: as_bytes(reveal[PAIR_KEYS])[place] for client, reveal in told.items()}
            for place, gone in enumerate(self.lost)
        }
        total = torch.stack([answer[MASKED] for answer in self.answers.values()]).sum(0)
        return OpenSum(unmask(total, seeds, pairs), tuple(self.survivors))

    def _fits(self, client: int, reveal: Tensors) -> bool:
        return (
            client in self.answers
            and reveal.keys() == {SURVIVORS, SHARES, PAIR_KEYS}
            and reveal[SURVIVORS].tolist() == self.survivors
            and is_bytes(reveal[SHARES], len(self.survivors), SHARE_BYTES)
            and is_bytes(reveal[PAIR_KEYS], len(self.lost), SEED_BYTES)
        )


def well_formed(answer: Tensors, clients: int, length: int) -> bool:
    return (
        answer.keys() == {COHORT, MASKED, SHARES}
        and answer[MASKED].dtype == torch.int64
        and tuple(answer[MASKED].shape) == (length,)
        and is_bytes(answer[SHARES], clients, SEALED_BYTES)
    )


def is_bytes(tensor: torch.Tensor, count: int, size: int) -> bool:
    return tensor.dtype == torch.uint8 and tuple(tensor.shape) == (count, size)


def rows(items: Sequence[bytes], size: int) -> torch.Tensor:
    """Return byte strings of one size as the rows of a tensor."""
    return torch.frombuffer(bytearray(b"".join(items) or b"\0"), dtype=torch.uint8)[: len(items) * size].reshape(
        len(items), size
    )


def as_bytes(tensor: torch.Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in tensor]


def as_tensor(entries: Sequence[Entry]) -> torch.Tensor:
    content = json.dumps([entry.model_dump() for entry in entries]).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_roster(roster: torch.Tensor) -> tuple[Entry, ...]:
    """Read a list of clients that somebody else may have written."""
    if roster.dtype != torch.uint8 or roster.dim() != 1 or len(roster) > MOST_ROSTER_BYTES:
        raise FedVLError("The list of clients for a secure sum is none.")
    try:
        return ROSTERS.validate_json(bytes(roster.tolist()))
    except ValidationError as error:
        raise FedVLError("The list of clients for a secure sum is none.") from error
