"""A client's own values: attacks on its first message, before anything leaves.

The attacker is the server. Its images are the client's own test images, or a third of its training
images where it has no test: then the update is of the rest. Both have the client's own classes.
Under secure aggregation the update alone is attacked as the worst case, and a sum with imitated
others.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedvl.audit import (
    class_names,
    feature_recovery,
    label_histogram,
    membership,
    membership_leverage,
    membership_replay,
)
from fedvl.audit.candidates import Shadow, sum_of
from fedvl.audit.evidence import (
    ENCODED,
    FEW_OUTSIDE,
    FEW_OWN,
    MAX_OUTSIDE,
    MAX_OWN,
    Evidence,
    shuffled,
)
from fedvl.audit.finding import SERVER, Finding, Outcome, OwnAudit, Unmeasured
from fedvl.audit.imitation import draw_rows, imitate
from fedvl.audit.messages import NUMBERS, REPORTED, Message, Round, seen_in
from fedvl.audit.words import budget, remedies
from fedvl.evaluation.statistics import Numbers, correlation
from fedvl.federation.fixed_point import SumOfUpdates
from fedvl.methods.base import Samples, Update
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import Prepared
from fedvl.seeding import numpy_generator, torch_generator

MAX_SECONDS = 120.0  # after which no further attack is begun
MIN_ATTACK_IMAGES = 30  # labelled images, without which an attacker cannot be played
CHANCE_ORDERS = 1000  # of the classes, by which chance is measured
ATTACKER_EVERY = 3  # one image of so many is the attacker's, where there is no test
OTHERS = 4  # one of so many of the attacker's images is for imitated others in a sum
NOT_TRIED = "Not tried"
PLAIN, ALONE = "this update", "this update alone, the worst case"


def audit_own(
    prepared: Prepared, client: int, first: Message | None, secret: int, seconds: float = MAX_SECONDS
) -> OwnAudit:
    """Return what a server could learn of a client from its first message, as measured values.

    An update of fewer images, if one is needed, is drawn from ``secret``, as between machines.
    """
    began = time.monotonic()
    held_out, evidence, found = False, None, list[Outcome]()
    shared_out = split_own_images(prepared, client)
    if isinstance(shared_out, str):
        found = [Unmeasured(name, SERVER, shared_out) for name in OWN_ATTACKS]
    else:
        held_out, evidence = shared_out
        sent = train_on_rest(evidence, prepared, client, secret) if held_out else first
        if sent is None:
            found = [Unmeasured(name, SERVER, "The client sends no update in the first round.") for name in OWN_ATTACKS]
        else:
            for part, each in views(evidence, sent, prepared.experiment.federation):
                for name, attack in OWN_ATTACKS.items():
                    if time.monotonic() - began >= seconds:
                        found.append(Unmeasured(name, SERVER, f"{NOT_TRIED}: {seconds:g} seconds were over.", part))
                    else:
                        found += [replace(one, of=part) for one in attack(each) if one.view == SERVER]
    return OwnAudit(
        findings=[each for each in found if isinstance(each, Finding)],
        unmeasured=[each for each in found if isinstance(each, Unmeasured)],
        images=len(evidence.rows(client)) if evidence else 0,
        attackers_images=len(evidence.own) if evidence else 0,
        held_out=held_out,
        remedies=remedies(prepared.experiment),
        budget=budget(prepared.experiment),
        seconds=time.monotonic() - began,
    )


def views(evidence: Evidence, sent: Message, federation: Any) -> list[tuple[str, Evidence]]:
    """Return the update and, under secure aggregation, a sum with imitated others too."""
    alone = replace(
        evidence,
        summed=False,
        messages=[sent],
        rounds=[Round(sent.before, sent.before, sent.update.weight, tailored=False, report=sent.report)],
        kept={},
    )
    if not federation.secure_sum:
        return [(PLAIN, alone)]
    others = max(federation.least_clients - 1, 1)
    return [(ALONE, alone), (f"a sum with {others} imitated others", in_sum(alone, sent, others))]


def in_sum(evidence: Evidence, sent: Message, others: int) -> Evidence:
    """Return evidence of a sum of the message and those of imitated clients of its size."""
    cut = len(evidence.own) - len(evidence.own) // OTHERS
    places = torch.arange(len(evidence.own), device=evidence.own.labels.device)
    reserve, own = evidence.own.take(places[cut:]), evidence.own.take(places[:cut])
    size, generator = len(evidence.rows(sent.client)), torch_generator(0, "others of a sum")
    rows = [draw_rows(torch.arange(len(reserve)), size, generator) for _ in range(others)]
    imitated = imitate(evidence, reserve, rows, [(sent.round_index, sent.before)], noise="run")
    total = sum_of(
        [Shadow(rows[0], each) for each in ([seen_in(sent)], *imitated)], frozenset(evidence.method.role.statistics)
    ).seen[0]
    after = {name: sent.before[name] + change for name, change in total.change.items()}
    report = {name.removeprefix(REPORTED): tensor for name, tensor in total.beside.items() if name.startswith(REPORTED)}
    weight, loss, _ = (float(total.beside[name]) for name in NUMBERS)
    summed = SumOfUpdates({}, weight, loss, float(others + 1))
    sums = {name: total.beside[name] for name in evidence.method.role.statistics}
    happened = Round(sent.before, after, weight, tailored=False, total=summed, report=report, statistics=sums)
    complete = (evidence.complete[0].take(places[:cut]), evidence.complete[1])
    return replace(
        evidence,
        own=own,
        own_rows=evidence.own_rows[:cut],
        complete=complete,
        summed=True,
        summands=others + 1,
        rounds=[happened],
        kept={},
    )


def split_own_images(prepared: Prepared, client: int) -> tuple[bool, Evidence] | str:
    """Share labelled images among attacker, outside and client; say why if there are too few."""
    training, test = prepared.training, prepared.test.samples
    slow = not ENCODED.issuperset(training.samples.inputs)
    rows = training.rows[client]
    held_out = int((test.labels >= 0).sum()) < MIN_ATTACK_IMAGES or prepared.experiment.evaluation.protocol in (
        "open",
        "leave-one-domain-out",
    )
    if held_out:
        labelled = rows[training.true_labels[rows] >= 0]
        mine = Samples(training.samples.inputs, training.true_labels)
        pool = shuffled(labelled)[: len(labelled) // ATTACKER_EVERY]
        rows = rows[~torch.isin(rows, pool)]
    else:
        labelled = torch.nonzero(test.labels >= 0)[:, 0]
        mine, pool = with_candidates(test, training.samples), shuffled(labelled)
    if len(labelled) < MIN_ATTACK_IMAGES or not len(rows):
        return (
            f"To play the attacker takes {MIN_ATTACK_IMAGES} labelled images of this client's own, for testing or training; "
            f"there are {len(labelled)}."
        )
    limits = (FEW_OWN, FEW_OUTSIDE) if slow else (MAX_OWN, MAX_OUTSIDE)
    share = min(1.0, len(pool) / sum(limits))
    cut = int(share * limits[0])
    own, outside = (mine.take(part) for part in (pool[:cut], pool[cut : int(share * sum(limits))]))
    everyone = [rows if number == client else each[:0] for number, each in enumerate(training.rows)]
    return held_out, Evidence(
        prepared=replace(prepared, training=replace(training, rows=everyone)),
        slow=slow,
        own=own,
        outside=outside,
        complete=(own, outside),
        own_rows=pool[:cut],
        outside_rows=pool[cut : int(share * sum(limits))],
        outside_split="train" if held_out else "test",
    )


def with_candidates(test: Samples, training: Samples) -> Samples:
    """Return test samples with the inputs of training; their one label is their candidate."""
    inputs = {name: test.inputs[name] for name in training.inputs if name in test.inputs}
    if "candidates" in training.inputs:
        classes = training.inputs["candidates"].shape[1]
        one_hot = torch.nn.functional.one_hot(test.labels.clamp(min=0), classes)
        inputs["candidates"] = one_hot.to(training.inputs["candidates"])
    return Samples(inputs, test.labels)


def train_on_rest(evidence: Evidence, prepared: Prepared, client: int, secret: int) -> Message | None:
    """Return what the client would send in its first round without the images of the attacker."""
    federation = prepared.experiment.federation.model_copy(update={"secure_sum": False})
    experiment = prepared.experiment.model_copy(update={"federation": federation})
    engine = local_engine(replace(prepared, training=evidence.training, experiment=experiment))
    engine.private_seed = secret
    shared = prepared.method.first_shared(prepared.experiment.seed)
    consultation, report = prepared.method.consultation(), {}
    if consultation and consultation.due(0):
        reports, _ = engine.reports(0, shared)
        if reports:
            report = reports[0].tensors
            engine.adopt({client: consultation.settle(0, report, None if consultation.summed else report)})
    handed = prepared.method.hand_out(shared, {}, client)
    if prepared.method.role.statistics:
        sums = engine.sent_statistics(0, client, handed)
        return Message(client, 0, handed, Update(client, sums, 0.0), 0.0, report, 0)
    trained = engine.train(0, [client], handed)
    if not trained:
        return None
    return Message(client, 0, handed, trained[0].update, trained[0].loss, report, trained[0].examples)


# --- attacks of which one client gives a value of its own


def histogram(evidence: Evidence) -> list[Outcome]:
    """Correlate the estimated with the true shares of the classes that the attacker knows."""
    name, seen = label_histogram.NAME, evidence.seen_by_server()
    (client,) = evidence.clients
    known = torch.unique(evidence.own.labels).cpu().numpy()
    truth = evidence.histogram(client)[known]
    if not np.ptp(truth):
        sentence = "This client has as many images of each class, so that there is nothing to tell."
        return [Unmeasured(name, SERVER, sentence)]
    estimates: dict[str, tuple[Numbers, tuple[str, ...]]] = {}
    if (counts := reported(evidence)) is not None:
        estimates[label_histogram.NAMES[1]] = counts
    if (estimated := label_histogram.estimate(evidence, seen, evidence.summed)) is not None:
        estimates[name] = estimated.shares[client], estimated.items
    found: list[Outcome] = []
    for which, (shares, items) in estimates.items():
        value = correlation(shares[known], truth)
        interval = beside_chance(shares[known], truth, value)
        where = "the counts that it reports" if which != name else "what it sends"
        sentence = (
            f"The shares of {len(known)} classes among this client's images, estimated from {where}, correlate with the true "
            f"ones by {value:.2f} (1 is exact, chance level 0)."
        )
        counted = f"one client and {len(known)} classes"
        found.append(
            Finding(which, SERVER, label_histogram.MEASURE, value, interval, 0.0, sentence, "r", items, counted)
        )
    return found or [Unmeasured(name, SERVER, label_histogram.why_no_imitation(SERVER))]


def reported(evidence: Evidence) -> tuple[Numbers, tuple[str, ...]] | None:
    """Return a number for each class of a report, if it has them."""
    report = evidence.rounds[0].report if evidence.summed else evidence.messages[0].report
    for name, tensor in report.items():
        if tensor.shape == (evidence.classes,):
            return tensor.double().cpu().numpy(), (f"{REPORTED}{name}",)
    return None


def beside_chance(estimated: Numbers, truth: Numbers, value: float) -> tuple[float, float]:
    """Return an interval around a correlation that is as wide as what chance gives.

    Chance is the same estimate with its classes in a random order: a few large shares often meet.
    """
    generator = numpy_generator(0, "order of classes")
    orders = generator.permuted(np.tile(estimated - estimated.mean(), (CHANCE_ORDERS, 1)), axis=1)
    sizes = float(np.linalg.norm(orders[0]) * np.linalg.norm(truth - truth.mean()))
    if sizes < 1e-12:  # the estimate is constant, and says nothing either way
        return -1.0, 1.0
    width = float(np.quantile(orders @ (truth - truth.mean()), 0.975)) / sizes
    return max(value - width, -1.0), min(value + width, 1.0)


def called(evidence: Evidence) -> list[Outcome]:
    """Guess what the client's classes are called."""
    sent = class_names.text_tensors(evidence)
    if not sent or evidence.summed:
        return class_names.attack(evidence)[:1]  # which says why not
    (message,) = evidence.messages
    return [class_names.by_dictionary(evidence, sent[0], {message.client: message})]


def member(evidence: Evidence) -> list[Outcome]:
    """Look for single images of the client in what gradients moved."""
    seen = evidence.seen_by_server()
    names = membership.trained_names(evidence, seen[0])
    if not names:
        return [Unmeasured(name, SERVER, membership.why_no_updates(SERVER)) for name in membership.NAMES]
    return membership.judge_view(evidence, membership.NAMES, SERVER, seen, names)


def replayed(evidence: Evidence) -> list[Outcome]:
    """Look for single images of the client in everything that it sends."""
    return membership.judge_view(evidence, membership_replay.NAMES, SERVER, evidence.seen_by_server(), None)


def recovered(evidence: Evidence) -> list[Outcome]:
    """Read the client's encoded images off what it sends."""
    sources = feature_recovery.sources_of(evidence)
    if isinstance(sources, str):
        return [Unmeasured(name, SERVER, sources) for name in feature_recovery.NAMES[:2]]
    source = feature_recovery.best_source(evidence, sources)
    (seen,) = evidence.seen_by_server()
    truth = feature_recovery.features_of(evidence, evidence.rows(seen.client))
    found = feature_recovery.read(evidence, seen, source, len(truth))
    items = tuple(sorted({name for each in sources for name in each.names}))
    names = feature_recovery.NAMES[:2]
    return list(feature_recovery.recovery_findings(evidence, names, [truth], [found], "From this message", items))


OWN_ATTACKS: dict[str, Callable[[Evidence], list[Outcome]]] = {
    label_histogram.NAME: histogram,
    class_names.NAMES[0]: called,
    membership.NAMES[0]: member,
    membership_replay.NAMES[0]: replayed,
    membership_leverage.NAMES[0]: membership_leverage.attack,
    feature_recovery.NAMES[0]: recovered,
}
