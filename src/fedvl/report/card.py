"""The card of an exported model: where it comes from, computed from its run's folder alone."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from markupsafe import Markup

from fedvl.config import BY_CLIENT, Experiment, Settings
from fedvl.data.catalogue import lookup
from fedvl.display import visible
from fedvl.evaluation.statistics import wilson
from fedvl.files import file_sha256
from fedvl.methods import load_method
from fedvl.methods.base import Method
from fedvl.models import EMBEDDED
from fedvl.report import privacy
from fedvl.report.page import templates
from fedvl.runs.contents import Result, Withdrawal
from fedvl.runs.folder import RunFolder
from fedvl.version import __version__

CARD_SCHEMA = 1
UNKNOWN = "not known to FedVL; ask its owners"
NAMES_SHOWN = 20
RECALLS_SHOWN = 100


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
    revoked: dict[str, str]  # parties whose key was revoked, with the time
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
    calibration_error: float | None  # in points, of the run's test
    recall: dict[str, float | None]  # of each class, in percent, of the run's test


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
        calibration_error=result.ece,
        recall=dict(zip(result.class_names, result.per_class_recall, strict=True)) if result.per_class_recall else {},
    )


def model_name(model: str) -> str:
    """Return the name of a model without the folders of this machine."""
    return model if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and not Path(model).exists() else Path(model).name


def who_took_part(folder: RunFolder) -> Participation:
    settings, records, result = folder.experiment.federation, folder.rounds, folder.result
    names = folder.status.parties if folder.federation is not None else []
    revoked = {party.name: party.revoked for party in result.parties if party.revoked}
    absent = {party.name for party in result.parties if not party.took_part}
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
        parties=[name for name in names if name not in absent],
        revoked=revoked,
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
    """Return the card in Markdown; names come from files of others, and are plain text there."""
    markdown = templates().overlay(autoescape=False, finalize=as_plain)
    return markdown.get_template("model_card.md.j2").render(
        title=title, card=card, shown=NAMES_SHOWN, recalls_shown=RECALLS_SHOWN
    )


def as_plain(value: object) -> object:
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def plain(text: str) -> str:
    """Return text in which Markdown and HTML mean nothing, on one line."""
    return re.sub(r"([\\`*_{}\[\]()#!|<>~&])", r"\\\1", visible(" ".join(text.split())))
