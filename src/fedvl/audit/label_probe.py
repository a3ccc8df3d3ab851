"""Label probe: whether a client has many images of a class, from any single item that it sends.

On imitated clients the attacker fits a linear probe from each item of a message, down to single
numbers, to the share of each class. It takes the item and the class that it tells best on other
imitated clients, and tells the audited clients apart by them.
"""

from typing import NamedTuple

import numpy as np
import torch

from fedvl.audit.candidates import Shadow, shadows_of
from fedvl.audit.evidence import Evidence, class_shares
from fedvl.audit.finding import SERVER, Finding, Outcome, Unmeasured
from fedvl.audit.imitation import Coordinates
from fedvl.audit.label_histogram import Probe
from fedvl.audit.messages import LOW_BITS, Seen
from fedvl.evaluation.statistics import Numbers, correlation, of_correlation

NAMES = ("label-probe",)
LEAST_CLIENTS = 4  # of which a correlation has an interval


class Told(NamedTuple):
    """What tells a class best: the item, the round, the class and the probe."""

    success: float
    name: str
    round_index: int
    label: int
    coordinates: Coordinates
    probe: Probe

    def share(self, seen: Seen) -> float:
        return float(self.probe.shares(self.coordinates.of(seen.items))[self.label])


def attack(evidence: Evidence) -> list[Outcome]:
    if reason := not_applicable(evidence):
        return [Unmeasured(NAMES[0], SERVER, reason)]
    told, examined = best_probe(evidence)
    if told is None:
        sentence = "Nothing that leaves depends on the images of imitated clients, so that this attack does not apply."
        return [Unmeasured(NAMES[0], SERVER, sentence)]
    seen = [each for each in evidence.seen_by_server() if each.round_index == told.round_index]
    truths = np.array([evidence.histogram(each.client)[told.label] for each in seen])
    if len(seen) < LEAST_CLIENTS or not np.ptp(truths):
        sentence = f"It takes {LEAST_CLIENTS} audited clients of which some have more images of a class than others."
        return [Unmeasured(NAMES[0], SERVER, sentence)]
    value = correlation(np.array([told.share(each) for each in seen]), truths)
    name = evidence.method.task.class_names[told.label]
    sentence = (
        f"Over {len(seen)} clients, the share of images of class '{name}' that is estimated from '{told.name}' alone correlates "
        f"with the true one by {value:z.2f} (1 is exact, chance level 0)."
    )
    measure = "correlation over clients of the estimated and the true share of one class"
    counted = f"{len(seen)} clients"
    interval = of_correlation(value, len(seen))
    return [Finding(NAMES[0], SERVER, measure, value, interval, 0.0, sentence, "r", tuple(sorted(examined)), counted)]


def not_applicable(evidence: Evidence) -> str | None:
    if evidence.summed:
        return "The server sees one sum of all clients, by which clients cannot be told apart."
    if evidence.slow or evidence.method.through_encoder:
        return "It takes many imitated clients, which is too slow where an encoder runs in each step."
    if not any(evidence.histogram(client).any() for client in evidence.clients):
        return "The training images have no true labels, so an estimate of them cannot be measured."
    return None


def best_probe(evidence: Evidence) -> tuple[Told | None, set[str]]:
    """Return what tells a class best on imitated clients, and all items that were tried."""
    known, trials = shadows_of(evidence, None, "known"), shadows_of(evidence, None)
    labels = evidence.own.labels.cpu()
    truths, wanted = (
        np.stack([class_shares(labels[shadow.rows], evidence.classes) for shadow in part]) for part in (known, trials)
    )
    best: Told | None = None
    examined = set[str]()
    seen = {each.round_index: each for each in evidence.seen_by_server()}
    for index, each in seen.items():
        for name in each.items:
            if name.startswith(LOW_BITS) or not fixed(name, index, each, [*known, *trials]):
                continue
            coordinates = Coordinates([name], each.items)
            tables = [
                torch.stack([coordinates.of(shadow.seen[index].items) for shadow in part]).double()
                for part in (known, trials)
            ]
            if not any((table - table[0]).any() for table in tables):
                continue
            examined.add(name)
            probe = Probe.fit(tables[0], truths)
            guesses: Numbers = np.stack([probe.shares(row) for row in tables[1]])
            for label in range(evidence.classes):
                success = correlation(guesses[:, label], wanted[:, label])
                if best is None or success > best.success:
                    best = Told(success, name, index, label, coordinates, probe)
    return best, examined


def fixed(name: str, index: int, seen: Seen, shadows: list[Shadow]) -> bool:
    """Whether an item has one shape in all messages."""
    shape = seen.items[name].shape
    return all(name in shadow.seen[index].items and shadow.seen[index].items[name].shape == shape for shadow in shadows)
