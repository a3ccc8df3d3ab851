"""Class names: what a client's classes are called, from text vectors that it sends.

It applies to tensors that are sent beside the shared ones and are as wide as a text embedding. The
attacker embeds a dictionary of names and looks for the few whose sum is nearest to what was sent.
Who knows the seed of a simulation also knows what clients draw when they join, and tries sets of
the federation's own classes until the vector that they would send is the one that was sent.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.audit.evidence import Evidence, Message
from fedvl.audit.finding import CLIENT, SERVER, Finding, Outcome, Unmeasured, mean_of, of_100
from fedvl.data.catalogue import catalogue
from fedvl.data.inputs import embed_names
from fedvl.methods.base import Samples
from fedvl.seeding import torch_generator

NAMES = ("class-names", "class-names-by-seed")
MEASURE = "share of a client's class names among the first guesses, as many as it has classes"
MOST_SWAPS = 40  # classes, up to which sets are also improved by exchanging two


def attack(evidence: Evidence) -> list[Outcome]:
    sent = text_tensors(evidence)
    if not sent:
        reason = (
            "No tensor that only one client makes lies in the space of texts. All parties know the list of classes; "
            "which of them a client holds is what the label histogram tells."
        )
        return [Unmeasured(NAMES[0], SERVER, reason)]
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
    return list(dict.fromkeys([*evidence.sources.dataset.class_names, *known]))


def by_dictionary(evidence: Evidence, tensor: str, messages: dict[int, Message]) -> Finding:
    names, sources = dictionary(evidence), evidence.sources
    templates = sources.dataset.templates[evidence.experiment.data.templates]
    texts = normalize(embed_names(names, templates, evidence.method.task.clip, sources.device), dim=-1).double().cpu()
    right, sizes = [], []
    for client, message in messages.items():
        held = true_names(evidence, client)
        guessed = guess_names(message.update.tensors[tensor].double().cpu(), texts, len(held))
        right.append(len(held & {names[place] for place in guessed}) / len(held))
        sizes.append(len(held))
    value, interval = mean_of(np.array(right))
    guess = float(np.mean(sizes)) / len(names)
    sentence = (
        f"Of the names of a client's classes, {of_100(value)} of 100 are found among {len(names)} candidate names from "
        f"what it sends (by chance {100 * guess:.2g})."
    )
    return Finding(NAMES[0], SERVER, MEASURE, value, interval, guess, sentence)


def true_names(evidence: Evidence, client: int) -> set[str]:
    held = torch.unique(evidence.labels(evidence.rows(client))).tolist()
    return {evidence.method.task.class_names[c] for c in held if c >= 0}


def guess_names(sent: Tensor, texts: Tensor, count: int) -> list[int]:
    """Return the names nearest to the vectors or, of one vector, those that add to it best."""
    if len(sent) > 1:
        return (normalize(sent, dim=-1) @ texts.T).argmax(1).tolist()
    wanted, chosen = sent[0], list[int]()
    rest = wanted
    for _ in range(count):
        likeness = texts @ rest
        likeness[chosen] = -torch.inf
        chosen.append(int(likeness.argmax()))
        weights = torch.linalg.lstsq(texts[chosen].T, wanted[:, None]).solution[:, 0]
        rest = wanted - texts[chosen].T @ weights
    return chosen


def by_seed(evidence: Evidence, tensor: str, messages: dict[int, Message]) -> Finding:
    """Decode what was sent with the seed, by the method's own functions."""
    right = []
    for client, message in messages.items():
        held = true_names(evidence, client)
        guessed = {evidence.method.task.class_names[c] for c in decode(evidence, tensor, message)}
        right.append(len(held & guessed) / max(len(held | guessed), 1))
    value, interval = mean_of(np.array(right))
    classes = evidence.classes
    guess = float(np.mean([len(true_names(evidence, client)) for client in messages])) / classes
    sentence = (
        f"Who also knows the seed of the simulation knows what clients drew when they joined, and finds which of the "
        f"federation's {classes} classes a client has: {of_100(value)} % agreement (all of them: {of_100(guess)} %). "
        f"Between machines clients must not draw from a seed that the server has."
    )
    return Finding(
        NAMES[1], SERVER, "agreement of the guessed and the true set of classes", value, interval, guess, sentence
    )


def decode(evidence: Evidence, tensor: str, message: Message) -> list[int]:
    """Return the classes whose vector, with what the seed gives, is nearest to what was sent."""
    method, seed = evidence.method, evidence.experiment.seed
    sent = message.update.tensors[tensor].double()
    device = sent.device

    def distance(classes: frozenset[int]) -> float:
        if not classes:
            return float("inf")
        samples = Samples({}, torch.tensor(sorted(classes), device=device))
        private = method.first_private(samples, torch_generator(seed, "join", message.client))
        made = method.role.sent[tensor].make({**message.update.tensors, **private}, samples).double()
        return float((made - sent).norm()) if made.shape == sent.shape else float("inf")

    everything = range(evidence.classes)
    best: frozenset[int] = frozenset()
    if len(sent) > 1:  # one vector for each class: their number is known
        best = frozenset(range(len(sent)))
    nearest = distance(best)
    while True:
        moves = {best ^ {c} for c in everything} | {frozenset([c]) for c in everything if not best}
        if len(everything) <= MOST_SWAPS:
            moves |= {best - {old} | {new} for old in best for new in everything if new not in best}
        better = min(moves, key=distance)
        if not distance(better) < nearest:
            return sorted(best)
        best, nearest = better, distance(better)
