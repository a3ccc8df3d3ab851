"""Perform an audit: gather the evidence, make every attack, and describe what leaves."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from fedvl.audit import class_names, feature_recovery, label_histogram, membership, missing_modality, picture
from fedvl.audit.evidence import Evidence, gather
from fedvl.audit.finding import SERVER, Finding, Outcome, Unmeasured
from fedvl.config import Experiment
from fedvl.data.opener import OPEN_ANEW, Opener
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.federation.fixed_point import FIGURES
from fedvl.seeding import torch_generator
from fedvl.tensors import ByClient, Tensors, count_bytes, count_elements
from fedvl.version import __version__

SCHEMA = 1
ATTACKS = (label_histogram, class_names, membership, feature_recovery, picture, missing_modality)
NAMES = tuple(name for module in ATTACKS for name in module.NAMES)
CLIENTS, ROUNDS = 10, 2
MASKED = "all numbers, which say nothing but in a sum"
EXAMPLE = 4  # numbers of a tensor that are shown
NOT_CLAIMED = (
    "These are attacks that were tried, not all that there are. A figure at the guess level says that this attack "
    "found nothing; it is no proof that nothing can be found.",
    "The figures are for these data, settings and rounds. More rounds, fewer images a client or smaller batches "
    "usually leak more.",
    "The attacker follows the protocol. A server that hands out tensors made to make images leak, or clients that "
    "work together, were not tried.",
    "What the pretrained model itself reveals of the images that it was once trained on is not part of this.",
)


def audit(
    experiment: Experiment,
    display: Display,
    clients: int = CLIENTS,
    rounds: int = ROUNDS,
    trained: tuple[Tensors, ByClient] | None = None,
    opener: Opener = OPEN_ANEW,
) -> dict[str, Any]:
    """Return everything that the audit of an experiment found, as it goes into the JSON.

    ``trained`` is the model that users query, if there is one already: shared tensors and last
    updates. Otherwise it is that of the audited rounds.
    """
    began = time.perf_counter()
    torch.set_num_threads(experiment.federation.threads)
    evidence = gather(experiment, clients, rounds, display, opener)
    if trained is not None:
        evidence.answering = placed(trained, evidence.own.labels.device)
    found = make_attacks(evidence, display)
    return {
        "schema": SCHEMA,
        "fedvl_version": __version__,
        "method": experiment.method.label,
        "dataset": experiment.data.dataset,
        "model": experiment.model.name,
        "partition": "by classes"
        if experiment.evaluation.protocol in ("open", "base-to-new")
        else experiment.data.partition,
        "clients": len(evidence.training.rows),
        "audited_clients": len(evidence.clients),
        "images_per_client": evidence.typical_size if evidence.messages else 0,
        "rounds": len(evidence.rounds),
        "seed": experiment.seed,
        "attackers_images": len(evidence.own),
        "leaves": leaves(evidence),
        "stays": stays(evidence),
        "findings": [each.as_json() for each in found if isinstance(each, Finding)],
        "unmeasured": [each.as_json() for each in found if isinstance(each, Unmeasured)],
        "known_seed": known_seed(evidence),
        "remedies": remedies(evidence.experiment),
        "budget": budget(evidence.experiment),
        "not_claimed": list(NOT_CLAIMED),
        "seconds": time.perf_counter() - began,
    }


def placed(trained: tuple[Tensors, ByClient], device: torch.device) -> tuple[Tensors, ByClient]:
    shared, last = trained
    moved = {client: {name: t.to(device) for name, t in tensors.items()} for client, tensors in last.items()}
    return {name: tensor.to(device) for name, tensor in shared.items()}, moved


def make_attacks(evidence: Evidence, display: Display) -> list[Outcome]:
    """Make every attack, each with progress; without messages each says why it is not made."""
    if not evidence.messages:
        reason = "Nothing is trained, so no client sends anything."
        if evidence.method.scope == "pooled":
            reason = "All images are pooled in one place: whoever holds that place has them, and no attack is needed."
        return [Unmeasured(module.NAMES[0], SERVER, reason) for module in ATTACKS]
    shown = display.stage("Attacks")
    found: list[Outcome] = []
    for number, module in enumerate(ATTACKS):
        shown(number, len(ATTACKS))
        found += module.attack(evidence)
    shown(len(ATTACKS), len(ATTACKS))
    return found


def leaves(evidence: Evidence) -> list[dict[str, Any]]:
    """Describe what one client sends in one round, tensor by tensor."""
    if not evidence.messages:
        return []
    message = evidence.messages[0]
    if evidence.summed:
        sums = {
            "update, masked": count_elements(message.update.tensors) + FIGURES,
            "report, masked": count_elements(message.report),
        }
        return [
            {"in": part, "name": MASKED, "shape": [count], "bytes": 8 * count, "example": []}
            for part, count in sums.items()
            if count
        ]
    described = [
        {
            "in": part,
            "name": name,
            "shape": list(tensor.shape),
            "bytes": count_bytes({name: tensor}),
            "example": [round(float(number), 5) for number in tensor.flatten()[:EXAMPLE]],
        }
        for part, tensors in (("update", message.update.tensors), ("report", message.report))
        for name, tensor in tensors.items()
    ]
    numbers = [("weight in the mean", message.update.weight), ("training loss", message.loss)]
    return [
        *described,
        *({"in": "update", "name": n, "shape": [], "bytes": 8, "example": [round(v, 5)]} for n, v in numbers),
    ]


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
        f"Everything random in a simulation follows from its seed, so whoever knows it knows the order of each "
        f"client's batches{also}. Between machines, each party draws what is private from a secret of its own."
    )


def first_private(evidence: Evidence, seed: int) -> Tensors:
    """Return the private tensors that an audited client draws when it joins."""
    if not evidence.messages:
        return {}
    client = evidence.clients[0]
    samples = evidence.training.samples.take(evidence.rows(client))
    return evidence.method.first_private(samples, torch_generator(seed, "join", client))


def exceeded(found: Mapping[str, Any], limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for each figure that is above its limit."""
    return [
        f"{each['name']} from the view of {each['view']} is {each['value']:.3g}, above {limits[each['name']]:g}."
        for each in found["findings"]
        if each["value"] > limits.get(each["name"], float("inf"))
    ]


def parse_limits(given: list[str]) -> dict[str, float]:
    """Return the limits of --fail-above, as ATTACK=VALUE."""
    limits = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = float("nan")
        if name not in NAMES or limits[name] != limits[name]:
            raise FedVLError(
                f"--fail-above takes ATTACK=VALUE, for example membership=0.6, not '{text}'; attacks are {', '.join(NAMES)}."
            )
    return limits


def remedies(experiment: Experiment) -> list[str]:
    """Say what is switched on, and how the figures are to be read with it."""
    federation, privacy, found = experiment.federation, experiment.privacy, []
    if federation.secure_sum:
        found.append(
            f"Secure sums: the server sees sums over all clients of a round, {federation.least_clients} at least. The figures of "
            "its view are of the sum of all who trained; one over fewer clients would say more of each."
        )
    if privacy.unit == "client":
        found.append(
            "Noise on the mean of the updates, which hides whether a client took part from all who see the model. "
            + (
                "Each client adds its share of it before it is summed, so that the server sees it in the sum too."
                if federation.secure_sum
                else "The server adds it, so that the figures of its view are without it."
            )
        )
    if privacy.unit == "record":
        found.append(
            "Noise in each client's own training, which hides single images; the figures are of what it sends with it."
        )
    return found


def budget(experiment: Experiment) -> str | None:
    """Say what the planned rounds may spend."""
    privacy = experiment.privacy
    if privacy.unit == "none":
        return None
    whose, sampled = "image", "each image is in a step by a secret chance (Poisson sampling)"
    if privacy.unit == "client":
        whose, sampled = "client", "every client takes part in every round"
        if (experiment.federation.per_round or experiment.data.clients) < experiment.data.clients:
            sampled = "each client takes part in a round by a secret chance (Poisson sampling)"
    return (
        f"At most epsilon {privacy.epsilon:g} at delta {privacy.delta:g} for each {whose}, over all planned rounds; "
        f"{sampled}."
    )
