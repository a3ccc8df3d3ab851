"""Membership: whether a given labelled image was among the images that a client trained on.

An update is a sum of the gradients of its images. The attacker looks for a candidate's gradient in
the update by several scores (``scores.py``), which it weighs on clients that it imitates. A user
who queries has the predictions alone, and compares the candidate's loss with the pretrained
model's. Candidates from outside are weighted to have the classes of the client's images.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvl.audit.candidates import Candidates, candidates_of
from fedvl.audit.evidence import Evidence
from fedvl.audit.finding import CLIENT, SERVER, USER, Finding, Outcome, Unmeasured, of_100
from fedvl.audit.membership_scores import Scored, deviations, matched_weights, score_candidates
from fedvl.audit.messages import Seen, seen_in
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import Numbers, auc, bootstrap, hits_at, proportion
from fedvl.methods.base import Samples

NAMES = ("membership", "membership-at-1-percent")
MEMBERSHIP_MEASURES = (
    "AUC: how often an image that was trained on scores above one that was not",
    "share of the training images found, at 1 % false alarms (TPR at 1 % FPR)",
)
FALSE_ALARMS = 0.01
CHANCES = (0.5, FALSE_ALARMS)
FROM_TEST = "test images, since no training images are unused"
RIVALS = 40  # images of other clients, below which images that nobody has are taken as outsiders

Measure = Callable[[Numbers, Numbers, Numbers], float]


class ScoredImages(NamedTuple):
    """Scores of images against what was seen of clients (clients x images)."""

    scores: Numbers
    inside: NDArray[np.bool_]
    weights: Numbers  # of images outside, to have the classes of those inside; 0: not compared
    outsiders: str  # where images outside are from


def attack(evidence: Evidence) -> list[Outcome]:
    found: list[Outcome] = []
    for view, seen in ((SERVER, evidence.seen_by_server()), (CLIENT, evidence.seen_by_client())):
        names = trained_names(evidence, seen[0]) if seen else []
        if not names:
            found += [Unmeasured(name, view, why_no_updates(view)) for name in NAMES]
        else:
            found += judge_view(evidence, NAMES, view, seen, names)
    return [*found, *attack_queries(evidence)]


def trained_names(evidence: Evidence, seen: Seen) -> list[str]:
    """Return the items that gradients move."""
    return [name for name in seen.change if evidence.method.role.shared(name).trained]


def why_no_updates(view: str) -> str:
    if view == SERVER:
        return "No tensor of an update is trained by gradients, so that this attack does not apply."
    return "Another client does not see how the mean of all updates changes the shared tensors."


def judge_view(
    evidence: Evidence, names: tuple[str, str], view: str, seen: Sequence[Seen], items: Sequence[str] | None
) -> list[Outcome]:
    """Score candidates in these items, or in all, and measure how well members are found."""
    of_sum = evidence.summed or view == CLIENT
    scored = score_candidates(evidence, seen, items, of_sum)
    examined = sorted(set[str]().union(*(each.items for each in scored)))
    sent = [each.items[name] for each in seen for name in examined if name in each.items]
    if not any(each.scores.any() for each in scored) or not any(bool(tensor.any()) for tensor in sent):
        sentence = "What leaves here does not tell one image from another, so that this attack gives no value."
        return [Unmeasured(name, view, sentence) for name in names]
    tried = compared(evidence, scored, of_sum)
    control = None
    if of_sum and tried.outsiders == FROM_TEST:
        without = score_candidates(evidence, [sum_without_client(evidence, each) for each in seen], items, of_sum)
        control = compared(evidence, without, of_sum)
    return membership_finding(evidence, names, view, tried, examined, control)


def sum_without_client(evidence: Evidence, seen: Seen) -> Seen:
    """Return a sum, or a mean, as it would be without the client that it is attacked for."""
    happened = evidence.rounds[seen.round_index]
    message = next(m for m in evidence.messages if (m.client, m.round_index) == (seen.client, seen.round_index))
    own, weight = seen_in(message), message.update.weight
    rest = max(happened.weight - weight, 1e-12)
    change = {
        name: tensor + weight / rest * (tensor - own.change[name]) if name in own.change else tensor
        for name, tensor in seen.change.items()
    }
    beside = {name: tensor - own.beside[name] if name in own.beside else tensor for name, tensor in seen.beside.items()}
    return seen._replace(change=change, beside=beside)


def compared(evidence: Evidence, scored: Sequence[Scored], of_sum: bool) -> ScoredImages:
    """Compare each client's images with images of other clients, or with images that nobody has."""
    candidates = candidates_of(evidence)
    held, outside = len(candidates.rows), len(candidates.labels[candidates.outside])
    everything = torch.cat(
        [torch.arange(len(candidates.labels))[part] for part in (candidates.held, candidates.outside)]
    )
    members = torch.stack([torch.isin(candidates.rows, evidence.rows(each.client).cpu()) for each in scored])
    inside = torch.cat([members, torch.zeros(len(scored), outside, dtype=torch.bool)], dim=1)
    unused = evidence.outside_split == "train"
    rivals = not of_sum and int((~members).sum(1).min()) >= RIVALS
    free = torch.cat([torch.full((held,), rivals), torch.full((outside,), unused or not rivals)])
    labels = candidates.labels[everything]
    weights = torch.stack([weights_outside(labels, own, ~own & free) for own in inside])
    kinds = ["training images of other clients"] if rivals else []
    kinds += ["training images that no client has"] if unused else [] if rivals else [FROM_TEST]
    scores = torch.stack([each.scores[everything] for each in scored])
    return ScoredImages(scores.numpy(), inside.numpy(), weights.numpy(), " and ".join(kinds))


def weights_outside(labels: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Weight images outside so that their classes are those of the images inside."""
    weights = torch.zeros(len(labels), dtype=torch.float64)
    some = inside | outside
    weights[some] = matched_weights(labels[some], inside[some])
    weights[inside] = 0
    return weights if bool(weights.any()) else outside.double()  # no image outside has one of these classes


def membership_finding(
    evidence: Evidence,
    names: tuple[str, str],
    view: str,
    tried: ScoredImages,
    items: Sequence[str] = (),
    control: ScoredImages | None = None,
) -> list[Outcome]:
    """Return AUC and TPR over all clients; images are resampled for the interval.

    In the control nobody's image is in the message. What is found there is the difference between
    training and test images; it is the chance level if it is above the usual one.
    """
    images, members = tried.scores.shape[1], int(tried.inside.sum())
    needed, there = round(1 / FALSE_ALARMS), int((tried.weights > 0).sum())
    counted = f"{len(tried.scores)} client{'s' * (len(tried.scores) > 1)} and {members} of their images"

    def measure(how: Measure, least: float, generator: np.random.Generator | None) -> tuple[float, float]:
        drawn = np.arange(images)
        if generator is not None:
            drawn = generator.choice(drawn, images)
        value = resampled_measure(tried, how, drawn)
        return value, least if control is None else max(least, resampled_measure(control, how, drawn))

    found: list[Outcome] = []
    for name, text, how, least in zip(names, MEMBERSHIP_MEASURES, (auc, found_at_one_percent), CHANCES, strict=True):
        if how is not auc and there < needed:
            reason = f"One false alarm of {needed} takes {needed} images outside; there are {there}."
            found.append(Unmeasured(name, view, reason))
            continue
        value, chance = measure(how, least, None)
        gain = partial(measure, how, least)
        low, high = bootstrap(lambda generator, gain=gain: np.subtract(*gain(generator)))  # type: ignore[misc]
        interval = max(chance + low, 0.0), min(chance + high, 1.0)
        if low == high:  # all resamples agree, as where members and others are wholly apart
            interval = proportion(round(value * members), members)
        sentence = sentence_of(evidence, view, how is auc, value, chance, tried.outsiders)
        found.append(Finding(name, view, text, value, interval, chance, sentence, "", tuple(items), counted))
    return found


def resampled_measure(tried: ScoredImages, how: Measure, drawn: NDArray[np.int64]) -> float:
    """Return a measure over all clients, of the images that were drawn."""
    scores, inside, weights = tried.scores[:, drawn], tried.inside[:, drawn], tried.weights[:, drawn]
    outside = weights > 0
    return how(scores[inside], scores[outside], weights[outside])


def found_at_one_percent(inside: Numbers, outside: Numbers, weights: Numbers) -> float:
    return hits_at(inside, outside, weights, FALSE_ALARMS)


def sentence_of(evidence: Evidence, view: str, as_auc: bool, value: float, chance: float, outsiders: str) -> str:
    who = {
        SERVER: f"An attacker with an image and {evidence.what_server_sees}",
        CLIENT: "A client with an image and the mean of the others' updates",
        USER: "A user with an image who queries the model",
    }[view]
    if as_auc:
        return (
            f"{who} picks the one that was trained on, of two images of the same class, in {of_100(value)} of 100 cases "
            f"(chance level {of_100(chance)}; the other one: {outsiders})."
        )
    return (
        f"{who} identifies {of_100(value)} of 100 images that were trained on, with 1 of 100 false alarms (chance level "
        f"{of_100(chance)}; false alarms: {outsiders})."
    )


# --- queries


def attack_queries(evidence: Evidence) -> list[Outcome]:
    """Score candidates by the loss of the final model, against the pretrained one where it can."""
    tried = score_queries(evidence)
    if isinstance(tried, str):
        return [Unmeasured(name, USER, tried) for name in NAMES]
    return membership_finding(evidence, NAMES, USER, tried)


def score_queries(evidence: Evidence) -> ScoredImages | str:
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

    candidates: Candidates = candidates_of(evidence)
    try:
        gains = likelihood(candidates.samples).double()
    except FedVLError as error:
        return str(error)
    free = torch.zeros(len(gains), dtype=torch.bool)
    free[candidates.trial] = free[candidates.known] = True
    scores = deviations(gains, candidates.labels, free)
    return compared(evidence, [Scored(client, scores, frozenset()) for client in evidence.clients], of_sum=True)
