"""Missing modality: how many of a client's samples lack their text or their image.

The attacker imitates a client of complete samples, one without texts and one without images, and
finds the mixture of these changes that is nearest to the client's. Two clients of each kind show
which tensors tell kinds apart and which only differ from client to client; the former count more.
Tensors that are counted and not trained (Fed-PRIME's uses) are taken alone.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.audit.candidates import began_of
from fedvl.audit.evidence import Evidence
from fedvl.audit.finding import CLIENT, SERVER, Finding, Outcome, Unmeasured
from fedvl.audit.imitation import Coordinates, Mixture, draw_rows, imitate
from fedvl.audit.messages import Seen
from fedvl.data.missing import without_modalities
from fedvl.evaluation.statistics import Numbers, correlation, of_correlation, share_of
from fedvl.methods.base import Samples
from fedvl.methods.roles import Roles
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

NAMES = ("missing-modality", "missing-modality-kind")
DROPPED_BY_KIND = {"complete": None, "without text": "text:1", "without image": "image:1"}
MAX_IMITATED = 32  # samples of an imitated client
TWINS = 2  # imitated clients of each kind
ROUNDING_SHARE = 1e-6  # share of a change that is rounding
PLANTED = 3  # clients of each kind that are told apart


def attack(evidence: Evidence) -> list[Outcome]:
    if "present" not in evidence.training.samples.inputs:
        sentence = "Samples are single images, so that no modality can be missing."
        return [Unmeasured(name, SERVER, sentence) for name in NAMES]
    if not evidence.rounds[0].before:
        return [
            Unmeasured(name, SERVER, "No shared tensor leaves, so that this attack does not apply.") for name in NAMES
        ]
    kinds = imitate_kinds(evidence)
    found: list[Outcome] = [tell_kinds(evidence, kinds[0])]
    found.append(kind_shares(evidence, SERVER, evidence.seen_by_server(), kinds))
    return [*found, Unmeasured(NAMES[0], CLIENT, "It was tried from the server's view only, which sees each update.")]


class Kinds(NamedTuple):
    """How imitated clients of each kind change the tensors, which count by what they tell."""

    coordinates: Coordinates
    scale: Tensor
    directions: Tensor
    role: Roles

    def shares(self, change: Tensors) -> Numbers:
        return Mixture(self.directions).of(self.scale * self.coordinates.of(telling(change, self.role)))


def imitate_kinds(evidence: Evidence) -> list[Kinds]:
    """Return how clients of each kind change the tensors, by round."""
    own, began = evidence.complete[0], began_of(evidence, None)
    size, generator = min(evidence.typical_size, MAX_IMITATED), torch_generator(0, "imitated kinds")
    rows = [draw_rows(torch.arange(len(own)), size, generator) for _ in range(TWINS)]
    seen = [list(imitate(evidence, left_out(evidence, own, kind), rows, began)) for kind in DROPPED_BY_KIND]
    return [kinds_in([[twin[index] for twin in twins] for twins in seen], evidence.method.role) for index, _ in began]


def kinds_in(seen: list[list[Seen]], role: Roles) -> Kinds:
    """Weigh the tensors of one round by what they tell of kinds."""
    changes = [[telling(each.change, role) for each in twins] for twins in seen]
    names = list(changes[0][0])
    coordinates = Coordinates(names, changes[0][0])
    factors = {name: told_by_tensor([torch.stack([c[name] for c in twins]) for twins in changes]) for name in names}
    if not any(factors.values()):
        factors = dict.fromkeys(factors, 1.0)
    scale = coordinates.of({name: torch.full_like(tensor, factors[name]) for name, tensor in changes[0][0].items()})
    means = [torch.stack([coordinates.of(change) for change in twins]).mean(0) for twins in changes]
    return Kinds(coordinates, scale, scale * torch.stack(means), role)


def telling(change: Tensors, role: Roles) -> Tensors:
    """Return what is counted, not trained, if there is any; else all, and the size of each change.

    Counts follow from the kinds directly. Where a kind has a tensor of its own, its size tells.
    """
    counted = {name: tensor for name, tensor in change.items() if not role.shared(name).trained}
    return counted or change | {f"size of {name}": tensor.norm()[None] for name, tensor in change.items()}


def told_by_tensor(changes: list[Tensor]) -> float:
    """Return a tensor's factor: how far kinds are apart, against clients of one kind, by size."""
    means = torch.stack([twins.mean(0) for twins in changes])
    within = float(sum(((twins - twins.mean(0)).norm() ** 2 for twins in changes), torch.zeros(())))
    within /= len(changes) * (TWINS - 1)  # of single clients, so that chance puts means apart by a share of it
    between = float((means - means.mean(0)).norm() ** 2) / (len(changes) - 1) - within / TWINS
    size = float(means.norm())
    return (max(between, 0.0) / (within + ROUNDING_SHARE * size**2)) ** 0.5 / size if size > 0 else 0.0


def left_out(evidence: Evidence, samples: Samples, kind: str) -> Samples:
    encoder = evidence.method.task.fused
    return Samples(without_modalities(samples.inputs, DROPPED_BY_KIND[kind], "audit", encoder, 0), samples.labels)


def kind_shares(evidence: Evidence, view: str, seen: list[Seen], kinds: list[Kinds]) -> Finding:
    """Correlate the estimated and the true shares without text and without image over clients."""
    clients = sorted({each.client for each in seen})
    estimates = np.array(
        [
            np.mean([kinds[each.round_index].shares(each.change) for each in seen if each.client == client], axis=0)[1:]
            for client in clients
        ]
    )
    truths = np.array([true_shares(evidence, client) for client in clients])

    count = len(clients)
    left, right = estimates - estimates.mean(0), truths - truths.mean(0)
    value = correlation(left.ravel(), right.ravel())
    where = evidence.what_server_sees if view == SERVER else "the mean of the others' updates"
    sentence = (
        f"How many of a client's samples lack their text or their image, estimated from {where}, correlates with the truth "
        f"by {value:z.2f} over {count} clients (chance level 0)."
    )
    measured = "correlation of the estimated and the true shares without text and without image"
    items = tuple(sorted(kinds[0].coordinates.places.keys() & seen[0].items.keys()))
    interval = of_correlation(value, count)
    return Finding(NAMES[0], view, measured, value, interval, 0.0, sentence, "r", items, f"{count} clients")


def true_shares(evidence: Evidence, client: int) -> Numbers:
    """Return the shares of a client's samples without text and without image."""
    present = evidence.training.samples.inputs["present"][evidence.rows(client)]
    shares: Numbers = 1 - present.double().mean(0).cpu().numpy()
    return shares


def tell_kinds(evidence: Evidence, kinds: Kinds) -> Finding:
    """Plant clients that lack one modality altogether, or none, and tell them apart."""
    outside = evidence.complete[1]
    generator = torch_generator(0, "planted kinds")
    size = min(evidence.typical_size, MAX_IMITATED, len(outside))
    hits = 0
    for number, kind in enumerate(DROPPED_BY_KIND):
        rows = [draw_rows(torch.arange(len(outside)), size, generator) for _ in range(PLANTED)]
        began = began_of(evidence, None)[:1]
        for (seen,) in imitate(evidence, left_out(evidence, outside, kind), rows, began, noise="run"):
            hits += int(kinds.shares(seen.change).argmax()) == number
    planted = PLANTED * len(DROPPED_BY_KIND)
    sentence = (
        f"Of imitated clients that lack all texts, all images or nothing, the server tells {hits} of {planted} right from "
        f"one update (chance level {planted // len(DROPPED_BY_KIND)})."
    )
    measured = "share of planted clients whose missing modality is told right"
    value, interval = share_of(hits, planted)
    items = tuple(kinds.coordinates.places.keys() & evidence.rounds[0].before.keys())
    counted = f"{planted} imitated clients"
    return Finding(NAMES[1], SERVER, measured, value, interval, 1 / len(DROPPED_BY_KIND), sentence, "", items, counted)
