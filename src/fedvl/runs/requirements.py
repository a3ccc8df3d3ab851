"""What a method needs of a model and a dataset; what does not fit is refused in one sentence."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedvl.config import MANY, Experiment
from fedvl.data.stores import Dataset
from fedvl.errors import FedVLError
from fedvl.federation.attacks import TRIGGERED
from fedvl.federation.sealed import alternatives, made_of_samples
from fedvl.federation.statistics_privacy import sensitivity_of
from fedvl.methods import load_method
from fedvl.methods.base import Method, overrides
from fedvl.tensors import Tensors

RULE_BETWEEN_MACHINES = "centred-clipping"  # the best of those measured in docs/robust.md
MAX_CLASSES = 10_000  # results count every pair of classes: 800 MB for each matrix of so many


def check_settings(experiment: Experiment, simulated: bool) -> None:
    """Refuse settings that do not fit each other, before data are opened."""
    check_validation(experiment, simulated)
    check_subspace(experiment, simulated)
    check_private_choice(experiment, simulated)
    check_unit(experiment)


def check_method(method: Method, experiment: Experiment) -> None:
    """Refuse settings of training and of the federation that do not fit the method."""
    check_statistics(method, experiment)
    check_training(method, experiment)
    check_secure_sum(method, experiment)
    check_robust(method, experiment)
    check_sequential(experiment)
    check_privacy(method, experiment)


def check_training(method: Method, experiment: Experiment) -> None:
    """Refuse settings of training for which the method's equations do not hold."""
    for key, value in method.requires.items():
        if (found := getattr(experiment.training, key)) != value:
            raise FedVLError(
                f"Method '{experiment.method.name}' is derived for training.{key}={value}, and it is {found}; use "
                f"--set training.{key}={value}, or another method."
            )


def check_classes(dataset: Dataset) -> None:
    """Refuse more classes than a result can count pairs of."""
    if len(dataset.class_names) > MAX_CLASSES:
        raise FedVLError(
            f"'{dataset.name}' has {len(dataset.class_names):,} classes, more than {MAX_CLASSES:,}; leave some of them out."
        )


def check_united(dataset: Dataset, method: type[Method], experiment: Experiment) -> None:
    """Refuse what does not know which of several datasets an image is from."""
    if not dataset.origins:
        return
    if experiment.evaluation.protocol not in ("closed", "personal", "base-to-new"):
        raise FedVLError(
            f"The {experiment.evaluation.protocol} protocol is for one dataset; with several use closed, personal or base-to-new."
        )
    trains = method.start is not Method.start
    if (trains and method.labels == "none") or experiment.data.labels != "true":
        raise FedVLError(
            "Pseudo-labels would be of classes of all datasets; use one dataset, or true labels and a method that needs them."
        )


def check_model(fused: bool, wants_fused: bool, experiment: Experiment) -> None:
    """Refuse a model of a kind that the method was not written for."""
    name, model = experiment.method.name, experiment.model.name
    if wants_fused and not fused:
        raise FedVLError(
            f"Method '{name}' needs a fused model, and '{model}' is a CLIP-like one; use --model fedvl-tiny-vilt or a ViLT folder."
        )
    if fused and not wants_fused:
        raise FedVLError(
            f"Method '{name}' needs a CLIP-like model, and '{model}' is a fused one; use --model fedvl-tiny."
        )
    if not fused and (experiment.data.missing or experiment.evaluation.protocol == "missing"):
        raise FedVLError(
            f"Method '{name}' reads images alone, so that nothing can be missing; use fed-prime or fedavg-p."
        )
    if fused and experiment.data.labels != "true":
        raise FedVLError(f"Pseudo-labels need a CLIP-like model; with '{model}' leave data.labels as it is.")


def use_of_sums(name: str) -> str:
    """Return what a server that learns sums can use: the method's own form of sums, or others."""
    option = {"fed-mp": "merging=summed", "fed-prime": "matching=client", "fed-inter": "matching=client"}.get(name)
    return f"--set method.{option}" if option else "a method that is averaged, such as linear, fst-cbdg or cachefl"


def check_statistics(method: Method, experiment: Experiment) -> None:
    """Refuse a training-free method that also trains, and settings that are of training."""
    name, federation, role = experiment.method.name, experiment.federation, method.role
    if not role.statistics:
        return
    if role.sent or role.trained_private or method.consultation() is not None or method.scope == "pooled":
        raise FedVLError(
            f"Method '{name}' declares statistics, so that it exchanges nothing else; remove its other roles."
        )
    if federation.robust != "mean":
        raise FedVLError(f"Method '{name}' adds up statistics, for which there is no other rule; leave --robust out.")
    if federation.one_step or federation.sequential:
        raise FedVLError(
            f"Method '{name}' has no training steps; leave federation.one_step and federation.sequential out."
        )
    if (kind := (federation.attack or "label-flip").partition(":")[0]) not in ("label-flip", "backdoor"):
        raise FedVLError(
            f"The attack {kind} changes the update of a client, and method '{name}' has none; use label-flip or backdoor."
        )


def check_secure_sum(method: Method, experiment: Experiment) -> None:
    """Refuse secure sums where the server needs more than sums, and say what that is."""
    federation = experiment.federation
    if not federation.secure_sum:
        return
    name, role, consultation = experiment.method.name, method.role, method.consultation()
    start = method.first_shared(experiment.seed)
    single = [*role.sent, *(shared for shared in start if role.needs(shared) != "sum")]
    if method.scope == "pooled" or not (start or consultation):
        raise FedVLError(f"Method '{name}' sends no updates that could be summed; leave --secure-sum out.")
    if single:
        raise FedVLError(
            f"Method '{name}' needs {', '.join(single)} of each client, so that a sum is not enough; "
            f"leave --secure-sum out, or use {use_of_sums(name)}."
        )
    if consultation is not None and not consultation.summed:
        raise FedVLError(
            f"With these options method '{name}' needs the report of each client; use --set method.counts=summed."
        )
    clients = experiment.data.clients - len(experiment.absent)
    if clients < federation.least_clients:
        raise FedVLError(
            f"A sum of {clients} clients is too few to hide one of them; "
            f"federation.least_clients is {federation.least_clients}."
        )


def check_withdrawn(experiment: Experiment) -> None:
    """Refuse to leave out clients that there are not, or all of them."""
    withdrawn, clients = experiment.federation.withdrawn, experiment.data.clients
    if strangers := [client for client in withdrawn if client >= clients]:
        raise FedVLError(f"There is no client {strangers[0]} to withdraw; clients are 0 to {clients - 1}.")
    if len(set(withdrawn)) < len(withdrawn):
        raise FedVLError("federation.withdrawn names a client twice; name it once.")
    if len(withdrawn) == clients:
        raise FedVLError("All clients have withdrawn, so that there is nothing to train on; keep one at least.")
    newcomers = experiment.data.newcomers
    if len(withdrawn) + newcomers >= clients:
        raise FedVLError(f"Of {clients} clients {newcomers} newcomers leave none to train with; lower data.newcomers.")
    if newcomers and experiment.evaluation.protocol != "personal":
        raise FedVLError(
            "Newcomers are tested on their own images; use --protocol personal, or leave data.newcomers out."
        )
    if newcomers and max(withdrawn, default=-1) >= clients - newcomers:
        raise FedVLError("A newcomer cannot have withdrawn before it came; leave it out of federation.withdrawn.")


def check_robust(method: Method, experiment: Experiment) -> None:
    """Refuse rules and attacks that a method, or a sum, leaves no room for."""
    federation, name = experiment.federation, experiment.method.name
    if federation.robust != "mean" and federation.secure_sum:
        raise FedVLError(
            "A rule needs the update of each client, and a secure sum hides it; choose --robust or --secure-sum."
        )
    start = method.first_shared(experiment.seed)
    if federation.robust != "mean" and start and not any(method.role.needs(shared) == "sum" for shared in start):
        raise FedVLError(
            f"Method '{name}' merges the updates itself, so that no other rule applies; leave --robust out."
        )
    kind = (federation.attack or "").partition(":")[0]
    if kind in ("label-flip", "backdoor") and method.labels == "none":
        raise FedVLError(f"Method '{name}' trains without labels, so that none can be flipped; use another attack.")
    if kind == "backdoor" and (
        experiment.evaluation.protocol in ("open", "base-to-new") or not TRIGGERED.issuperset(method.inputs)
    ):
        raise FedVLError(
            "A backdoor is planted in images, for a class that is queried; use --protocol closed and a method on images, "
            "such as linear or cachefl, or another attack."
        )


def rule_between_machines(method: type[Method], experiment: Experiment) -> str:
    """Return the merging rule of a federation for which no rule was asked.

    Secure aggregation and privacy leave no room for a rule, nor does a method with a server hook of
    its own or one that adds up statistics; of two clients no rule can tell which is hostile.
    """
    federation = experiment.federation
    averaged = method.start is not Method.start and all(
        getattr(method, hook) is getattr(Method, hook) for hook in ("merge", "hand_out", "client_weights", "statistics")
    )
    asked = federation.secure_sum or federation.sequential or experiment.privacy.unit != "none"
    clients = federation.per_round or experiment.data.clients
    return RULE_BETWEEN_MACHINES if averaged and not asked and clients > 2 else federation.robust


def hides_statistics(experiment: Experiment) -> bool:
    """Return whether statistics leave in a secure sum or with noise of the client's own."""
    return experiment.federation.secure_sum or experiment.privacy.unit == "record"


def sends_statistics(experiment: Experiment) -> bool:
    return load_method(experiment.method.name).statistics is not Method.statistics


def statistics_note(experiment: Experiment) -> str:
    """Warn of a federation in which the server would see the statistics of single clients."""
    if not sends_statistics(experiment) or hides_statistics(experiment):
        return ""
    return (
        f"The statistics of method '{experiment.method.name}' leave each client by themselves, from which images can be "
        "recovered; clients refuse unless their policy.toml says single_statistics = true. Use --secure-sum or --privacy "
        "record:eps=3."
    )


def rule_note(experiment: Experiment) -> str:
    """Say how updates are merged, and what that means for hostile clients."""
    if sends_statistics(experiment):
        return "Statistics are added up, which one hostile client can ruin; no rule applies to them."
    if experiment.federation.secure_sum:
        return "With secure aggregation the server sees no single update, so that no rule stops a hostile client."
    rule = experiment.federation.robust
    if rule == "mean":
        return "Updates are merged by the mean, which one hostile client can ruin; see docs/robust.md."
    return f"Updates are merged by {rule}, against hostile clients; see docs/robust.md."


def check_sequential(experiment: Experiment) -> None:
    """Refuse clients that go on from each other where the server handles each update."""
    federation = experiment.federation
    if federation.sequential and (
        federation.secure_sum or federation.robust != "mean" or experiment.privacy.unit != "none"
    ):
        raise FedVLError(
            "Clients that go on from each other all send the same tensors; leave federation.sequential out, or leave out "
            "--secure-sum, --robust and --privacy."
        )


def check_validation(experiment: Experiment, simulated: bool) -> None:
    """Refuse validation where its figures are not to be had, or would tell what noise hides."""
    if experiment.evaluation.validation is None:
        if experiment.federation.patience is not None:
            raise FedVLError(
                "federation.patience needs images to judge rounds by; add --set evaluation.validation=0.2, or leave it out."
            )
        return
    if experiment.privacy.unit != "none":
        raise FedVLError(
            "The best round on clients' own images is not private; leave out evaluation.validation or --privacy."
        )
    if not simulated:
        raise FedVLError(
            "Images that parties hold out do not leave them, so that a server cannot choose by them; leave out "
            "evaluation.validation."
        )


def check_subspace(experiment: Experiment, simulated: bool) -> None:
    """Refuse a public subspace where the server has no images, or no client moves in it."""
    if experiment.privacy.subspace is None:
        return
    if experiment.privacy.unit != "client":
        raise FedVLError("A public subspace is for the updates of clients: use --privacy client:eps=3,subspace=32.")
    if not simulated:
        raise FedVLError(
            "The directions of a public subspace come from images of the server's own, which only a simulation has; "
            "leave privacy.subspace out."
        )


def check_private_choice(experiment: Experiment, simulated: bool) -> None:
    """Refuse record-level privacy where an image decides which other images are trained on."""
    data = experiment.data
    if experiment.privacy.unit != "record":
        return
    if data.client_shots is not None:
        raise FedVLError(
            "data.client_shots chooses among a client's images by their labels, so that one image decides about others; "
            "leave it out, or use --privacy client:eps=3."
        )
    if simulated:
        return
    if (data.shots or MANY) < MANY or data.long_tail is not None:
        raise FedVLError(
            "data.shots and data.long_tail choose among a client's images by their labels, so that one image decides about "
            f"others; use --set data.shots={MANY}, which keeps all, and no data.long_tail."
        )


def check_unit(experiment: Experiment) -> None:
    """Refuse a unit of several images where nothing is counted by it, or classes are dealt."""
    unit, protocol = experiment.data.unit, experiment.evaluation.protocol
    if unit is None:
        return
    if experiment.privacy.unit != "record":
        raise FedVLError(f"--unit {unit} is for record-level privacy: use --privacy record:eps=3, or leave it out.")
    if protocol in ("open", "base-to-new"):
        raise FedVLError(
            f"The {protocol} protocol deals classes to clients, and images of one {unit} may be of several classes; use "
            "--protocol closed, or leave --unit out."
        )


def check_privacy(method: Method, experiment: Experiment) -> None:
    """Refuse differential privacy where something would leave that noise does not cover."""
    unit = experiment.privacy.unit
    if unit == "none":
        return
    name, role = experiment.method.name, method.role
    if role.statistics:
        check_statistics_privacy(method, experiment)
        return
    start = method.first_shared(experiment.seed)
    consultation = method.consultation() if unit == "client" else None
    if method.scope == "pooled" or not (start or (consultation and consultation.report_shapes)):
        raise FedVLError(f"Method '{name}' sends no updates that noise could be added to; leave --privacy out.")
    if role.sent:
        raise FedVLError(
            f"Method '{name}' sends {', '.join(role.sent)} besides its update, which noise does not cover; leave --privacy "
            f"out, or use {use_of_sums(name)}."
        )
    untrained = [shared for shared in start if not role.shared(shared).trained]
    if untrained and not overrides(method, "step"):
        raise FedVLError(
            f"Method '{name}' shares tensors that gradients do not move, such as {untrained[0]}, and noise would spoil "
            "them; leave --privacy out."
        )
    if unit == "client":
        check_client_privacy(method, start, experiment)
    else:
        check_record_privacy(method, experiment)


def check_statistics_privacy(method: Method, experiment: Experiment) -> None:
    """Refuse noise on statistics where one image would move more than it covers."""
    name, data, privacy = experiment.method.name, experiment.data, experiment.privacy
    if not all(role.noised for role in method.role.statistics.values()):
        raise FedVLError(
            f"Method '{name}' does not solve with noise on its statistics; leave --privacy out, or use ridge, gda or fed-em."
        )
    sensitivity_of(method.role.statistics.values())
    if data.unit is not None:
        raise FedVLError(
            f"The images of one {data.unit} add more to the statistics of method '{name}' than the noise covers; leave --unit out."
        )
    if privacy.unit == "record" and privacy.clip is not None:
        raise FedVLError(f"An image moves the statistics of method '{name}' by a known norm; leave clip out.")
    if privacy.subspace is not None:
        raise FedVLError(f"Method '{name}' sends no updates; leave privacy.subspace out.")
    allowed = ("true", "zero-shot") if privacy.unit == "record" else ("true", "zero-shot", "upl", "fpl", "cpl")
    if data.labels not in allowed:
        raise FedVLError(
            f"Pseudo-labels of '{data.labels}' depend on other images, which noise does not cover; use "
            "--set data.labels=zero-shot."
        )


def check_client_privacy(method: Method, start: Tensors, experiment: Experiment) -> None:
    """Refuse client-level privacy where the server needs more than a noisy mean."""
    name, federation, consultation = experiment.method.name, experiment.federation, method.consultation()
    if single := [shared for shared in start if method.role.needs(shared) != "sum"]:
        raise FedVLError(
            f"Method '{name}' needs {', '.join(single)} of each client, and client-level privacy hides each client; "
            f"use {use_of_sums(name)}."
        )
    reports = consultation is not None and consultation.report_shapes
    if reports and getattr(consultation, "sensitivity", None) is None:  # a method in a file may not say it
        raise FedVLError(
            f"Clients of method '{name}' report class counts before a round, which noise does not cover; use "
            "--set method.counts=shares, or let each choose its labels alone, with --set method.selection=fpl."
        )
    if experiment.data.labels == "cps":
        raise FedVLError(
            "Pseudo-labels of 'cps' follow from class counts of all clients, which noise does not cover; let each client "
            "choose alone, with --set data.labels=fpl."
        )
    if federation.robust != "mean":
        raise FedVLError(
            "A rule weighs clients by one another, so that noise on its outcome hides none; choose --robust or --privacy client."
        )
    if federation.drift:
        raise FedVLError("The drift of single clients is not private; use --set federation.drift=false.")
    if experiment.privacy.subspace is not None and not any(method.role.shared(shared).features for shared in start):
        raise FedVLError(
            f"Method '{name}' shares no vectors that are compared with image features; leave privacy.subspace out, or use "
            "linear, fst-cbdg or cachefl."
        )
    if federation.secure_sum and experiment.privacy.clip is None:
        raise FedVLError(
            "In a secure sum clients cut their own updates; say to what norm: --privacy client:eps=3,clip=0.1."
        )
    if federation.secure_sum and federation.per_round and federation.per_round < experiment.data.clients:
        raise FedVLError(
            "Client-level privacy draws clients one by one, so that a secure sum could have too few; leave --per-round out."
        )


def check_record_privacy(method: Method, experiment: Experiment) -> None:
    """Refuse record-level privacy where an image has a say beyond its own gradient."""
    name, labels = experiment.method.name, experiment.data.labels
    start = method.first_shared(experiment.seed)
    if ended := [name for name in method.role.ends(start) if name in start or name in method.role.sent]:
        raise FedVLError(
            f"Method '{name}' sends {', '.join(ended)} other than as training left it, which noise does not cover; use "
            "--privacy client:eps=3, or another method."
        )
    if overrides(method, "correct"):
        raise FedVLError(
            f"Method '{name}' corrects gradients, and record-level privacy clips and hides those of the loss; use "
            "--privacy client:eps=3, or another method."
        )
    if method.scope != "row" or method.consultation() is not None:
        raise FedVLError(
            f"In method '{name}' an image counts in the loss or label of other images, so that cutting its own gradient does "
            "not bound it; use --privacy client:eps=3, or linear, cachefl or promptfl."
        )
    if labels not in ("true", "zero-shot"):
        raise FedVLError(
            f"Pseudo-labels of '{labels}' compare the images of a client, so that one image changes others' labels; "
            "use --set data.labels=zero-shot."
        )
    if method.task.origins and experiment.evaluation.protocol != "base-to-new":
        raise FedVLError(
            "With several datasets a client's class list follows from its own labels, so that one image changes the loss of "
            "others; use one dataset, or --protocol base-to-new, which deals the classes."
        )
    if made := made_of_samples(method, start):
        found = (choice for choice, other in alternatives(method) if made_of_samples(other, start) is None)
        remedy = (
            f"--set method.{choice}" if (choice := next(found, "")) else "--privacy client:eps=3, or another method"
        )
        raise FedVLError(
            f"Method '{name}' computes {made} from all images of a client, so that one image changes the gradients of others; "
            f"use {remedy}."
        )


def check_labels(
    dataset: Dataset, method: type[Method], labels: Mapping[str, NDArray[np.int64]], experiment: Experiment
) -> None:
    """Refuse labels that a method cannot train on, and a test that cannot be measured."""
    name, nothing = experiment.method.name, np.array([], np.int64)
    if experiment.data.labels != "true" and method.labels == "none":
        raise FedVLError(f"Method '{name}' takes no labels from elsewhere; leave data.labels as it is.")
    if experiment.data.label_noise is not None and (method.labels == "none" or experiment.data.labels != "true"):
        raise FedVLError(
            f"With pseudo-labels, or without labels as in '{name}', none can be wrong from outside; leave data.label_noise out."
        )
    if experiment.data.labels == "cpl" and method.labels != "candidates":
        raise FedVLError(
            f"Method '{name}' cannot learn from CPL's several candidates an image; use fpl, cps, or a prompt method."
        )
    if method.labels != "none" and experiment.data.labels == "true" and (labels.get("train", nothing) < 0).any():
        raise FedVLError(
            f"Method '{name}' needs labels, and some training images of '{dataset.name}' have none; "
            "label them, use --set data.labels=cps, or use fst-cbdg or fedpp."
        )
    if (labels.get("test", nothing) < 0).any():
        raise FedVLError(
            f"Some test images of '{dataset.name}' have no label, so that no accuracy can be measured; "
            "label them or leave them out."
        )
    if experiment.evaluation.protocol == "base-to-new" and method.vocabulary != "any":
        raise FedVLError(
            f"Method '{name}' cannot name classes that it was not trained on; use --protocol closed, or promptfl, fedtpg, "
            "fedclip or another that answers any names."
        )
    if experiment.evaluation.protocol == "open" and method.vocabulary == "trained":
        raise FedVLError(
            f"Method '{name}' knows only the classes that it was trained on; use --protocol closed, or fed-mp or fedclip."
        )
