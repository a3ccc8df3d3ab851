"""The card of an exported model: where it comes from, computed from its run's folder alone."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from fedvl.config import BY_CLIENT, Experiment, Settings
from fedvl.data.catalogue import lookup
from fedvl.display import visible
from fedvl.evaluation.statistics import wilson
from fedvl.files import file_sha256
from fedvl.methods import load_method
from fedvl.methods.base import Method
from fedvl.models import EMBEDDED
from fedvl.report import privacy
from fedvl.runs.contents import Result, Withdrawal
from fedvl.runs.folder import RunFolder
from fedvl.version import __version__

CARD_SCHEMA = 1
UNKNOWN = "not known to FedVL; ask its owners"
NAMES_SHOWN = 20


@dataclass(frozen=True)
class UsedMethod:
    name: str
    preset: str
    file_sha256: str | None
    options: Settings


@dataclass(frozen=True)
class Pretrained:
    name: str
    fingerprint: str | None
    licence: str
    embedded: bool


@dataclass(frozen=True)
class TrainingData:
    dataset: str
    licence: str
    trained_classes: list[str]
    training_images: int | None  # None where only the parties know


@dataclass(frozen=True)
class Exported:
    classes: list[str]
    tested: bool  # whether the accuracy is that of this export
    client: int | None
    files_sha256: dict[str, str]


@dataclass(frozen=True)
class Participation:
    """The clients: names where they are parties, and how often each answered."""

    simulated: bool
    exported_by: str | None
    clients: int
    parties: list[str]
    rounds: int | None
    answered: dict[str, int]
    missed: dict[str, int]
    refused: dict[str, int]
    withdrawn: list[int]
    partition: str | None
    secure_sum: bool
    least_clients: int | None
    robust: str
    merging: str
    attack: str | None


@dataclass(frozen=True)
class SpentBudget:
    """The spent budget, in words too, and what it does not cover."""

    unit: str
    epsilon: float
    delta: float
    sampling: str
    statement: str
    assumes: list[str]
    not_covered: list[str]


@dataclass(frozen=True)
class Share:
    percent: float
    interval: list[float]

    @classmethod
    def of(cls, hits: int, images: int) -> Self:
        percent = 100 * hits / images
        return cls(percent, list(wilson(percent, images)))


@dataclass(frozen=True)
class Accuracy:
    """Accuracies with intervals, of all tested images together."""

    protocol: str | None
    images: int
    of: str  # client, if they are of one
    percent: float
    interval: list[float]
    mean_over_clients: float | None
    zero_shot: Share | None

    @classmethod
    def counted(
        cls,
        protocol: str | None,
        images: int,
        hits: int,
        zero_shot: int | None,
        of: str = "",
        mean: float | None = None,
    ) -> Self:
        """Return the accuracy of numbers of correct images, and of zero-shot."""
        own = Share.of(hits, images)
        before = None if zero_shot is None else Share.of(zero_shot, images)
        return cls(protocol, images, of, own.percent, own.interval, mean, before)


@dataclass(frozen=True)
class WithdrawnClient:
    """A withdrawal without folders of this machine, and which of its models this is."""

    client: int
    party: str | None
    images: int
    difference: float
    difference_interval: list[float]
    changed: float
    this_model: Literal["with", "without"]
    run_sha256: str | None
    without_sha256: str | None


@dataclass(frozen=True)
class Card:
    """An exported model: method, data, who took part, hashes, budget, accuracy."""

    schema: int
    fedvl_version: str
    trained: str | None
    method: UsedMethod
    base_model: Pretrained
    data: TrainingData
    exported: Exported
    federation: Participation
    seed: int
    hashes: dict[str, str | None]
    privacy: SpentBudget | None
    accuracy: Accuracy | None
    withdrawals: list[WithdrawnClient]


def lineage(
    folder: RunFolder,
    classes: Sequence[str],
    client: int | None,
    files_sha256: dict[str, str],
    measured: Accuracy | None = None,
) -> Card:
    """Describe an exported model.

    ``measured`` is the accuracy of what was exported; if absent, the run's own figure is given.
    """
    result, experiment = folder.result, folder.experiment
    federation = who_took_part(folder)
    dataset, model = Path(experiment.data.dataset), experiment.model.name
    entry, embedded = lookup(dataset.stem), model in EMBEDDED
    return Card(
        schema=CARD_SCHEMA,
        fedvl_version=__version__,
        trained=result.finished,
        method=UsedMethod(
            experiment.method.label, experiment.method.preset, experiment.method.sha256, experiment.method.options
        ),
        base_model=Pretrained(
            name=model if embedded else model_name(model),
            fingerprint=result.model_fingerprint,
            licence="Apache-2.0, as FedVL" if embedded else UNKNOWN,
            embedded=embedded,
        ),
        data=TrainingData(
            dataset=entry.name if entry else dataset.name,
            licence=entry.licence if entry else UNKNOWN,
            trained_classes=list(result.partition_class_names or result.class_names),
            training_images=None if federation.exported_by else sum(map(sum, result.partition_counts)) or None,
        ),
        exported=Exported(list(classes), measured is not None, client, files_sha256),
        federation=federation,
        seed=experiment.seed,
        hashes={
            "state": result.state_sha256,
            "config.toml": file_sha256(folder.file("config.toml")),
            **dict[str, str](result.files_sha256.items()),
        },
        privacy=budget(folder),
        accuracy=measured or accuracy(result),
        withdrawals=[withdrawal(each, result) for each in folder.withdrawals],
    )


def model_name(model: str) -> str:
    """Return the name of a model without the folders of this machine."""
    return model if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and not Path(model).exists() else Path(model).name


def who_took_part(folder: RunFolder) -> Participation:
    settings, records, result = folder.experiment.federation, folder.rounds, folder.result
    names = folder.status.parties if folder.federation is not None else []
    asked = Counter(client for record in records for client in record.cohort)
    missed = Counter(client for record in records for client in record.dropped)
    refused = Counter(item.client for record in records for item in record.refused)

    def by_client(counts: Counter[int]) -> dict[str, int]:
        return {party or (names[c] if c < len(names) else str(c)): counts[c] for c in sorted(counts) if counts[c]}

    party = result.party
    simulated = folder.federation is None and party is None
    return Participation(
        simulated=simulated,
        exported_by=party,
        clients=folder.experiment.data.clients,
        parties=names,
        rounds=result.rounds,
        answered=by_client(asked - missed),
        missed=by_client(missed),
        refused=by_client(refused),
        withdrawn=list(settings.withdrawn),
        partition=folder.experiment.data.partition if simulated else None,
        secure_sum=settings.secure_sum,
        least_clients=settings.least_clients if settings.secure_sum else None,
        robust=settings.robust,
        merging=merging(folder.experiment),
        attack=settings.attack,
    )


def merging(experiment: Experiment) -> str:
    """Say how the server makes one model of what clients send."""
    name, method = experiment.method.label, load_method(experiment.method.name)
    if method.scope == "pooled":
        return "none: all images were in one place"
    if method.exchanges is not None:
        return f"sums of statistics, solved by {name}"
    if method.merge is not Method.merge:
        return f"{name}'s own rule"
    rule = experiment.federation.robust
    return f"{rule} of the updates, then {name}'s step of the server" if method.step is not Method.step else rule


def budget(folder: RunFolder) -> SpentBudget | None:
    spent = folder.result.privacy
    if not spent:
        return None
    return SpentBudget(
        unit=spent.unit,
        epsilon=spent.epsilon,
        delta=spent.delta,
        sampling=spent.sampling,
        statement=privacy.statement(folder.result),
        assumes=privacy.sentences(folder.result),
        not_covered=privacy.not_covered(folder.result),
    )


def accuracy(result: Result) -> Accuracy | None:
    confusion = result.confusion
    images = sum(map(sum, confusion))
    if not images:
        return None
    hits = sum(confusion[c][c] for c in range(len(confusion)))
    zero_shot = (
        result.zero_shot_accuracy if result.zero_shot_weighted_accuracy is None else result.zero_shot_weighted_accuracy
    )
    mean = result.accuracy if result.protocol in BY_CLIENT else None
    before = None if zero_shot is None else round(zero_shot * images / 100)
    return Accuracy.counted(result.protocol, images, hits, before, mean=mean)


def withdrawal(each: Withdrawal, result: Result) -> WithdrawnClient:
    return WithdrawnClient(
        client=each.client,
        party=each.party,
        images=each.images,
        difference=each.difference,
        difference_interval=each.difference_interval,
        changed=each.changed,
        this_model="without" if each.without.state_sha256 == result.state_sha256 else "with",
        run_sha256=each.run.state_sha256,
        without_sha256=each.without.state_sha256,
    )


# --- as Markdown


def card_text(title: str, card: Card) -> str:
    """Return the card in Markdown; names come from files of others, and are shown as plain text."""
    base, data, exported = card.base_model, card.data, card.exported
    rows = {
        "Method": f"{plain(card.method.name)}, preset {plain(card.method.preset)}",
        "Base model": f"{plain(base.name)}, frozen; fingerprint {base.fingerprint}",
        "Data": f"{plain(data.dataset)}; {trained_on(data)}",
        "Classes": listed(exported.classes),
        "Clients": clients_line(card.federation),
        "Rounds": str(card.federation.rounds),
        **participation(card.federation),
        "Secure sums": secure_line(card.federation),
        "Rule of merging": plain(card.federation.merging),
        "Privacy budget": privacy_line(card),
        "Seed": str(card.seed),
        "Accuracy": accuracy_line(card.accuracy),
        "Zero-shot accuracy": zero_shot_line(card.accuracy),
        "Licence of the model": plain(base.licence),
        "Licence of the images": plain(data.licence),
        "Trained": f"{plain(str(card.trained))}, FedVL {plain(card.fedvl_version)}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    known = {**card.hashes, **{f"{name} of this folder": sha for name, sha in exported.files_sha256.items()}}
    hashes = "\n".join(f"| {plain(name)} | {value} |" for name, value in known.items())
    return (
        f"# Model card of {plain(title)}\n\n| | |\n|---|---|\n{table}\n\n"
        "## Hashes\n\nSHA-256 of what was trained and of the run's files, as its folder has them, and of the files beside "
        f"this card.\n\n| | |\n|---|---|\n{hashes}\n\n"
        f"{withdrawn_text(card)}## Intended use\n\n{bullets(intended(card))}\n\n"
        f"## Not claimed\n\n{bullets(not_claimed(card))}\n"
    )


def plain(text: str) -> str:
    """Return text in which Markdown and HTML mean nothing, on one line."""
    return re.sub(r"([\\`*_{}\[\]()#!|<>~&])", r"\\\1", visible(" ".join(text.split())))


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(plain(name) for name in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more in classes.json" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)}: {shown}{more}"


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def trained_on(data: TrainingData) -> str:
    images = data.training_images
    return f"{images:,} training images" if images else "how many training images, the parties know"


def clients_line(federation: Participation) -> str:
    if federation.exported_by:
        return f"{federation.clients}; this is the model of {plain(federation.exported_by)}"
    if federation.simulated:
        return f"{federation.clients} in a simulation, partition {plain(str(federation.partition))}"
    return ", ".join(plain(name) for name in federation.parties) or str(federation.clients)


def participation(federation: Participation) -> dict[str, str]:
    """Return lines on who answered, dropped out, was refused or withdrew."""
    if not federation.answered:
        return {}
    told = {"Answers": counted(federation.answered)}
    told["Rounds missed"] = counted(federation.missed) or "none"
    told["Refused updates"] = counted(federation.refused) or "none"
    if federation.withdrawn:
        told["Withdrawn"] = f"by number: {', '.join(map(str, federation.withdrawn))}"
    if federation.attack:
        told["Simulated attack"] = plain(federation.attack)
    return told


def counted(counts: dict[str, int]) -> str:
    first = [f"{plain(name)}: {count}" for name, count in list(counts.items())[:NAMES_SHOWN]]
    more = f" and {len(counts) - NAMES_SHOWN} more clients" if len(counts) > NAMES_SHOWN else ""
    return ", ".join(first) + more


def secure_line(federation: Participation) -> str:
    if not federation.secure_sum:
        return "off: the server saw the update of each client"
    return f"on: the server learned sums over at least {federation.least_clients} clients"


def privacy_line(card: Card) -> str:
    budget = card.privacy
    if budget is None:
        return "none: no noise was added, and no bound on what the model tells of an image or a client is claimed"
    return " ".join(plain(part) for part in (f"{budget.statement}.", *budget.assumes))


def accuracy_line(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return "not tested"
    mean = accuracy.mean_over_clients
    told = "" if mean is None else f"; {mean:.2f} % as the mean over clients, each on its own images"
    return f"{percent(accuracy)} of {accuracy.images:,} test images{accuracy.of}, protocol {plain(str(accuracy.protocol))}{told}"


def zero_shot_line(accuracy: Accuracy | None) -> str:
    if accuracy is None or accuracy.zero_shot is None:
        return "not tested"
    return f"{percent(accuracy.zero_shot)} of the same images, by the base model alone"


def percent(found: Accuracy | Share) -> str:
    low, high = found.interval
    return f"{found.percent:.2f} % (95 % interval {low:.2f} to {high:.2f})"


def withdrawn_text(card: Card) -> str:
    if not card.withdrawals:
        return ""
    lines = []
    for each in card.withdrawals:
        who, (low, high) = each.party or f"client {each.client}", each.difference_interval
        this = "without it" if each.this_model == "without" else "**with it: use the one without**"
        lines.append(
            f"{plain(who)} withdrew; this model is {this}. Leaving it out changed the accuracy by {each.difference:+.2f} "
            f"points (95 % interval {low:+.2f} to {high:+.2f}, {each.images:,} images) and "
            f"{each.changed:.2f} % of the answers."
        )
    return f"## Withdrawals\n\n{bullets(lines)}\n\n"


def intended(card: Card) -> list[str]:
    count, dataset = len(card.exported.classes), plain(card.data.dataset)
    return [
        f"To sort images like those of {dataset} into {count} classes, by people who first test it on images of their own.",
        "It always names one of these classes, also for an image of something else.",
    ]


def not_claimed(card: Card) -> list[str]:
    """Return what nobody has measured or proved about this model."""
    told = ["Accuracy on other images, cameras, places or groups of people: none of it was measured."]
    if not card.exported.tested:
        told.insert(0, "Accuracy of this export: the figure above is the run's own, of its own classes and models.")
    if card.privacy is None:
        told.append(
            "That nothing can be inferred about training images: `fedvl audit` tries attacks on a run's messages."
        )
    else:
        told.append("More privacy than the budget above says, and none for what it does not name as its unit.")
        if uncovered := card.privacy.not_covered:
            told.append(f"Privacy for what the budget does not cover: {plain(', '.join(uncovered))}.")
    if card.base_model.embedded:
        name = plain(card.base_model.name)
        told.append(f"Anything about larger models: {name} is a small model for trying things, and is not CLIP.")
    told.append("Fitness for decisions about people, such as a diagnosis: it has not been assessed.")
    return told
