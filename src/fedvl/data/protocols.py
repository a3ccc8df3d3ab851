"""Who trains on what, and what is asked afterwards: the protocols, as rows of the dataset's two splits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvl.config import DataConfig
from fedvl.data.partition import Partition, few_shot, open_split, partition, partition_test
from fedvl.errors import FedVLError
from fedvl.seeding import numpy_generator

Integers = NDArray[np.int64]
VALIDATION_SHARE = 0.2  # of a new user's images in the open-vocabulary protocol; the rest is the test


class Domains(NamedTuple):
    """The number of the domain (a hospital, a vendor) that each row of a split belongs to."""

    train: Integers
    test: Integers


class Labels(NamedTuple):
    """What is known of the rows of both splits: labels below ``classes``, -1 for none, and domains if there are any."""

    train: Integers
    test: Integers
    classes: int
    domains: Domains | None = None


def number_domains(train: Sequence[str] | None, test: Sequence[str] | None) -> Domains | None:
    """Domains by number; None for a dataset that knows none."""
    if not train or not test:
        return None
    _, numbers = np.unique([*train, *test], return_inverse=True)
    return Domains(*np.split(numbers.astype(np.int64), [len(train)]))


@dataclass(frozen=True)
class Deal:
    """Rows and classes of training and of the questions; a class is a number of the dataset's."""

    clients: list[Integers]  # rows of the training split that each client holds
    trained_classes: Integers
    asked: Integers  # rows of the test split, in the order in which they are asked
    asked_classes: Integers
    validation: Integers  # rows of the test split for choosing settings by
    note: str
    parts: list[Integers] = field(default_factory=list)  # of ``asked``, by client, where each asks about its own


def closed(labels: Labels, data: DataConfig, seed: int) -> Deal:
    """All clients together know all classes, and the whole test split is asked."""
    return _closed(labels, data, seed)[0]


def personal(labels: Labels, data: DataConfig, seed: int) -> Deal:
    """Every client asks about its own part of the test split, which is dealt by the draw of the training split."""
    deal, drawn = _closed(labels, data, seed)
    return replace(deal, parts=partition_test(drawn, _dealt_by(labels, data).test).clients)


def _closed(labels: Labels, data: DataConfig, seed: int) -> tuple[Deal, Partition]:
    kept = _kept(labels, data, seed)
    drawn = partition(_dealt_by(labels, data).train[kept], data.partition, data.clients, seed, data.minimum)
    everything = np.arange(labels.classes)
    nothing = np.array([], dtype=np.int64)
    rows = [kept[client] for client in drawn.clients]
    return Deal(rows, everything, np.arange(len(labels.test)), everything, nothing, drawn.note), drawn


def _kept(labels: Labels, data: DataConfig, seed: int) -> Integers:
    return few_shot(labels.train, data.shots, seed) if data.shots else np.arange(len(labels.train))


def _dealt_by(labels: Labels, data: DataConfig) -> Labels | Domains:
    """What a partition goes by: domains if it is of domains, and else labels."""
    if data.partition != "domains":
        return labels
    if labels.domains is None:
        raise FedVLError("Partition 'domains' needs samples of several domains, and this dataset has none; use iid.")
    return labels.domains


def open_vocabulary(labels: Labels, data: DataConfig, seed: int) -> Deal:
    """Every client has classes of its own, and a new user asks about classes that nobody has (Fed-MP, section 5.1)."""
    owned, asked_classes = open_split(labels.classes, data.clients, seed)
    kept = _kept(labels, data, seed)
    rows = [kept[np.isin(labels.train[kept], mine)] for mine in owned]
    pool = np.flatnonzero(np.isin(labels.test, asked_classes))
    if not len(pool):
        raise FedVLError(
            "No test image belongs to the classes that were held back for the questions; use more test images."
        )
    pool = numpy_generator(seed, "questions").permutation(pool)
    validation, asked = np.split(pool, [int(VALIDATION_SHARE * len(pool))])
    note = (
        f"open vocabulary: each of {data.clients} clients holds {len(owned[0])} classes of its own, "
        f"and {len(asked_classes)} classes that nobody holds are asked"
    )
    return Deal(rows, np.sort(np.concatenate(owned)), asked, np.sort(asked_classes), validation, note)


def renumbered(labels: Integers, classes: Integers) -> Integers:
    """Return labels as positions in ``classes``; -1 for one that is not there."""
    position = np.full(max(int(labels.max(initial=0)), int(classes.max())) + 2, -1)
    position[classes] = np.arange(len(classes))
    return position[labels]  # a label of -1 finds the last place, which is -1


def only_test(labels: Labels, clients: int) -> Deal:
    """All test images are queried; who holds training images, the parties of a federation know."""
    everything, nothing = np.arange(labels.classes), np.array([], dtype=np.int64)
    return Deal([nothing] * clients, everything, np.arange(len(labels.test)), everything, nothing, "")


# Which modality a sample lacks changes nothing of who holds it.
PROTOCOLS = {"closed": closed, "open": open_vocabulary, "personal": personal, "missing": closed}
