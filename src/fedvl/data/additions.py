"""Images that are added to a dataset after a run, and the clients that hold them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedvl.config import DataConfig
from fedvl.data.stores import Dataset, join_splits, splits_of
from fedvl.errors import FedVLError

NEW = "new"  # the client of images that none of the others held before


def parse_addition(addition: str) -> tuple[int | None, str]:
    """Return the client of added images, None for a new one, and their source."""
    client, equals, source = addition.partition("=")
    if not (equals and source and (client == NEW or client.isdecimal())):
        raise FedVLError(f"'{addition}' is not CLIENT=SOURCE; write it as {NEW}=more/ or as 3=more/.")
    return (None if client == NEW else int(client)), source


def owners_of(data: DataConfig) -> list[int | None]:
    """Return the client of each addition; None: a new one."""
    owners = [owner for owner, _ in map(parse_addition, data.additions)]
    if strangers := [owner for owner in owners if owner is not None and owner >= data.clients - owners.count(None)]:
        raise FedVLError(f"There is no client {strangers[0]} to add images to; write new=SOURCE for a new client.")
    return owners


def extend(base: Dataset, additions: Sequence[Dataset]) -> Dataset:
    """Add images to a dataset; classes of other names follow the known ones."""
    everything = (base, *additions)
    names = list(dict.fromkeys(name for dataset in everything for name in dataset.class_names))
    if base.origins or not {"train", "test"} <= base.splits.keys():
        raise FedVLError(f"Images cannot be added to '{base.name}'; it must be one dataset with labels.")
    if without := [dataset.name for dataset in additions if not len(dataset.splits.get("train", ()))]:
        raise FedVLError(
            f"'{without[0]}' has no training images to add; give a folder with a sub-folder of each class."
        )
    splits = {}
    for part in ("train", "test"):
        present = [dataset for dataset in everything if len(dataset.splits.get(part, ()))]
        numbers = [np.array([names.index(name) for name in each.class_names], np.int64) for each in present]
        splits[part] = join_splits(splits_of(present, part), numbers)
    notes = [f"{dataset.name}: {note}" for dataset in additions for note in dataset.notes]
    return replace(
        base, class_names=tuple(names), splits=splits, notes=(*base.notes, *notes), before=len(base.class_names)
    )
