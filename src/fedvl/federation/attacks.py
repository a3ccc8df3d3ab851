"""Hostile clients in a simulation, to see what a rule is worth: ``--attack scaled:0.2``.

A share of the clients is hostile. They train like the others (on flipped labels, if that is the
attack) and then change what they send, knowing each other's updates but not those of the honest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine, Trained
from fedvl.seeding import numpy_generator
from fedvl.tensors import Tensors

FACTOR = 10.0  # of "scaled"
AGAINST = 0.5  # of the hostile mean, backwards: "ipm"


class Attack(NamedTuple):
    kind: str
    share: float

    @classmethod
    def parse(cls, text: str) -> "Attack":
        """Read KIND:SHARE, such as scaled:0.2."""
        kind, _, share = text.partition(":")
        try:
            found = cls(kind, float(share))
        except ValueError:
            found = cls(kind, math.nan)
        if kind not in KINDS or not 0 < found.share < 1:
            raise FedVLError(
                f"An attack is KIND:SHARE, such as scaled:0.2, not '{text}'; kinds are {', '.join(KINDS)}."
            )
        return found

    def clients(self, clients: int, seed: int) -> frozenset[int]:
        """Return the hostile clients."""
        chosen = numpy_generator(seed, "attack").choice(clients, int(self.share * clients), replace=False)
        return frozenset(int(client) for client in chosen)


def sign_flip(moves: Tensor, cohort: int) -> Tensor:
    return -moves


def scaled(moves: Tensor, cohort: int) -> Tensor:
    """Go far backwards."""
    return -FACTOR * moves


def alie(moves: Tensor, cohort: int) -> Tensor:
    """Move all hostile clients as far from their mean as goes unnoticed (Baruch et al., 2019)."""
    hostile = len(moves)
    needed = cohort // 2 + 1 - hostile
    honest = max(cohort - hostile, 1)
    far = NormalDist().inv_cdf(min(max((honest - needed) / honest, 0.5), 0.999))
    return (moves.mean(0) - far * moves.std(0, correction=0)).expand_as(moves)


def ipm(moves: Tensor, cohort: int) -> Tensor:
    """Send the mean backwards, against the true one (inner product, Xie et al., 2020)."""
    return (-AGAINST * moves.mean(0)).expand_as(moves)


def unchanged(moves: Tensor, cohort: int) -> Tensor:
    return moves


KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sign-flip": sign_flip,
    "label-flip": unchanged,
    "scaled": scaled,
    "alie": alie,
    "ipm": ipm,
}


def flipped(labels: Tensor, rows: Tensor, classes: int) -> Tensor:
    """Return labels that are reversed in these rows; unlabelled ones stay so."""
    changed = labels.clone()
    changed[rows] = torch.where(labels[rows] < 0, labels[rows], classes - 1 - labels[rows])
    return changed


class AttackedEngine(LocalEngine):
    """Clients in one process of which some are hostile."""

    attack: Attack
    hostile: frozenset[int]

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> list[Trained]:
        return attacked(self.attack, self.hostile, shared, super().train(round_index, cohort, shared, own))


def attacked(attack: Attack, hostile: frozenset[int], shared: Tensors, trained: Sequence[Trained]) -> list[Trained]:
    """Return what is sent when these clients are hostile."""
    liars = [result for result in trained if result.update.client in hostile]
    if not liars:
        return list(trained)
    lies: dict[int, Tensors] = {result.update.client: dict(result.update.tensors) for result in liars}
    for name, tensor in shared.items():
        if tensor.is_floating_point():
            moves = torch.stack([result.update.tensors[name] - tensor for result in liars]).flatten(1)
            sent = KINDS[attack.kind](moves, len(trained)).reshape(-1, *tensor.shape)
            for result, move in zip(liars, sent, strict=True):
                lies[result.update.client][name] = tensor + move
    return [
        result._replace(update=result.update._replace(tensors=lies.get(result.update.client, result.update.tensors)))
        for result in trained
    ]
