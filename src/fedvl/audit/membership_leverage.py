"""Membership by leverage: the attack that knows the closed form of a training-free method.

An image x with label y adds x x^T to G and x y^T to H. The attacker, who has G and H of a client or
of all clients, computes the leverage x^T (G + a)^-1 x, what the solution W = (G + a)^-1 H
answers to x at its label, and how far x x^T and x y^T lie along G and H, for several a. Where G is
not released it takes the covariance of its own images. Each half of the attacked images is scored
by what does best on the other half.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedvl.audit.candidates import candidates_of
from fedvl.audit.evidence import Evidence
from fedvl.audit.finding import CLIENT, SERVER, USER, Outcome, Unmeasured
from fedvl.audit.membership import (
    FROM_TEST,
    ScoredImages,
    compared,
    membership_finding,
    resampled_measure,
    sum_without_client,
)
from fedvl.audit.membership_scores import Scored, deviations
from fedvl.audit.messages import Seen
from fedvl.evaluation.statistics import auc
from fedvl.methods.base import Samples
from fedvl.methods.parts.moments import unpacked
from fedvl.tensors import Tensors

NAMES = ("membership-leverage", "membership-leverage-at-1-percent")
LEVERAGE_RIDGES = (1e-6, 1e-2, 1.0, 10.0, 100.0)  # values of a


def attack(evidence: Evidence) -> list[Outcome]:
    seen = evidence.seen_by_server()
    if not seen or not {"cross"} <= seen[0].items.keys() or "cross" not in evidence.method.role.statistics:
        sentence = "No sums of features by class leave, so that this attack does not apply."
        return [Unmeasured(NAMES[0], view, sentence) for view in (SERVER, CLIENT, USER)]
    rows, labels = factors_of_images(evidence, evidence.rounds[-1].before, candidates_of(evidence).samples)
    choices = list(tries(evidence, seen, rows, labels))
    tried = crossed(choices, choices)
    control = None
    if evidence.summed and tried.outsiders == FROM_TEST:
        without = [sum_without_client(evidence, each) for each in seen]
        control = crossed(choices, list(tries(evidence, without, rows, labels)))
    found = membership_finding(evidence, NAMES, SERVER, tried, sorted(evidence.method.role.statistics), control)
    sentence = "Others see the solution alone, which the attack 'membership' queries."
    return [*found, *(Unmeasured(NAMES[0], view, sentence) for view in (CLIENT, USER))]


def crossed(choices: list[ScoredImages], scored: list[ScoredImages]) -> ScoredImages:
    """Score the images of each half by the score that does best on the other half."""
    images = np.arange(choices[0].scores.shape[1])
    halves = [images[0::2], images[1::2]]
    scores = scored[0].scores.copy()
    for half, other in (halves, halves[::-1]):
        best = int(np.argmax([np.nan_to_num(resampled_measure(each, auc, other)) for each in choices]))
        scores[:, half] = scored[best].scores[:, half]
    return scored[0]._replace(scores=scores)


def factors_of_images(evidence: Evidence, shared: Tensors, samples: Samples) -> tuple[Tensor, Tensor]:
    """Return x and y of each image, of the x y^T that it adds by itself."""
    rows, labels = [], []
    for place in range(len(samples)):
        cross = evidence.method.statistics(shared, samples.take(torch.tensor([place])))["cross"].cpu()
        rows.append(cross.sum(1))
        labels.append(cross.T @ cross.sum(1))
    return torch.stack(rows), torch.stack(labels)


def tries(evidence: Evidence, seen: Sequence[Seen], rows: Tensor, labels: Tensor) -> Iterator[ScoredImages]:
    """Yield the comparison of members with others by each score, in the last exchange."""
    candidates = candidates_of(evidence)
    count = candidates.held.stop
    free = torch.zeros(count, dtype=torch.bool)
    free[candidates.trial] = True
    own, of_clients = rows[candidates.trial], {each.client: each.items for each in seen}
    by_client = {client: scores_of(sums, rows[:count], labels[:count], own) for client, sums in of_clients.items()}
    for name in next(iter(by_client.values())):
        scored = [
            Scored(client, deviations(scores[name], candidates.labels[:count], free), frozenset())
            for client, scores in by_client.items()
        ]
        yield compared(evidence, scored, evidence.summed)


def scores_of(sums: Tensors, rows: Tensor, labels: Tensor, own: Tensor) -> dict[str, Tensor]:
    """Return each score of all images against the sums of a client, or of all."""
    cross = sums["cross"].double().cpu()
    if "gram" in sums:
        gram = unpacked(sums["gram"].double().cpu(), len(cross))
    else:
        count = float(cross.sum(1) @ own.mean(0) / own.mean(0).square().sum())  # as many as have the mean of its own
        gram = own.T @ own / len(own) * max(count, 1.0)
    values, vectors = torch.linalg.eigh(gram)
    turned, moved = rows @ vectors, vectors.T @ cross
    found = {"along H": ((rows @ cross) * labels).sum(1), "along G": (rows @ gram * rows).sum(1)}
    for a in LEVERAGE_RIDGES:
        over = 1 / (values.clamp(min=0) + a)
        leverage = (turned.square() * over).sum(1)
        answer = ((turned * over) @ moved * labels).sum(1)
        found |= {f"leverage {a}": -leverage, f"answer {a}": answer, f"both {a}": answer - leverage}
    return found
