"""Membership: whether a given labelled image was among the images that a client trained on.

The update is a sum of the gradients of its images. The attacker takes the candidate's gradient and
looks for it in the update: by its cosine, or after removing what images have in common (a matched
filter in the covariance of its own images' gradients). It chooses between the two by clients that
it imitates, for which it knows the answer. A user who queries has the scores alone, and compares
the candidate's loss with the pretrained model's. Candidates from outside have the classes of the
client's images, so that the class alone gives nothing away.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence, Seen, begun_alike, by_client
from fedvl.audit.finding import (
    CLIENT,
    SERVER,
    USER,
    Finding,
    Numbers,
    Outcome,
    Unmeasured,
    auc,
    bootstrap,
    hits_at,
    of_100,
)
from fedvl.audit.imitation import Coordinates, draw_rows, gradients, imitate, moved_names
from fedvl.audit.label_histogram import not_seen
from fedvl.errors import FedVLError
from fedvl.methods.base import Samples
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

NAMES = ("membership", "membership-at-1-percent")
MEASURES = (
    "AUC: how often an image that was trained on looks likelier than one that was not",
    "share of the training images found, at 1 % false alarms (TPR at 1 % FPR)",
)
FALSE_ALARMS = 0.01
RIDGE = 0.1  # of the covariance, as a share of its mean eigenvalue
MOST_MEMBERS, FEW_MEMBERS = 100, 10  # images of one client that are tried
OFTEN = 0.65  # AUC from which on membership counts as told often
TRIALS = 5  # imitated clients by which a score is chosen

Measure = Callable[[Numbers, Numbers, Numbers], float]
Score = Callable[[Tensor, Tensor], Tensor]  # of candidates' gradients and a change: one number each


class Reference(NamedTuple):
    """The attacker's own images: what gradients have in common, and their usual scores."""

    gradients: Tensor
    labels: Tensor
    classes: int

    def class_means(self) -> Tensor:
        return torch.stack([self.gradients[self._of(c)].mean(0) for c in range(self.classes)])

    def usual(self, scores: Tensor, candidates: Tensor, labels: Tensor) -> Tensor:
        """Return candidates' scores as deviations from what images of their class score."""
        means = torch.stack([scores[self._of(c)].mean() for c in range(self.classes)])
        spreads = torch.stack([scores[self._of(c)].std().nan_to_num() for c in range(self.classes)])
        return (candidates - means[labels]) / spreads[labels].clamp(min=float(spreads.max()) * 1e-3 + 1e-12)

    def _of(self, number: int) -> Tensor:
        """Return the images of a class; all of them where there are too few to have a spread."""
        chosen = self.labels == number
        return chosen if chosen.sum() > 1 else torch.ones_like(chosen)


def by_cosine(reference: Reference) -> Score:
    return lambda candidates, change: normalize(candidates, dim=1) @ -change


def by_matched_filter(reference: Reference) -> Score:
    """Return the scores of a filter that ignores what images of a class have in common."""
    means = reference.class_means()
    common, _ = torch.linalg.qr(means.double().T)
    rest: Tensor = (reference.gradients - means[reference.labels]).double() / len(reference.labels) ** 0.5
    gram = rest @ rest.T
    ridge = RIDGE * float(gram.trace()) / len(gram) + 1e-30
    solver: Tensor = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=gram.dtype))

    def score(candidates: Tensor, change: Tensor) -> Tensor:
        left = -change.double()
        left = left - common @ (common.T @ left)
        pattern: Tensor = (left - rest.T @ (solver @ (rest @ left))) / ridge
        return candidates @ pattern.to(candidates.dtype)

    return score


class Scored(NamedTuple):
    """Scores of one client's images and of those outside, weighted to have the same classes."""

    inside: Numbers
    outside: Numbers
    weights: Numbers


def attack(evidence: Evidence) -> list[Outcome]:
    found: list[Outcome] = []
    for view, seen in ((SERVER, evidence.seen_by_server()), (CLIENT, evidence.seen_by_client())):
        names = moved_names(evidence, seen[0].change, trained=True) if seen else []
        if not names:
            found += [Unmeasured(name, view, not_seen(view)) for name in NAMES]
            continue
        found += judged(evidence, view, score_updates(evidence, seen, names))
    scored = score_queries(evidence)
    if isinstance(scored, str):
        return [*found, *(Unmeasured(name, USER, scored) for name in NAMES)]
    return [*found, *judged(evidence, USER, scored)]


def members(evidence: Evidence, client: int) -> Samples:
    """Return the images of a client that are tried."""
    rows = evidence.rows(client)
    limit = FEW_MEMBERS if evidence.slow else MOST_MEMBERS
    chosen = draw_rows(rows, min(limit, len(rows)), torch_generator(0, "members", client))
    return with_labels(evidence, evidence.training.samples.take(chosen), chosen)


def with_labels(evidence: Evidence, samples: Samples, rows: Tensor) -> Samples:
    """Give training rows the labels that the attacker knows its candidates by."""
    true = evidence.labels(rows)
    return Samples(samples.inputs, torch.where(true >= 0, true, samples.labels.clamp(min=0)))


def score_updates(evidence: Evidence, seen: list[Seen], names: list[str]) -> list[Scored]:
    """Score candidates against what was seen of each client, summed over the rounds."""
    labels_outside = evidence.outside.labels.cpu()
    inside: dict[int, Tensor] = {}
    outside: dict[int, Tensor] = {}
    tried = {client: members(evidence, client) for client, _ in by_client(seen)}
    for index, before, changes in begun_alike(evidence, seen):
        coordinates = Coordinates(names, before)

        def of(samples: Samples) -> Tensor:
            return gradients(evidence, samples, before, index, coordinates)  # noqa: B023

        cut = len(evidence.own) * 3 // 4  # the last quarter is for trials
        own = of(evidence.own)
        reference = Reference(own[:cut], evidence.own.labels[:cut].cpu(), evidence.classes)
        score = choose(evidence, reference, own, cut, before, index, coordinates)
        beyond = of(evidence.outside)
        for each in changes:
            change, candidates = coordinates.of(each.change), tried[each.client]
            usual = score(reference.gradients, change)
            own_scores = reference.usual(usual, score(of(candidates), change), candidates.labels.cpu())
            others = reference.usual(usual, score(beyond, change), labels_outside)
            inside[each.client] = inside.get(each.client, 0) + own_scores
            outside[each.client] = outside.get(each.client, 0) + others
    return [matched(inside[client], tried[client].labels.cpu(), outside[client], labels_outside) for client in inside]


def choose(
    evidence: Evidence,
    reference: Reference,
    own: Tensor,
    cut: int,
    before: Tensors,
    round_index: int,
    coordinates: Coordinates,
) -> Score:
    """Return the score that finds the members of imitated clients best."""
    rest = torch.arange(cut, len(own))
    size = max(1, min(evidence.typical_size, len(rest) // 2))
    generator = torch_generator(0, "trials")
    rows = [draw_rows(rest, size, generator) for _ in range(TRIALS)]
    changes = [coordinates.of(c) for c in imitate(evidence, evidence.own, rows, before, round_index)]
    labels = evidence.own.labels.cpu()

    def success(score: Score) -> float:
        found = []
        for chosen, change in zip(rows, changes, strict=True):
            usual = score(reference.gradients, change)
            scores = reference.usual(usual, score(own[rest], change), labels[rest])
            taken = torch.isin(rest, chosen)
            found.append(matched(scores[taken], labels[rest][taken], scores[~taken], labels[rest][~taken]))
        return float(np.mean([auc(*each) for each in found]))

    return max((by_matched_filter(reference), by_cosine(reference)), key=success)


def matched(inside: Tensor, labels: Tensor, outside: Tensor, labels_outside: Tensor) -> Scored:
    """Weight the images outside so that their classes are those of the images inside."""
    size = int(max(labels.max(), labels_outside.max())) + 1
    held, free = torch.bincount(labels, minlength=size).double(), torch.bincount(labels_outside, minlength=size)
    weights = (held / free.clamp(min=1))[labels_outside]
    if not weights.sum() > 0:  # no image outside has one of these classes
        weights = torch.ones_like(weights)
    return Scored(inside.double().numpy(), outside.double().numpy(), weights.numpy())


def score_queries(evidence: Evidence) -> list[Scored] | str:
    """Score candidates by the loss of the final model, against the pretrained one where it can."""
    if not evidence.rounds:
        return "Nothing was trained."
    method = evidence.method
    tensors = method.tailor(*evidence.answering)

    def likelihood(samples: Samples) -> Tensor:
        parts = torch.split(torch.arange(len(samples)), 64)
        with torch.no_grad():
            scores = torch.cat([method.predict(tensors, samples.take(part).inputs) for part in parts])
        gain = torch.log_softmax(scores.float(), dim=-1)
        if "features" in samples.inputs:
            texts = method.task.clip.logit_scale * samples.inputs["features"] @ method.task.text_features.T
            gain = gain - torch.log_softmax(texts, dim=-1)
        return gain.gather(-1, samples.labels[:, None])[:, 0].cpu()

    try:
        usual = likelihood(evidence.own)
    except FedVLError as error:
        return str(error)
    reference = Reference(usual[:, None], evidence.own.labels.cpu(), evidence.classes)
    beyond = reference.usual(usual, likelihood(evidence.outside), evidence.outside.labels.cpu())
    found = []
    for client in evidence.clients:
        candidates = members(evidence, client)
        scores = reference.usual(usual, likelihood(candidates), candidates.labels.cpu())
        found.append(matched(scores, candidates.labels.cpu(), beyond, evidence.outside.labels.cpu()))
    return found


def judged(evidence: Evidence, view: str, scored: list[Scored]) -> list[Finding]:
    """Return AUC and TPR over all clients; images are resampled for the interval."""

    def measure(how: Measure, generator: np.random.Generator | None) -> float:
        drawn = np.arange(len(evidence.outside))
        inside = [each.inside for each in scored]
        if generator is not None:
            drawn = generator.choice(drawn, len(drawn))
            inside = [generator.choice(scores, len(scores)) for scores in inside]
        outside = [each.outside[drawn] for each in scored]
        weights = [each.weights[drawn] for each in scored]
        return how(np.concatenate(inside), np.concatenate(outside), np.concatenate(weights))

    found = []
    for name, text, how, guess in zip(NAMES, MEASURES, (auc, found_at_one_percent), (0.5, FALSE_ALARMS), strict=True):
        value = measure(how, None)
        interval = bootstrap(partial(measure, how))
        found.append(
            Finding(name, view, text, value, interval, guess, sentence_of(evidence, view, name, value, interval, guess))
        )
    return found


def found_at_one_percent(inside: Numbers, outside: Numbers, weights: Numbers) -> float:
    return hits_at(inside, outside, weights, FALSE_ALARMS)


def sentence_of(
    evidence: Evidence, view: str, name: str, value: float, interval: tuple[float, float], guess: float
) -> str:
    who = {
        SERVER: f"Who has an image and {evidence.what_server_sees}",
        CLIENT: "A client that has an image and the mean of the others' updates",
        USER: "A user who has an image and queries the model",
    }[view]
    if interval[0] <= guess:
        return f"{who} cannot tell by this attack whether the image was trained on: {value:.2f}, guessing {guess:g}."
    if name == NAMES[0]:
        often = "often" if value > OFTEN else "sometimes"
        return (
            f"{who} can {often} tell whether it was trained on: of one image that was and one of the same class that was "
            f"not, the right one is picked in {of_100(value)} of 100 cases (guessing: 50)."
        )
    return (
        f"{who} can name {of_100(value)} of 100 images that were trained on, while naming 1 of 100 that were not "
        f"(guessing: 1)."
    )
