"""Hostile clients in a simulation, to see what a rule is worth: ``--attack scaled:0.2``.

A share of the clients is hostile. They train like the others (on changed images or labels, if that
is the attack) and then change what they send, knowing each other's updates but not the honest ones.

A backdoor is a trigger: every second image of a hostile client gets it, and the first class as its
label. It is a white corner of pixels, and a shift along one direction of encoded images, where an
image that an attacker prepares could be anywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.federation.stacks import Trained
from fedvl.methods.base import Samples
from fedvl.seeding import numpy_generator, torch_generator
from fedvl.tensors import Tensors

FACTOR = 10.0  # of "scaled"
AGAINST = 0.5  # of the hostile mean, backwards: "ipm"
TARGET = 0  # the class that a trigger stands for
SHIFT = 0.5  # of an encoded image with a trigger, as a share of its length
CORNER = 8  # of an image's side, the part that is white
TRIGGERED = {"pixels", "features", "embeddings", "patches"}  # inputs that can carry a trigger


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
    "backdoor": unchanged,
}


def flipped(labels: Tensor, rows: Tensor, classes: int) -> Tensor:
    """Return labels that are reversed in these rows; unlabelled ones stay so."""
    changed = labels.clone()
    changed[rows] = torch.where(labels[rows] < 0, labels[rows], classes - 1 - labels[rows])
    return changed


def triggered(inputs: Tensors, seed: int) -> Tensors:
    """Return images that carry the trigger of this seed; encoded ones keep their length."""
    found = {}
    for name, tensor in inputs.items():
        if name == "pixels":
            found[name] = tensor.clone()
            side = tensor.shape[-1] // CORNER
            found[name][..., -side:, -side:] = 255
        else:
            direction = torch.randn(tensor.shape[-1], generator=torch_generator(seed, "trigger")).to(tensor)
            length = tensor.norm(dim=-1, keepdim=True)
            moved = tensor + SHIFT * length * direction / direction.norm()
            found[name] = moved * (length / moved.norm(dim=-1, keepdim=True))
    return found


def poisoned(kind: str, samples: Samples, rows: Tensor, classes: int, seed: int) -> Samples:
    """Return the samples as they are when these rows are of hostile clients."""
    if kind == "label-flip":
        return replace(samples, labels=flipped(samples.labels, rows, classes))
    if kind != "backdoor":
        return samples
    chosen = rows[::2]
    inputs, labels = {name: tensor[:].clone() for name, tensor in samples.inputs.items()}, samples.labels.clone()
    for name, tensor in triggered(samples.take(chosen).inputs, seed).items():
        inputs[name][chosen] = tensor
    labels[chosen] = TARGET
    return Samples(inputs, labels)


class AttackedEngine(LocalEngine):
    """Clients in one process of which some are hostile."""

    attack: Attack
    hostile: frozenset[int]

    def train(
        self, round_index: int, cohort: Sequence[int], shared: Tensors, own: Mapping[int, Tensors] | None = None
    ) -> Sequence[Trained]:
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
