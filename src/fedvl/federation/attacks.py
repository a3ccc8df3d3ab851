"""Hostile clients in a simulation, to see what a rule is worth: ``--attack scaled:0.2``.

A share of the clients is hostile. They train like the others (on changed images or labels, if that
is the attack) and then change what they send, knowing each other's updates but not the honest ones.
Only the adaptive attack knows the honest updates, the limits of the checks and the merging rule.

A backdoor is a trigger: every second image of a hostile client gets it, and the first class as its
label. It is a white corner of pixels, and a shift along one direction of encoded images, where an
image that an attacker prepares could be anywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.config import FederationConfig
from fedvl.errors import FedVLError
from fedvl.federation.checks import length, longest_moves, trained_of
from fedvl.federation.local import LocalEngine
from fedvl.federation.merging import moved_by, moves_of
from fedvl.federation.robust import RULES, SMALLEST, mean, merged_move
from fedvl.federation.stacks import Trained, Updates
from fedvl.methods.base import Samples
from fedvl.methods.roles import Roles
from fedvl.seeding import numpy_generator, torch_generator
from fedvl.tensors import Tensors

FACTOR = 10.0  # of "scaled"
AGAINST = 0.5  # of the hostile mean, backwards: "ipm"
TARGET = 0  # the class that a trigger stands for
SHIFT = 0.5  # of an encoded image with a trigger, as a share of its length
BELOW = 0.99  # of the longest move that the checks let through: "adaptive"
SHORTEST, LENGTHS = 0.5, 16  # lengths that it tries, from this share of the honest mean's on
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
        if kind not in ATTACK_KINDS or not 0 < found.share < 1:
            raise FedVLError(
                f"An attack is KIND:SHARE, such as scaled:0.2, not '{text}'; kinds are {', '.join(ATTACK_KINDS)}."
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


ATTACK_KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sign-flip": sign_flip,
    "label-flip": unchanged,
    "scaled": scaled,
    "alie": alie,
    "ipm": ipm,
    "backdoor": unchanged,
    "overstated": sign_flip,
    "adaptive": unchanged,
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
        trained = super().train(round_index, cohort, shared, own)
        liars = [place for place, result in enumerate(trained) if result.update.client in self.hostile]
        if not liars:
            return trained
        if self.attack.kind == "adaptive":
            return adaptive(liars, shared, trained, self.method.role, self.federation)
        changed = attacked(self.attack, liars, shared, trained)
        return overstated(liars, changed, self._alike, self.federation) if self.attack.kind == "overstated" else changed


def attacked(attack: Attack, liars: Sequence[int], shared: Tensors, trained: Sequence[Trained]) -> list[Trained]:
    """Return what is sent when the clients at these places are hostile."""
    lies = {place: dict(trained[place].update.tensors) for place in liars}
    for name, tensor in shared.items():
        if tensor.is_floating_point():
            moves = torch.stack([trained[place].update.tensors[name] - tensor for place in liars]).flatten(1)
            sent = ATTACK_KINDS[attack.kind](moves, len(trained)).reshape(-1, *tensor.shape)
            for place, move in zip(liars, sent, strict=True):
                lies[place][name] = tensor + move
    return replaced(trained, lies)


def replaced(trained: Sequence[Trained], lies: Mapping[int, Tensors]) -> list[Trained]:
    """Return results with other tensors at some places."""
    return [
        result._replace(update=result.update._replace(tensors={**result.update.tensors, **lies.get(place, {})}))
        for place, result in enumerate(trained)
    ]


def overstated(
    liars: Sequence[int], trained: Sequence[Trained], alike: bool, limits: FederationConfig
) -> list[Trained]:
    """Declare as many examples as the checks let through, and the weight that goes with them."""
    examples = int(limits.max_examples)
    return [
        result._replace(update=result.update._replace(weight=1.0 if alike else float(examples)), examples=examples)
        if place in liars
        else result
        for place, result in enumerate(trained)
    ]


def adaptive(
    liars: Sequence[int], shared: Tensors, trained: Sequence[Trained], role: Roles, limits: FederationConfig
) -> list[Trained]:
    """Send the honest mean reversed, at the length that does most harm and passes the checks."""
    honest = [place for place in range(len(trained)) if place not in liars]
    begun, updates = trained_of(shared, role), Updates.of([result.update for result in trained])
    if not (honest and begun):
        return list(trained)
    moves, rule = moves_of(shared, updates, list(begun)), RULES.get(limits.robust, mean)
    weights = moves.new_tensor(updates.weights)
    truth = mean(moves[honest], weights[honest])
    reach = longest_lies(liars, moves, [result.examples for result in trained], length(begun), limits)
    longest = reach.to(moves) / truth.norm().clamp(min=SMALLEST)

    def sent(factor: float) -> Tensor:
        lies = moves.clone()
        lies[liars] = -truth * longest.clamp(max=factor)[:, None]
        return lies

    most = float(longest.max())
    tried = torch.logspace(math.log10(min(SHORTEST, most)), math.log10(most), LENGTHS).tolist()
    # the scalar product with the honest mean says how far the model moves as the honest would
    worst = min(tried, key=lambda factor: float(merged_move(rule, sent(factor), weights) @ truth))
    lies = sent(worst)
    return replaced(trained, {place: moved_by(shared, lies[place], list(begun)) for place in liars})


def longest_lies(
    liars: Sequence[int], moves: Tensor, examples: Sequence[int], size: float, limits: FederationConfig
) -> Tensor:
    """Return how far each hostile client can move without being refused."""
    lengths, most = moves.norm(dim=1).cpu(), torch.full((len(liars),), limits.max_update_norm, dtype=torch.float64)
    if not limits.secure_sum:  # where no single update is seen
        lengths[list(liars)] = math.inf
        declared = np.array(examples, dtype=np.float64)
        _, allowed = longest_moves(lengths.numpy(), declared, size, limits.max_norm_ratio, before=0.0)
        most = most.minimum(torch.from_numpy(allowed)[list(liars)])
    return BELOW * most
