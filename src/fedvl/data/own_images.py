"""A client's own images, under the class list of its federation."""

from pathlib import Path

import numpy as np

from fedvl.data.assemble import SPLIT_NAMES, Table, units_of_rows
from fedvl.data.catalogue import class_key, lookup
from fedvl.data.sources import Home, is_flat, open_dataset, read_flat, read_path
from fedvl.data.stores import Dataset, Split
from fedvl.errors import FedVLError
from fedvl.tensors import IntArray

SHOWN = 5


def open_own(
    name: str, class_names: tuple[str, ...], templates: dict[str, tuple[str, ...]], known_only: bool = False
) -> Dataset:
    """Open a path or named dataset; all but its test split is for training, labelled or not.

    ``known_only``: images of other classes and empty class folders are left out.
    """
    if name == Path(name).name and lookup(name):
        known = open_dataset(name)
        number = class_numbers(list(known.class_names), class_names, name)
        splits = {
            part: Split(split.store, split.rows, np.append(number, -1)[split.labels], split.texts, units=split.units)
            for part, split in known.splits.items()
        }
        return Dataset(known.name, class_names, templates, splits, known.notes)
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise FedVLError(f"There is no folder or file {name}; give the path of your images.")
    if path.is_dir():
        Home(path, None).check_links()
    table = read_flat(path) if is_flat(path) else read_path(path, None, [] if known_only else None)
    keys = {class_key(each) for each in class_names}
    kept = [not known_only or not label or class_key(label) in keys for label in table.labels]
    named = [label if keep else "" for label, keep in zip(table.labels, kept, strict=True)]
    labels = class_numbers(named, class_names, name)
    tested = np.array([SPLIT_NAMES.get(split.strip().casefold()) == "test" for split in table.splits])
    splits = {
        part: split_of_rows(table, labels, np.flatnonzero((tested == (part == "test")) & kept))
        for part in (("train", "test") if tested.any() else ("train",))
    }
    return Dataset(path.stem, class_names, templates, splits, tuple(table.notes))


def class_numbers(labels: list[str], class_names: tuple[str, ...], where: str) -> IntArray:
    """Return the federation's number of each label, ignoring case and punctuation; -1: no label."""
    known = {class_key(class_name): number for number, class_name in enumerate(class_names)}
    strangers = sorted({label for label in labels if label and class_key(label) not in known})
    if strangers:
        raise FedVLError(
            f"{where} has classes that this federation does not know ({few(strangers)}); "
            f"rename them to some of its own ({few(class_names)}), or leave them out."
        )
    return np.array([known[class_key(label)] if label else -1 for label in labels], np.int64)


def split_of_rows(table: Table, labels: IntArray, rows: IntArray) -> Split:
    texts = None if table.texts is None else tuple(table.texts[row] for row in rows)
    return Split(table.store, rows, labels[rows], texts, units=units_of_rows(table.units, rows))


def few(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
