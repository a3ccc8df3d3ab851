"""Protocols: which rows each client trains on, and which rows are queried."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from fedvl.config import DataConfig
from fedvl.data.partition import (
    Partition,
    few_shot,
    is_partition_file,
    long_tail,
    open_split,
    parse_spec,
    partition,
    partition_test,
    share_clients,
)
from fedvl.data.partition_file import TrainingImages, partition_from_file
from fedvl.errors import FedVLError
from fedvl.seeding import numpy_generator
from fedvl.tensors import IntArray

NO_ROWS = np.array([], dtype=np.int64)
VALIDATION_SHARE = 0.2  # of a new user's images, or of a new domain's; the rest is for the test


class Domains(NamedTuple):
    """The domain number (of a hospital, a vendor) of each row of both splits, and their names."""

    train: IntArray
    test: IntArray
    names: tuple[str, ...] = ()


class Labels(NamedTuple):
    """Labels of both splits, below ``classes`` or -1 for none, and domains if there are any.

    Of several datasets, each is a domain, and ``origins`` is the dataset's number of each class.
    ``groups`` is the number of each class's group, if the catalogue has groups. A partition file
    names ``images``.
    """

    train: IntArray
    test: IntArray
    classes: int
    domains: Domains | None = None
    origins: IntArray | None = None
    groups: IntArray | None = None
    images: TrainingImages | None = None


def number_domains(train: Sequence[str] | None, test: Sequence[str] | None) -> Domains | None:
    """Number the domains, or return None if the dataset has none."""
    if not train or not test:
        return None
    names, found = np.unique([*train, *test], return_inverse=True)
    numbers = found.astype(np.int64)
    return Domains(numbers[: len(train)], numbers[len(train) :], tuple(names.tolist()))


def number_origins(origins: Sequence[str]) -> IntArray | None:
    """Number the datasets of the classes in the order of their names, as domains; None of one."""
    return np.unique(origins, return_inverse=True)[1].astype(np.int64) if origins else None


class Queries(NamedTuple):
    """Rows of the test split, and the classes that are candidates for them."""

    rows: IntArray
    classes: IntArray


@dataclass(frozen=True)
class Assignment:
    """Rows and classes for training and for the test queries; classes are numbers."""

    clients: list[IntArray]  # rows of the training split that each client holds
    trained_classes: IntArray
    queried: (
        IntArray  # in the order of the queries; rows of the test split, and after its last those of the training split
    )
    queried_classes: IntArray
    validation: IntArray  # for choosing settings; rows as in ``queried``
    note: str
    parts: list[IntArray] = field(
        default_factory=list
    )  # rows of ``queried`` by client, if each has its own test images
    candidates: list[IntArray] = field(default_factory=list)  # classes of those rows, if not all are asked among
    new: Queries | None = None  # what is asked besides, about classes that nobody trains on
    lists: list[IntArray] = field(default_factory=list)  # classes that each client knows of, if it does not know all


def closed(labels: Labels, data: DataConfig, seed: int) -> Assignment:
    """Partition the training split among the clients and query the whole test split."""
    return _closed(labels, data, seed)[0]


def with_additions(assignment: Assignment, trained: Sequence[IntArray], tested: IntArray, classes: int) -> Assignment:
    """Give clients rows that were added later: ``trained`` by client, and the rows to query."""
    rows = [np.concatenate([own, more]) for own, more in zip_longest(assignment.clients, trained, fillvalue=NO_ROWS)]
    everything = np.arange(classes)
    queried = np.concatenate([assignment.queried, tested])
    return replace(assignment, clients=rows, trained_classes=everything, queried=queried, queried_classes=everything)


def personal(labels: Labels, data: DataConfig, seed: int) -> Assignment:
    """Query each client's own test images, split by the draw that split the training images."""
    assignment, drawn = _closed(labels, data, seed)
    parts = partition_test(drawn, _partition_by(labels, drawn.spec).test).clients
    if labels.origins is None:
        return replace(assignment, parts=parts)
    # a class without training images is tested by all, who then know of it
    both = zip(assignment.lists, parts, strict=True)
    return replace(assignment, parts=parts, candidates=[np.union1d(own, labels.test[part]) for own, part in both])


def _closed(labels: Labels, data: DataConfig, seed: int) -> tuple[Assignment, Partition]:
    kept = _kept(labels, data, seed)
    several = labels.origins is not None
    spec = _one_domain_each(data.partition, "several datasets") if several else data.partition
    drawn = _draw(labels, data, spec, kept, seed)
    everything = np.arange(labels.classes)
    nothing = np.array([], dtype=np.int64)
    rows = [kept[client] for client in drawn.clients]
    lists = [np.unique(labels.train[own]) for own in rows] if several else []
    queried = np.arange(len(labels.test))
    return Assignment(rows, everything, queried, everything, nothing, drawn.note, lists=lists), drawn


def _one_domain_each(spec: str, what: str) -> str:
    """Return the partition among clients of one domain each, as the given one says."""
    if spec.startswith("domains") or is_partition_file(spec):
        return spec
    scheme = parse_spec(spec)[0]
    if scheme not in ("iid", "dirichlet", "disjoint"):
        raise FedVLError(
            f"Clients of {what} have one domain each, which partition '{spec}' cannot divide; "
            "use iid, dirichlet:ALPHA, disjoint, domains, domains+dirichlet:ALPHA or domains+disjoint."
        )
    return "domains" if scheme == "iid" else f"domains+{spec}"


def _kept(labels: Labels, data: DataConfig, seed: int) -> IntArray:
    """Return the training images that clients share: the long tail's, and the shots of each."""
    kept = long_tail(labels.train, labels.classes, data.long_tail, seed) if data.long_tail else None
    kept = np.arange(len(labels.train)) if kept is None else kept
    return kept[few_shot(labels.train[kept], data.shots, seed)] if data.shots else kept


def with_client_shots(assignment: Assignment, labels: IntArray, shots: int | None, seed: int) -> Assignment:
    """Keep this number of images per class at each client; empty clients keep their index."""
    if shots is None:
        return assignment
    clients = [rows[few_shot(labels[rows], shots, seed)] if len(rows) else rows for rows in assignment.clients]
    return replace(assignment, clients=clients)


def _draw(labels: Labels, data: DataConfig, spec: str, rows: IntArray, seed: int) -> Partition:
    if is_partition_file(spec):
        assert labels.images is not None, "preparation knows what the training images are called"
        return partition_from_file(spec, labels.images, labels.train, rows, data.clients, seed)
    numbers = _partition_by(labels, spec).train[rows]
    return partition(numbers, spec, data.clients, seed, data.minimum, labels.classes)


def _partition_by(labels: Labels, spec: str) -> Labels | Domains:
    """Return numbers to partition by: domains for `domains`, both for `domains+`, else labels.

    For `pachinko` they are as for `domains+`, with groups of classes as domains.
    """
    if is_partition_file(spec):
        return labels
    if spec.startswith("pachinko"):
        return _in_groups(labels, spec)
    if not spec.startswith("domains"):
        return labels
    domains = _domains_of(labels, f"Partition '{spec}'", "use iid")
    if spec == "domains":
        return domains
    train, test = (
        np.where(label < 0, -1, domain * labels.classes + label)
        for domain, label in ((domains.train, labels.train), (domains.test, labels.test))
    )
    return Domains(train, test)


def _in_groups(labels: Labels, spec: str) -> Domains:
    if labels.groups is None:
        raise FedVLError(
            f"Partition '{spec}' needs classes in groups, which the catalogue has for cifar100 alone; use dirichlet:ALPHA."
        )
    groups = labels.groups
    train, test = (np.where(part < 0, -1, groups[part] * labels.classes + part) for part in (labels.train, labels.test))
    return Domains(train, test)


def _domains_of(labels: Labels, what: str, advice: str) -> Domains:
    if labels.domains is None:
        raise FedVLError(f"{what} needs samples of several domains, and this dataset has none; {advice}.")
    return labels.domains


def open_vocabulary(labels: Labels, data: DataConfig, seed: int) -> Assignment:
    """Give each client its own classes and query all images of the others (Fed-MP, section 5.1)."""
    owned, queried_classes = open_split(labels.classes, data.clients, seed, data.asked_classes)
    kept = _kept(labels, data, seed)
    rows = [kept[np.isin(labels.train[kept], mine)] for mine in owned]
    pool = np.flatnonzero(np.isin(np.concatenate([labels.test, labels.train]), queried_classes))
    if not len(pool):
        raise FedVLError("No image belongs to the classes held out for the queries; use more images.")
    validation, queried = _queries(pool, labels, data, seed)
    fewest, most = min(map(len, owned)), max(map(len, owned))
    held = str(most) if fewest == most else f"{fewest} or {most}"
    note = (
        f"open vocabulary: each of {data.clients} clients holds {held} classes of its own, "
        f"and {len(queried_classes)} classes that no client holds are queried"
    )
    return Assignment(rows, np.sort(np.concatenate(owned)), queried, np.sort(queried_classes), validation, note)


def _queries(pool: IntArray, labels: Labels, data: DataConfig, seed: int) -> tuple[IntArray, IntArray]:
    """Shuffle the images of a new user, and set a fifth of them apart."""
    if data.test_shots:
        both = np.concatenate([labels.test, labels.train])
        pool = pool[few_shot(both[pool], data.test_shots, seed=0)]
    pool = numpy_generator(seed, "questions").permutation(pool)
    validation, queried = np.split(pool, [int(VALIDATION_SHARE * len(pool))])
    return validation, queried


def base_to_new(labels: Labels, data: DataConfig, seed: int) -> Assignment:
    """Deal the first half of the classes to the clients; they query their own, all these, the rest.

    The classes are halved in the order of their labels (CoOp) and dealt by the seed (FedPGP); of
    several datasets each is halved, and dealt to clients of its own (FedTPG).
    """
    datasets = [np.arange(labels.classes)]
    if labels.origins is not None:
        datasets = [np.flatnonzero(labels.origins == number) for number in np.unique(labels.origins)]
    halves = [np.array_split(classes, 2) for classes in datasets]  # the larger half is base
    base, new = (np.concatenate([half[part] for half in halves]) for part in (0, 1))
    half, most = len(base), sum(max(1, len(classes) // 2) for classes, _ in halves)
    if data.clients < len(datasets):
        raise FedVLError(
            f"Each client has classes of one of {len(datasets)} datasets; use {len(datasets)} or more clients."
        )
    shares = share_clients([len(classes) for classes, _ in halves], data.clients)
    if any(2 * count > len(classes) for count, (classes, _) in zip(shares, halves, strict=True)):
        raise FedVLError(  # among one class there is nothing to choose
            f"The base-to-new protocol deals {half} of {labels.classes} classes to the clients, two each at least, and "
            f"there are {data.clients} clients; use {most} or fewer, and three classes or more."
        )
    generator = numpy_generator(seed, "base-to-new", half, data.clients)
    dealt = [(generator.permutation(classes), count) for count, (classes, _) in zip(shares, halves, strict=True)]
    owned = [np.sort(mine) for classes, count in dealt for mine in np.array_split(classes, count)]
    kept = _kept(labels, data, seed)
    rows = [kept[np.isin(labels.train[kept], mine)] for mine in owned]
    # in a mixed order, for a method may remember images; the same for all seeds
    mixed = numpy_generator(0, "questions").permutation(len(labels.test))
    queried, asked_new = (mixed[np.isin(labels.test[mixed], classes)] for classes in (base, new))
    if not len(queried) or not len(asked_new):
        raise FedVLError("A half of the classes has no test image, so that nothing can be asked about it; add some.")
    parts = [np.flatnonzero(np.isin(labels.test[queried], mine)) for mine in owned]
    of_each = f"of {len(datasets)} datasets " if len(datasets) > 1 else ""
    note = (
        f"base-to-new: {of_each}the first {half} of {labels.classes} classes are dealt to {data.clients} clients, "
        f"{min(map(len, owned))} or more to each; no client holds the other {len(new)}"
    )
    nothing = np.array([], dtype=np.int64)
    lists = [] if labels.origins is None else owned
    return Assignment(rows, base, queried, base, nothing, note, parts, owned, Queries(asked_new, new), lists)


def leave_one_domain_out(labels: Labels, data: DataConfig, seed: int) -> Assignment:
    """Give each client images of one domain, and query all images of a domain that is left out."""
    domains = _domains_of(
        labels,
        "The leave-one-domain-out protocol",
        "use emoji (fedvl data get emoji) or a manifest with a column domain",
    )
    target = _target(domains.names, data.target_domain, seed)
    spec = _one_domain_each(data.partition, "the leave-one-domain-out protocol")
    kept = _kept(labels, data, seed)
    source = kept[domains.train[kept] != target]
    drawn = _draw(labels, data, spec, source, seed)
    pool = np.flatnonzero(np.concatenate([domains.test, domains.train]) == target)
    validation, queried = _queries(pool, labels, data, seed)
    everything = np.arange(labels.classes)
    rows = [source[client] for client in drawn.clients]
    note = f"Domain {domains.names[target]} is left out for the test. {drawn.note}"
    return Assignment(rows, everything, queried, everything, validation, note)


def _target(names: tuple[str, ...], wanted: str | None, seed: int) -> int:
    """Return the domain to leave out: the one named, or else the seed's in the order of names."""
    if len(names) < 2:
        raise FedVLError("There is one domain alone, so that none can be left out; use --protocol closed.")
    if wanted is not None and wanted not in names:
        raise FedVLError(
            f"There is no domain '{wanted}' to leave out (data.target_domain); there are {', '.join(names)}."
        )
    return seed % len(names) if wanted is None else names.index(wanted)


def renumbered(labels: IntArray, classes: IntArray) -> IntArray:
    """Return labels as positions in ``classes``; -1 for one that is not there."""
    position = np.full(max(int(labels.max(initial=0)), int(classes.max())) + 2, -1)
    position[classes] = np.arange(len(classes))
    return position[labels]  # a label of -1 finds the last place, which is -1


def only_test(labels: Labels, clients: int) -> Assignment:
    """All test images are queried; who holds training images, the parties of a federation know."""
    everything, nothing = np.arange(labels.classes), np.array([], dtype=np.int64)
    return Assignment([nothing] * clients, everything, np.arange(len(labels.test)), everything, nothing, "")


# Missing modalities do not change which client holds a sample.
PROTOCOLS = {
    "closed": closed,
    "open": open_vocabulary,
    "personal": personal,
    "missing": closed,
    "base-to-new": base_to_new,
    "leave-one-domain-out": leave_one_domain_out,
}
