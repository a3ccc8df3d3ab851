"""Secure aggregation at the server: collect an attempt's messages, name cheats, open the sum."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedvl.deployment.masking import (
    SEALED_BYTES,
    SHARE_BYTES,
    commitment,
    join_shares,
    pair_key,
    shares_needed,
    unmask,
)
from fedvl.deployment.secure_sum import (
    COMMITTED,
    CONTEXT,
    FALSE,
    HASH_BYTES,
    MASKED,
    OFFER,
    OFFERS,
    ROSTER,
    SEALED,
    SEED,
    SHARES,
    SIGNATURE_BYTES,
    SIGNATURES,
    SIGNERS,
    SURVIVORS,
    Entry,
    Offer,
    SumId,
    as_bytes,
    as_tensor,
    context_of,
    is_bytes,
    mask_purpose,
    offer_part,
    public_key,
    read_clients,
    read_items,
    roster_digest,
    rows,
    signature_holds,
    survivor_part,
)
from fedvl.errors import FedVLError
from fedvl.federation.checks import Refusal, SpoiledSumError, refusal
from fedvl.tensors import Tensors, digest


class OpenSum(NamedTuple):
    """The sum in whole numbers, and the clients whose numbers are in it."""

    total: torch.Tensor
    clients: tuple[int, ...]


class Collected:
    """One attempt at a sum. Each method takes the answers of one step and notes the refusals."""

    def __init__(self, run: str, step: SumId, roster: Sequence[Entry], share: float) -> None:
        self.run, self.step = run, step
        self.roster = tuple(sorted(roster, key=lambda entry: entry.client))
        self.holders = [entry.client for entry in self.roster]
        self.entries = {entry.client: entry for entry in self.roster}
        self.threshold = shares_needed(len(self.roster), share)
        self.offers: dict[int, Offer] = {}
        self.dealt: dict[int, Tensors] = {}  # sealed shares and their commitments
        self.masked: dict[int, torch.Tensor] = {}
        self.context = ""
        self.survivors: tuple[int, ...] = ()
        self.signatures: dict[int, bytes] = {}
        self.refusals: list[Refusal] = []
        self.cheats: set[int] = set()  # clients shown to have sent a false share

    def share_request(self) -> Tensors:
        return {ROSTER: as_tensor(self.roster)}

    def take_offers(self, answers: Mapping[int, Tensors]) -> None:
        """Keep mask keys that their clients signed, with well-formed shares for every holder."""
        listed, count = roster_digest(self.roster), len(self.roster)
        for client, answer in sorted(answers.items()):
            try:
                (offer,) = read_items(answer.get(OFFER), Offer)
            except (FedVLError, ValueError):
                self._refuse(client, "malformed mask key")
                continue
            content = offer_part(self.run, self.step, listed, client, offer.key, offer.adopted)
            if offer.client != client or not signature_holds(
                self.entries[client].verify, content, bytes.fromhex(offer.signature)
            ):
                self._refuse(client, "its mask key is not signed for this round")
            elif not (
                is_bytes(answer.get(SEALED), count, SEALED_BYTES)
                and is_bytes(answer.get(COMMITTED), 2 * count, HASH_BYTES)
                and is_bytes(answer.get(SEED), 1, HASH_BYTES)
            ):
                self._refuse(client, "malformed shares of its mask")
            else:
                self.offers[client] = offer
                self.dealt[client] = {name: answer[name] for name in (SEALED, COMMITTED, SEED)}
        self._keep_most_adopted()

    def _keep_most_adopted(self) -> None:
        """Leave out clients that missed the exchange before the round: their state differs."""
        adopted = [offer.adopted for offer in self.offers.values()]
        usual = max(adopted, key=lambda one: (adopted.count(one), one), default="")
        for client in [client for client, offer in self.offers.items() if offer.adopted != usual]:
            self._refuse(client, "it missed the exchange before this round")
            del self.offers[client], self.dealt[client]

    def work_request(self, shared: Tensors) -> Tensors:
        """Return what is trained on, with the mask keys of all clients of the sum."""
        offers = list(self.offers.values())
        self.context = context_of(self.run, self.step, self.roster, offers, digest(shared))
        return {**shared, OFFERS: as_tensor(offers)}

    def take_masked(self, answers: Mapping[int, Tensors], length: int) -> None:
        for client, answer in sorted(answers.items()):
            numbers = answer.get(MASKED)
            if numbers is None or numbers.dtype != torch.int64 or tuple(numbers.shape) != (length,):
                self._refuse(client, "malformed masked numbers")
            elif not is_bytes(answer.get(CONTEXT), 1, HASH_BYTES) or as_bytes(answer[CONTEXT])[0].hex() != self.context:
                self._refuse(client, "its masks are bound to other tensors than those of this round")
            else:
                self.masked[client] = numbers
        self.survivors = tuple(self.masked)

    def confirm_request(self) -> Tensors:
        return {SURVIVORS: torch.tensor(self.survivors)}

    @property
    def signed_part(self) -> bytes:
        return survivor_part(self.run, self.step, self.context, self.survivors)

    def take_signatures(self, answers: Mapping[int, Tensors]) -> None:
        for client, answer in sorted(answers.items()):
            signature = answer.get(SIGNATURES)
            if is_bytes(signature, 1, SIGNATURE_BYTES) and signature is not None:
                signed = as_bytes(signature)[0]
                if signature_holds(self.entries[client].verify, self.signed_part, signed):
                    self.signatures[client] = signed
                    continue
            self._refuse(client, "it did not sign the survivor list")

    def reveal_requests(self) -> dict[int, Tensors]:
        """Return what each client that signed the list needs to open its shares."""
        signers = sorted(self.signatures)
        common = {
            SURVIVORS: torch.tensor(self.survivors),
            SIGNERS: torch.tensor(signers),
            SIGNATURES: rows([self.signatures[signer] for signer in signers], SIGNATURE_BYTES),
        }
        sealed = torch.stack([self.dealt[client][SEALED] for client in self.offers])
        committed = torch.stack([self.dealt[client][COMMITTED].reshape(-1, 2, HASH_BYTES) for client in self.offers])
        places = {holder: place for place, holder in enumerate(self.holders)}
        return {
            client: {
                **common,
                SEALED: sealed[:, places[client]].contiguous(),
                COMMITTED: committed[:, places[client]].reshape(-1, HASH_BYTES).contiguous(),
            }
            for client in signers
        }

    def missing(self, reveals: Collection[int]) -> list[int]:
        """Return the clients whose shares are awaited; none if there are enough to open the sum."""
        awaited = [client for client in sorted(self.signatures) if client not in reveals]
        return [] if len(self.signatures) - len(awaited) >= self.threshold else awaited

    def open(self, reveals: Mapping[int, Tensors]) -> OpenSum:
        """Return the sum; raise SpoiledSumError if the shares of a client do not open its mask."""
        opened = {holder: as_bytes(reveal[SHARES]) for holder, reveal in self._sound(reveals).items()}
        seeds, lost = list[bytes](), dict[int, dict[int, bytes]]()
        false = {holder: set(read_clients(reveals[holder][FALSE])) for holder in opened}
        for place, (client, offer) in enumerate(self.offers.items()):
            secret = self._secret(client, place, opened, false)
            if client in self.survivors:
                if commitment(secret) != as_bytes(self.dealt[client][SEED])[0]:
                    raise self._cheated(client)
                seeds.append(secret)
                continue
            private = X25519PrivateKey.from_private_bytes(secret)
            if public_key(private) != offer.key:
                raise self._cheated(client)
            lost[client] = {
                other: pair_key(
                    private, bytes.fromhex(self.offers[other].key), mask_purpose(self.context, client, other)
                )
                for other in self.survivors
            }
        total = torch.stack([self.masked[client] for client in self.survivors]).sum(0)
        return OpenSum(unmask(total, seeds, lost), self.survivors)

    def _secret(
        self, client: int, place: int, opened: Mapping[int, list[bytes]], false: Mapping[int, set[int]]
    ) -> bytes:
        """Restore a client's seed or key from the shares that match its commitments."""
        committed = as_bytes(self.dealt[client][COMMITTED])
        of_key, good, complaints = client not in self.survivors, {}, 0
        for holder, shares in opened.items():
            if client in false[holder]:
                complaints += 1
                continue
            if commitment(shares[place]) == committed[2 * self.holders.index(holder) + of_key]:
                good[holder] = shares[place]
            else:
                self.cheats.add(holder)
        if len(good) < self.threshold:
            if complaints > len(good):  # most holders say that this client dealt them false shares
                raise self._cheated(client)
            raise SpoiledSumError(f"Too few true shares of client {client}'s mask are left.", sorted(self.cheats))
        secret = join_shares(good, self.threshold)
        if secret is None:
            raise self._cheated(client)
        return secret

    def _cheated(self, client: int) -> SpoiledSumError:
        return SpoiledSumError(f"The shares that client {client} dealt do not open its mask.", [client])

    def _sound(self, reveals: Mapping[int, Tensors]) -> dict[int, Tensors]:
        found = {}
        for client, reveal in sorted(reveals.items()):
            if not is_bytes(reveal.get(SHARES), len(self.offers), SHARE_BYTES):
                self._refuse(client, "malformed shares")
                continue
            try:
                read_clients(reveal.get(FALSE))
            except FedVLError:
                self._refuse(client, "malformed shares")
                continue
            found[client] = reveal
        if len(found) < self.threshold:
            raise SpoiledSumError(f"{len(found)} of {self.threshold} necessary clients opened their shares.")
        return found

    def _refuse(self, client: int, reason: str) -> None:
        self.refusals.append(refusal(client, reason))

    # --- what a server that was killed after the first reveal needs to open the same sum

    def kept(self) -> Tensors:
        clients = list(self.offers)
        return {
            ROSTER: as_tensor(self.roster),
            OFFERS: as_tensor(list(self.offers.values())),
            **{
                name: torch.stack([self.dealt[client][name] for client in clients])
                for name in (SEALED, COMMITTED, SEED)
            },
            SURVIVORS: torch.tensor(self.survivors),
            SIGNERS: torch.tensor(sorted(self.signatures)),
            SIGNATURES: rows([self.signatures[signer] for signer in sorted(self.signatures)], SIGNATURE_BYTES),
            CONTEXT: rows([bytes.fromhex(self.context)], HASH_BYTES),
        }

    @classmethod
    def restored(cls, run: str, step: SumId, share: float, kept: Tensors) -> "Collected":
        found = cls(run, step, read_items(kept[ROSTER], Entry), share)
        found.offers = {offer.client: offer for offer in read_items(kept[OFFERS], Offer)}
        found.dealt = {
            client: {name: kept[name][place] for name in (SEALED, COMMITTED, SEED)}
            for place, client in enumerate(found.offers)
        }
        found.survivors = read_clients(kept[SURVIVORS])
        found.signatures = dict(zip(read_clients(kept[SIGNERS]), as_bytes(kept[SIGNATURES]), strict=True))
        found.context = as_bytes(kept[CONTEXT])[0].hex()
        return found
