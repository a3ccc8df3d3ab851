"""Perform an audit: gather the evidence, attack, and say what examined each thing that leaves."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import torch

from fedvl.audit import (
    class_names,
    feature_recovery,
    label_histogram,
    label_probe,
    membership,
    membership_leverage,
    membership_replay,
    missing_modality,
    picture,
)
from fedvl.audit.canaries import EPSILON_FINDING, empirical_epsilon
from fedvl.audit.candidates import shadows_of
from fedvl.audit.evidence import Evidence, gather
from fedvl.audit.finding import FINDINGS_SCHEMA, SERVER, Audit, Finding, Leaving, Outcome, Unmeasured
from fedvl.audit.imitation import CannotImitateError
from fedvl.audit.messages import LOW_BITS, NUMBERS, REPORTED
from fedvl.audit.words import NOT_CLAIMED, budget, by_risk, changes_of, headline, recommend, remedies
from fedvl.config import Experiment
from fedvl.data.sources import OPEN_ANEW, Opener
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.seeding import torch_generator
from fedvl.tensors import ByClient, Tensors, count_bytes
from fedvl.version import __version__

ATTACKS = (
    label_histogram,
    label_probe,
    class_names,
    membership,
    membership_replay,
    membership_leverage,
    feature_recovery,
    picture,
    missing_modality,
)
NAMES = tuple(name for module in ATTACKS for name in module.NAMES)
CLIENTS, ROUNDS = 10, 2
EXAMPLE = 4  # numbers of a tensor that are shown


def audit(
    experiment: Experiment,
    display: Display,
    clients: int = CLIENTS,
    rounds: int = ROUNDS,
    trained: tuple[Tensors, ByClient] | None = None,
    opener: Opener = OPEN_ANEW,
) -> Audit:
    """Return everything that the audit of an experiment found.

    ``trained`` is the model that users query, if there is one already: shared tensors and last
    updates. Otherwise it is that of the audited rounds.
    """
    began = time.perf_counter()
    torch.set_num_threads(experiment.federation.threads)
    evidence = gather(experiment, clients, rounds, display, opener)
    if trained is not None:
        evidence.answering = placed_by_client(trained, evidence.own.labels.device)
    found = make_attacks(evidence, display)
    epsilon = None
    try:
        epsilon = empirical_epsilon(evidence)
    except CannotImitateError as error:
        found.append(Unmeasured(EPSILON_FINDING, SERVER, str(error)))
    findings = [each for each in found if isinstance(each, Finding)]
    leaving = leaves(evidence, findings)
    by_classes = experiment.evaluation.protocol in ("open", "base-to-new")
    return Audit(
        version=FINDINGS_SCHEMA,
        fedvl_version=__version__,
        method=experiment.method.label,
        dataset=experiment.data.dataset,
        model=experiment.model.name,
        partition="by classes" if by_classes else experiment.data.partition,
        clients=len(evidence.training.rows),
        audited_clients=len(evidence.clients),
        images_per_client=evidence.typical_size if evidence.messages else 0,
        rounds=len(evidence.rounds),
        seed=experiment.seed,
        attackers_images=len(evidence.own),
        headline=headline(findings) if evidence.messages else "",
        risks=by_risk(findings) if evidence.messages else [],
        recommendations=recommend(findings, unexamined(leaving), experiment, epsilon) if evidence.messages else [],
        leaves=leaving,
        stays=stays(evidence),
        findings=findings,
        unmeasured=[each for each in found if isinstance(each, Unmeasured)],
        known_seed=known_seed(evidence),
        remedies=remedies(evidence.experiment),
        budget=budget(evidence.experiment),
        epsilon=epsilon,
        not_claimed=list(NOT_CLAIMED),
        seconds=time.perf_counter() - began,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        participants=participants_of(evidence),
        changes=changes_of(findings, evidence.experiment) if evidence.messages else [],
    )


def participants_of(evidence: Evidence) -> str:
    """Say who took part: an audit repeats the messages of clients in one process."""
    absent = len(evidence.experiment.absent)
    count = len(evidence.training.rows) - absent
    whole = f"{count} simulated client{'' if count == 1 else 's'}, messages repeated on this machine"
    return f"{whole}; {absent} withdrew or had not joined" if absent else whole


def placed_by_client(trained: tuple[Tensors, ByClient], device: torch.device) -> tuple[Tensors, ByClient]:
    shared, last = trained
    moved = {client: {name: t.to(device) for name, t in tensors.items()} for client, tensors in last.items()}
    return {name: tensor.to(device) for name, tensor in shared.items()}, moved


def make_attacks(evidence: Evidence, display: Display) -> list[Outcome]:
    """Make every attack, each with progress; without messages each says why it is not made."""
    if not evidence.messages:
        reason = "Nothing is trained, so no client sends anything."
        if evidence.method.scope == "pooled":
            reason = "All images are pooled in one place, so that no attack is needed to read them there."
        return [Unmeasured(name, SERVER, reason) for name in NAMES]
    shown = display.stage("Attacks")
    found: list[Outcome] = []
    for number, module in enumerate(ATTACKS):
        shown(number, len(ATTACKS))
        try:
            found += module.attack(evidence)
        except CannotImitateError as error:
            found += [Unmeasured(name, SERVER, str(error)) for name in module.NAMES]
    shown(len(ATTACKS), len(ATTACKS))
    return found


def leaves(evidence: Evidence, findings: Sequence[Finding]) -> list[Leaving]:
    """Describe each item that a client sends in a round, with the attacks that examined it."""
    if not evidence.messages:
        return []
    message = evidence.messages[0]
    items = evidence.seen_by_server()[0].items
    sent = {**message.update.tensors, **{f"{REPORTED}{name}": tensor for name, tensor in message.report.items()}}
    described = []
    for name in items:
        if name.startswith(LOW_BITS):
            continue
        tensor = items[name] if name in NUMBERS else sent[name]
        by = {each.name for each in findings if each.view == SERVER and name in each.items}
        examined = [module.NAMES[0] for module in ATTACKS if by.intersection(module.NAMES)]
        described.append(
            Leaving(
                part="report" if name.startswith(REPORTED) else "update",
                name=name.removeprefix(REPORTED),
                shape=list(tensor.shape),
                bytes=8 * max(tensor.numel(), 1) if evidence.summed else count_bytes({name: tensor}),
                masked=evidence.summed,
                example=[] if evidence.summed else [round(float(each), 5) for each in tensor.flatten()[:EXAMPLE]],
                examined=examined,
                share=compared_share(evidence, name),
                note="" if examined else constant(evidence, name),
            )
        )
    return described


def compared_share(evidence: Evidence, name: str) -> float:
    """Return the share of an item's numbers in which images were sought; a large one in part."""
    parts = [
        signature.part.share
        for of_rounds in (
            kept for key, kept in evidence.kept.items() if isinstance(key, tuple) and key[0] == "signatures"
        )
        for signatures in of_rounds
        for (item, _), signature in signatures.items()
        if item == name
    ]
    return min(parts, default=1.0)


def constant(evidence: Evidence, name: str) -> str:
    """Say if an item does not depend on which images a client has, in messages and imitations."""
    sent = {each.client: each.items[name] for each in evidence.seen_by_server() if name in each.items}
    if not evidence.summed and len(sent) > 1 and len({bytes_of(tensor) for tensor in sent.values()}) == 1:
        return "the same for all clients"
    if name not in NUMBERS:
        return ""
    by_size: dict[int, set[float]] = {}
    if ("shadows", None, "trial") not in evidence.kept:
        return ""
    for shadow in shadows_of(evidence, None):
        for each in shadow.seen:
            by_size.setdefault(len(shadow.rows), set()).add(float(each.items[name]))
    if not evidence.summed:
        for client, number in sent.items():
            by_size.setdefault(len(evidence.rows(client)), set()).add(float(number))
    return "the number of images alone" if all(len(values) == 1 for values in by_size.values()) else ""


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def unexamined(leaving: Sequence[Leaving]) -> list[str]:
    """Return what leaves and no attack examined."""
    return [row.name for row in leaving if row.unexamined]


def stays(evidence: Evidence) -> list[str]:
    """Return what stays with a client: its images and labels, and the names of private tensors."""
    return ["images", "labels", *sorted(first_private(evidence, evidence.experiment.seed))]


def known_seed(evidence: Evidence) -> str:
    """Say what the seed of a simulation gives away, by drawing with another one."""
    if not evidence.messages:
        return ""
    one, other = (first_private(evidence, seed) for seed in (evidence.experiment.seed, evidence.experiment.seed + 1))
    drawn = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    drawn += list(evidence.method.noise())
    also = f" and what clients draw for themselves ({', '.join(sorted(drawn))})" if drawn else ""
    return (
        f"Everything random in a simulation follows from its seed, so an attacker who knows the seed knows the order of each "
        f"client's batches{also}. Between machines, each client draws what is private from a secret of its own."
    )


def first_private(evidence: Evidence, seed: int) -> Tensors:
    """Return the private tensors that an audited client draws when it joins."""
    if not evidence.messages:
        return {}
    client = evidence.clients[0]
    samples = evidence.training.samples.take(evidence.rows(client))
    return evidence.method.first_private(samples, torch_generator(seed, "join", client))


def exceeded(found: Audit, limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for each value that is above its limit."""
    above = [
        f"{each.name} from the view of {each.view} is {each.value:.3g}, above {limits[each.name]:g}."
        for each in found.findings
        if each.value > limits.get(each.name, float("inf"))
    ]
    if found.epsilon and found.epsilon.bound > limits.get(EPSILON_FINDING, float("inf")):
        above.append(f"{EPSILON_FINDING} is at least {found.epsilon.bound:.3g}, above {limits[EPSILON_FINDING]:g}.")
    return above


def check_measured(found: Audit, limits: Mapping[str, float]) -> None:
    """Raise if an attack that has a limit gave no value: it would pass without being measured."""
    measured = {each.name for each in found.findings} | ({EPSILON_FINDING} if found.epsilon else set())
    for name in limits:
        if name not in measured:
            reasons = [each.sentence for each in found.unmeasured if each.name == name]
            why = f" {reasons[0]}" if reasons else ""
            raise FedVLError(f"--fail-above {name} cannot be checked, since that attack was not made.{why}")


def parse_limits(given: list[str]) -> dict[str, float]:
    """Return the limits of --fail-above, as ATTACK=VALUE."""
    limits = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = float("nan")
        if name not in (*NAMES, EPSILON_FINDING) or limits[name] != limits[name]:
            raise FedVLError(
                f"--fail-above takes ATTACK=VALUE, for example membership=0.6, not '{text}'; attacks are "
                f"{', '.join((*NAMES, EPSILON_FINDING))}."
            )
    return limits
