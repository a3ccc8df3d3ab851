"""Clients of secure aggregation without a network: their members, and an honest server's steps."""

from collections.abc import Collection, Mapping
from functools import partial

import torch

from fedvl.deployment.secure_sum import ROSTER, Credentials, Entry, SumId, SumMember, read_items
from fedvl.deployment.sum_server import Collected, OpenSum
from fedvl.errors import FedVLError
from fedvl.tensors import Tensors

RUN = "a" * 32
STEP = SumId("b" * 64, "train", 0, 1)
MODEL = {"weight": torch.arange(6.0)}


def vouched(entry: Entry, content: bytes) -> None:
    """In place of a party's signature: what it signed, as text."""
    if entry.signature != content.hex()[:200]:
        raise FedVLError("It is not signed by its party.")


def credentials() -> Credentials:
    return Credentials(lambda content: content.hex()[:200], vouched)


def members_in(folder, clients: int, least: int = 3) -> list[SumMember]:
    for client in range(clients):
        (folder / str(client)).mkdir()
    return [SumMember(RUN, client, folder / str(client), credentials(), least) for client in range(clients)]


def entries_of(members: Collection[SumMember]) -> list[Entry]:
    return [entry for member in members for entry in read_items(member.entry()[ROSTER], Entry)]


class Sum:
    """One attempt at a sum, step by step, so that a test can lie in between."""

    def __init__(self, members: Collection[SumMember], numbers: torch.Tensor, step: SumId = STEP) -> None:
        self.members, self.numbers, self.step = {member.client: member for member in members}, numbers, step
        self.collected = Collected(RUN, step, entries_of(members), 2 / 3)

    def share(self, lost: Collection[int] = ()) -> dict[int, Tensors]:
        request = self.collected.share_request()[ROSTER]
        offers = {c: member.offer(self.step, request, "") for c, member in self.members.items() if c not in lost}
        self.collected.take_offers(offers)
        return offers

    def mask(self, lost: Collection[int] = (), models: Mapping[int, Tensors] | None = None) -> dict[int, Tensors]:
        request = self.collected.work_request(MODEL)
        answers = {
            client: self.members[client].mask(
                self.step, {**request, **(models or {}).get(client, {})}, partial(self.numbers.__getitem__, client)
            )
            for client in self.collected.offers
            if client not in lost
        }
        self.collected.take_masked(answers, self.numbers.shape[1])
        return answers

    def confirm(self, lost: Collection[int] = ()) -> None:
        request = self.collected.confirm_request()
        survivors = [client for client in self.collected.survivors if client not in lost]
        self.collected.take_signatures({c: self.members[c].confirm(self.step, request) for c in survivors})

    def reveal(self, lost: Collection[int] = ()) -> dict[int, Tensors]:
        requests = self.collected.reveal_requests()
        return {c: self.members[c].reveal(self.step, asked) for c, asked in requests.items() if c not in lost}

    def run(
        self,
        lost_share: Collection[int] = (),
        lost_train: Collection[int] = (),
        lost_confirm: Collection[int] = (),
        lost_reveal: Collection[int] = (),
    ) -> OpenSum:
        self.share(lost_share)
        self.mask(lost_train)
        self.confirm(lost_confirm)
        return self.collected.open(self.reveal(lost_reveal))
