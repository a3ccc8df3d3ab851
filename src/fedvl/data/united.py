"""Several datasets as one: each keeps its own classes, and is a domain of the whole."""

from collections.abc import Sequence

import numpy as np

from fedvl.data.catalogue import general_templates
from fedvl.data.stores import Dataset, JoinedStore, Split
from fedvl.errors import FedVLError


def unite(datasets: Sequence[Dataset]) -> Dataset:
    """Join datasets: the classes of one after those of another, also where names are the same."""
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise FedVLError(f"'{'+'.join(names)}' names a dataset twice; name each once.")
    if incomplete := [dataset.name for dataset in datasets if not {"train", "test"} <= dataset.splits.keys()]:
        raise FedVLError(
            f"'{incomplete[0]}' has no labels, so that it cannot be one of several datasets; leave it out."
        )
    alike = all(dataset.templates == datasets[0].templates for dataset in datasets)
    notes = [f"{dataset.name}: {note}" for dataset in datasets for note in dataset.notes]
    notes += [] if alike else ["The datasets have different templates; the general ones are used for all."]
    return Dataset(
        "+".join(names),
        tuple(name for dataset in datasets for name in dataset.class_names),
        datasets[0].templates if alike else general_templates(),
        {part: _joined(datasets, part) for part in ("train", "test")},
        tuple(notes),
        tuple(dataset.name for dataset in datasets for _ in dataset.class_names),
    )


def _joined(datasets: Sequence[Dataset], part: str) -> Split:
    """Join one split of all; images without a label stay without."""
    splits = [dataset.splits[part] for dataset in datasets]
    images = np.cumsum([0, *(int(split.rows.max(initial=-1)) + 1 for split in splits)])[:-1]
    classes = np.cumsum([0, *(len(dataset.class_names) for dataset in datasets)])[:-1]
    texts = [split.texts for split in splits]
    return Split(
        JoinedStore([split.store for split in splits], images),
        np.concatenate([split.rows + first for split, first in zip(splits, images, strict=True)]),
        np.concatenate(
            [np.where(split.labels < 0, -1, split.labels + first) for split, first in zip(splits, classes, strict=True)]
        ),
        None if None in texts else tuple(text for own in texts for text in own or ()),
        tuple(dataset.name for dataset, split in zip(datasets, splits, strict=True) for _ in range(len(split))),
        tuple(splits),
    )
