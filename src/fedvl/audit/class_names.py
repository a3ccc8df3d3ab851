"""Class names: what a client's classes are called, from text vectors that it sends.

It applies to tensors that are sent beside the shared ones and are as wide as a text embedding. The
attacker embeds a dictionary of names and looks for the few whose sum is nearest to what was sent.
Who knows the seed of a simulation also knows what clients draw when they join, and tries sets of
the federation's own classes until the vector that they would send is the one that was sent.
"""

from collections import Counter

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence
from fedvl.audit.finding import CLIENT, SERVER, Finding, Outcome, Unmeasured, of_100
from fedvl.audit.messages import Message
from fedvl.data.catalogue import catalogue
from fedvl.data.inputs import embed_names
from fedvl.evaluation.statistics import share_of
from fedvl.methods.base import Samples
from fedvl.seeding import torch_generator

NAMES = ("class-names", "class-names-by-seed")
NAMES_MEASURE = "share of a client's class names among the first guesses, as many as it has classes"
MAX_SWAPS = 40  # classes, up to which sets are also improved by exchanging two


def attack(evidence: Evidence) -> list[Outcome]:
    sent = text_tensors(evidence)
    if not sent:
        reason = (
            "No tensor that only one client makes is as wide as a text embedding, so that this attack does not apply. All "
            "participants know the list of classes; the label histogram tells which of them a client holds."
        )
        return [Unmeasured(name, SERVER, reason) for name in NAMES]
    first = {message.client: message for message in reversed(evidence.messages)}
    found: list[Outcome] = [by_dictionary(evidence, sent[0], first), by_seed(evidence, sent[0], first)]
    return [*found, Unmeasured(NAMES[0], CLIENT, "The server does not hand these vectors to other clients.")]


def text_tensors(evidence: Evidence) -> list[str]:
    """Return the names of sent tensors that are as wide as a text embedding."""
    width = evidence.method.task.text_embeddings.shape[1]
    return [name for name, shape in evidence.method.role.sent_shapes.items() if width and shape[-1] == width]


def dictionary(evidence: Evidence) -> list[str]:
    """Return candidate names: those of the dataset and of every dataset of the catalogue."""
    known = [name for entry in catalogue().values() for name in entry.class_names]
    return list(dict.fromkeys([*evidence.prepared.sources.dataset.class_names, *known]))


def by_dictionary(evidence: Evidence, tensor: str, messages: dict[int, Message]) -> Finding:
    names, sources = dictionary(evidence), evidence.prepared.sources
    templates = sources.dataset.templates[evidence.experiment.data.templates]
    texts = normalize(embed_names(names, templates, evidence.method.task.clip, sources.device), dim=-1).double().cpu()
    right, sizes = 0, []
    for client, message in messages.items():
        held = true_names(evidence, client)
        guessed = guess_names(message.update.tensors[tensor].double().cpu(), texts, len(held))
        right += len(held & {names[place] for place in guessed})
        sizes.append(len(held))
    value, interval = share_of(right, sum(sizes))
    chance = float(np.mean(sizes)) / len(names)
    sentence = (
        f"Of the names of a client's classes, {of_100(value)} of 100 are found among {len(names)} candidate names from "
        f"what it sends (chance level {100 * chance:.2g})."
    )
    counted = f"{len(messages)} clients and {sum(sizes)} names"
    return Finding(NAMES[0], SERVER, NAMES_MEASURE, value, interval, chance, sentence, "", (tensor,), counted)


def true_names(evidence: Evidence, client: int) -> set[str]:
    held = torch.unique(evidence.labels(evidence.rows(client))).tolist()
    return {evidence.method.task.class_names[c] for c in held if c >= 0}


def guess_names(sent: Tensor, texts: Tensor, count: int) -> list[int]:
    """Return the names nearest to the vectors, or those that add best to a single one."""
    if len(sent) > 1:
        nearest = Counter((normalize(sent, dim=-1) @ texts.T).argmax(1).tolist())
        return [place for place, _ in nearest.most_common(count)]
    wanted, chosen = sent[0], list[int]()
    rest = wanted
    for _ in range(count):
        likeness = texts @ rest
        likeness[chosen] = -torch.inf
        chosen.append(int(likeness.argmax()))
        weights = torch.linalg.lstsq(texts[chosen].T, wanted[:, None]).solution[:, 0]
        rest = wanted - texts[chosen].T @ weights
    return chosen


def by_seed(evidence: Evidence, tensor: str, messages: dict[int, Message]) -> Outcome:
    """Decode what was sent with the seed, by the method's own functions."""
    right = total = 0
    for client, message in messages.items():
        held = true_names(evidence, client)
        decoded = nearest_classes(evidence, tensor, message)
        if decoded is None:
            reason = (
                f"'{tensor}' is made of images, not of labels and the seed alone, so that this attack does not apply."
            )
            return Unmeasured(NAMES[1], SERVER, reason)
        guessed = {evidence.method.task.class_names[c] for c in decoded}
        right += len(held & guessed)
        total += max(len(held | guessed), 1)
    value, interval = share_of(right, total)
    classes = evidence.classes
    chance = float(np.mean([len(true_names(evidence, client)) for client in messages])) / classes
    sentence = (
        f"An attacker who also knows the seed of the simulation knows what clients drew when they joined, and finds which of "
        f"the federation's {classes} classes a client has: {of_100(value)} % agreement (all of them: {of_100(chance)} %). "
        f"Between machines, each client draws from a secret of its own."
    )
    measured = "agreement of the guessed and the true set of classes"
    counted = f"{len(messages)} clients"
    return Finding(NAMES[1], SERVER, measured, value, interval, chance, sentence, "", (tensor,), counted)


def nearest_classes(evidence: Evidence, tensor: str, message: Message) -> list[int] | None:
    """Return the classes whose vector, with what the seed gives, is nearest to what was sent.

    None if the vector cannot be made of classes and the seed alone.
    """
    method, seed = evidence.method, evidence.experiment.seed
    sent = message.update.tensors[tensor].double()
    device = sent.device

    def distance(classes: frozenset[int]) -> float:
        if not classes:
            return float("inf")
        samples = Samples({}, torch.tensor(sorted(classes), device=device))
        private = method.first_private(samples, torch_generator(seed, "join", message.client))
        tensors = {**message.update.tensors, **private}
        made = method.role.sent[tensor].make(tensor, tensors, message.before, samples).double()
        return float((made - sent).norm()) if made.shape == sent.shape else float("inf")

    everything = range(evidence.classes)
    try:
        distance(frozenset(everything))
    except (KeyError, IndexError, RuntimeError):  # it reads inputs of images, which are not there
        return None
    best: frozenset[int] = frozenset()
    if len(sent) > 1:  # one vector for each class: their number is known
        best = frozenset(range(len(sent)))
    nearest = distance(best)
    while True:
        moves = {best ^ {c} for c in everything} | {frozenset([c]) for c in everything if not best}
        if len(everything) <= MAX_SWAPS:
            moves |= {best - {old} | {new} for old in best for new in everything if new not in best}
        better = min(moves, key=distance)
        if not distance(better) < nearest:
            return sorted(best)
        best, nearest = better, distance(better)
