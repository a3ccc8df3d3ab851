"""A party's own figures: attacks on the update that it would send first, before anything leaves.

The attacker is the server. Its images are the party's own test images, or a third of its training
images where it has no test: then the update is of the rest. Both have the party's own classes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvl.audit import class_names, feature_recovery, label_histogram, membership
from fedvl.audit.evidence import (
    ENCODED,
    FEW_OUTSIDE,
    FEW_OWN,
    MOST_OUTSIDE,
    MOST_OWN,
    Evidence,
    Message,
    Round,
)
from fedvl.audit.finding import SERVER, Finding, Numbers, Outcome, Unmeasured, correlation
from fedvl.audit.imitation import moved_names
from fedvl.audit.perform import budget, remedies
from fedvl.data.stores import Dataset
from fedvl.experiment import local_engine
from fedvl.methods.base import Samples
from fedvl.preparation import Encoded, Prepared, Sources
from fedvl.seeding import numpy_generator, torch_generator
from fedvl.uncertainty import proportion

MOST_SECONDS = 120.0  # after which no further attack is begun
LEAST = 30  # labelled images, without which an attacker cannot be played
ORDERS = 1000  # of the classes, by which chance is measured
HELD_OUT = 3  # one image of so many is the attacker's, where there is no test


def audit_own(
    prepared: Prepared, client: int, first: Message | None, secret: int, seconds: float = MOST_SECONDS
) -> dict[str, Any]:
    """Return what a server could learn of a party from its first message, as measured figures.

    An update of fewer images, if one is needed, is drawn from ``secret``, as between machines.
    """
    began = time.monotonic()
    held_out, evidence, found = False, None, list[Outcome]()
    shared_out = share_out(prepared, client)
    if isinstance(shared_out, str):
        found = [Unmeasured(name, SERVER, shared_out) for name in ATTACKS]
    else:
        held_out, evidence = shared_out
        sent = train_on_rest(evidence, prepared, client, secret) if held_out else first
        if sent is not None:
            evidence.messages.append(sent)
            evidence.rounds.append(Round(sent.before, sent.before, sent.update.weight, tailored=False))
        for name, attack in ATTACKS.items():
            if not evidence.messages:
                found.append(Unmeasured(name, SERVER, "The party sends no update in the first round."))
            elif time.monotonic() - began >= seconds:
                found.append(Unmeasured(name, SERVER, f"Not tried: {seconds:g} seconds were over."))
            else:
                found += [each for each in attack(evidence) if each.view == SERVER]
    return {
        "findings": [each.as_json() for each in found if isinstance(each, Finding)],
        "unmeasured": [each.as_json() for each in found if isinstance(each, Unmeasured)],
        "images": len(evidence.rows(client)) if evidence else 0,
        "attackers_images": len(evidence.own) if evidence else 0,
        "held_out": held_out,
        "remedies": remedies(prepared.experiment),
        "budget": budget(prepared.experiment),
        "seconds": time.monotonic() - began,
    }


def share_out(prepared: Prepared, client: int) -> tuple[bool, Evidence] | str:
    """Share labelled images among attacker, outside and party; say why if there are too few."""
    training, test = prepared.training, prepared.test.samples
    slow = not ENCODED.issuperset(training.samples.inputs)
    rows = training.rows[client]
    held_out = int((test.labels >= 0).sum()) < LEAST or prepared.experiment.evaluation.protocol in (
        "open",
        "leave-one-domain-out",
    )
    if held_out:
        labelled = rows[training.true_labels[rows] >= 0]
        mine = Samples(training.samples.inputs, training.true_labels)
        pool = shuffled(labelled)[: len(labelled) // HELD_OUT]
        rows = rows[~torch.isin(rows, pool)]
    else:
        labelled = torch.nonzero(test.labels >= 0)[:, 0]
        mine, pool = with_candidates(test, training.samples), shuffled(labelled)
    if len(labelled) < LEAST or not len(rows):
        return (
            f"To play the attacker takes {LEAST} labelled images of this party's own, for testing or training; "
            f"there are {len(labelled)}."
        )
    limits = (FEW_OWN, FEW_OUTSIDE) if slow else (MOST_OWN, MOST_OUTSIDE)
    share = min(1.0, len(pool) / sum(limits))
    cut = int(share * limits[0])
    own, outside = (mine.take(part) for part in (pool[:cut], pool[cut : int(share * sum(limits))]))
    everyone = [rows if number == client else each[:0] for number, each in enumerate(training.rows)]
    nothing = Encoded({}, {})
    return held_out, Evidence(
        experiment=prepared.experiment,
        method=prepared.method,
        sources=sources_of(prepared),
        encoded=nothing,
        training=replace(training, rows=everyone),
        slow=slow,
        own=own,
        outside=outside,
        complete=(own, outside),
        own_rows=pool[:cut],
        outside_rows=pool[cut:],
    )


def shuffled(rows: Tensor) -> Tensor:
    order = numpy_generator(0, "audit").permutation(len(rows))
    return rows[torch.from_numpy(order).to(rows.device)]


def with_candidates(test: Samples, training: Samples) -> Samples:
    """Return test samples with the inputs of training; their one label is their candidate."""
    inputs = {name: test.inputs[name] for name in training.inputs if name in test.inputs}
    if "candidates" in training.inputs:
        classes = training.inputs["candidates"].shape[1]
        one_hot = torch.nn.functional.one_hot(test.labels.clamp(min=0), classes)
        inputs["candidates"] = one_hot.to(training.inputs["candidates"])
    return Samples(inputs, test.labels)


def sources_of(prepared: Prepared) -> Sources:
    """Return what attacks ask of the sources: names, templates, the encoder."""
    method = prepared.method
    templates: dict[str, tuple[str, ...]] = {prepared.experiment.data.templates: tuple(prepared.templates)}
    dataset = Dataset(prepared.experiment.data.dataset, tuple(prepared.class_names), templates, {}, ())
    inputs = list(prepared.training.samples.inputs)
    return Sources(dataset, method.task.encoder, type(method), method.options, inputs, str(prepared.device))


def train_on_rest(evidence: Evidence, prepared: Prepared, client: int, secret: int) -> Message | None:
    """Return what the party would send in its first round without the images of the attacker."""
    engine = local_engine(replace(prepared, training=evidence.training))
    engine.private_seed = secret
    shared = prepared.method.start(torch_generator(prepared.experiment.seed, "start"))
    consultation, report = prepared.method.consultation(), {}
    if consultation and consultation.due(0):
        reports, _ = engine.reports(0, shared)
        if reports:
            report = reports[0].tensors
            engine.adopt({client: consultation.settle(0, report, None if consultation.summed else report)})
    handed = prepared.method.hand_out(shared, {}, client)
    trained = engine.train(0, [client], handed)
    return Message(client, 0, handed, trained[0].update, trained[0].loss, report) if trained else None


# --- attacks of which one client gives a figure of its own


def histogram(evidence: Evidence) -> list[Outcome]:
    """Correlate the estimated with the true shares of the classes that the attacker knows."""
    name, seen = label_histogram.NAME, evidence.seen_by_server()
    (client,) = evidence.clients
    known = torch.unique(evidence.own.labels).cpu().numpy()
    truth = evidence.histogram(client)[known]
    estimates: dict[str, Numbers] = {}
    if (counts := reported(evidence)) is not None:
        estimates[label_histogram.NAMES[1]] = counts
    if any(each.change for each in seen):
        estimates[name] = label_histogram.estimate(evidence, seen)[client]
    if not estimates:
        return [Unmeasured(name, SERVER, label_histogram.not_seen(SERVER))]
    if not np.ptp(truth):
        return [
            Unmeasured(name, SERVER, "This party has as many images of each class, so that there is nothing to tell.")
        ]
    found: list[Outcome] = []
    for which, estimated in estimates.items():
        value = correlation(estimated[known], truth)
        interval = beside_chance(estimated[known], truth, value)
        told = "can be told" if interval[0] > 0 else "cannot be told"
        where = "the counts that it reports" if which != name else "its update"
        sentence = (
            f"How this party's images are distributed over {len(known)} classes {told} from {where}: the estimate "
            f"correlates with the truth by {value:.2f} (1 is exact, guessing 0)."
        )
        found.append(Finding(which, SERVER, label_histogram.MEASURE, value, interval, 0.0, sentence))
    return found


def reported(evidence: Evidence) -> Numbers | None:
    """Return a number for each class of a report, if it has them."""
    for tensor in evidence.messages[0].report.values():
        if tensor.shape == (evidence.classes,):
            return tensor.double().cpu().numpy()
    return None


def beside_chance(estimated: Numbers, truth: Numbers, value: float) -> tuple[float, float]:
    """Return an interval around a correlation that is as wide as what chance gives.

    Chance is the same estimate with its classes in a random order: a few large shares often meet.
    """
    generator = numpy_generator(0, "order of classes")
    orders = generator.permuted(np.tile(estimated - estimated.mean(), (ORDERS, 1)), axis=1)
    sizes = float(np.linalg.norm(orders[0]) * np.linalg.norm(truth - truth.mean()))
    width = float(np.quantile(orders @ (truth - truth.mean()), 0.975)) / max(sizes, 1e-12)
    return max(value - width, -1.0), min(value + width, 1.0)


def called(evidence: Evidence) -> list[Outcome]:
    """Guess what the party's classes are called."""
    sent = class_names.text_tensors(evidence)
    if not sent:
        return class_names.attack(evidence)  # which says why not
    (message,) = evidence.messages
    found = class_names.by_dictionary(evidence, sent[0], {message.client: message})
    held = len(class_names.true_names(evidence, message.client))
    return [replace(found, interval=proportion(round(found.value * held), held))]


def member(evidence: Evidence) -> list[Outcome]:
    """Look for single images of the party in its update."""
    seen = evidence.seen_by_server()
    names = moved_names(evidence, seen[0].change, trained=True)
    if not names:
        return [Unmeasured(membership.NAMES[0], SERVER, label_histogram.not_seen(SERVER))]
    found, at_few_alarms = membership.judged(evidence, SERVER, membership.score_updates(evidence, seen, names))
    needed, there = round(1 / membership.FALSE_ALARMS), len(evidence.outside)
    if there >= needed:
        return [found, at_few_alarms]
    reason = f"One false alarm of {needed} takes {needed} images that nobody trained on; there are {there}."
    return [found, Unmeasured(at_few_alarms.name, SERVER, reason)]


def recovered(evidence: Evidence) -> list[Outcome]:
    """Read the party's encoded images off its update."""
    if reason := feature_recovery.not_applicable(evidence):
        return [Unmeasured(feature_recovery.NAMES[0], SERVER, reason)]
    (seen,) = evidence.seen_by_server()
    truth = feature_recovery.features_of(evidence, evidence.rows(seen.client))
    rows = feature_recovery.layers_of(evidence, seen.before, seen.change, len(truth))
    found = feature_recovery.separate(rows, len(truth), feature_recovery.own_features(evidence))
    return list(feature_recovery.judged(evidence, feature_recovery.NAMES[:2], [truth], [found], "From this update"))


ATTACKS: dict[str, Callable[[Evidence], list[Outcome]]] = {
    label_histogram.NAME: histogram,
    class_names.NAMES[0]: called,
    membership.NAMES[0]: member,
    feature_recovery.NAMES[0]: recovered,
}
