"""Turn the rows of a source into a dataset: class names, splits, and what is left out."""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedvl.data.catalogue import CatalogueEntry, class_key, general_templates
from fedvl.data.stores import Dataset, ImageStore, Split
from fedvl.display import csv_cell
from fedvl.errors import FedVLError
from fedvl.tensors import IntArray

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("all", ""), "all"),
}
TEST_SHARE = 0.2
UNIT_COLUMNS = ("patient", "patient_id", "subject", "subject_id", "person", "user", "case")  # what tables call them


@dataclass
class Table:
    """Rows of a source as found; "" means no label, split, text, domain or unit."""

    where: str
    store: ImageStore
    labels: list[str]
    splits: list[str]
    texts: list[str] | None = None
    domains: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    units: dict[str, list[str]] = field(default_factory=dict)  # whose an image is, by column (``UNIT_COLUMNS``)


def is_held_out(content: bytes) -> bool:
    """Whether an image is for the test: its own bytes decide, so that no other moves it."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) < TEST_SHARE * 2**64


def hold_out_test(store: ImageStore, rows: IntArray, labels: IntArray) -> tuple[IntArray, IntArray]:
    """Return which of the rows are for training and which for the test.

    Rows without a label are for training, unless the test has the same image.
    """
    contents = [store.content(int(row)) for row in rows]
    tested = {content for content, label in zip(contents, labels, strict=True) if label >= 0 and is_held_out(content)}
    chosen = np.array([content in tested for content in contents], bool)
    return np.flatnonzero(~chosen), np.flatnonzero(chosen & (labels >= 0))


def assemble(name: str, table: Table, entry: CatalogueEntry | None = None) -> Dataset:
    """Build a dataset from a table: name the classes, choose the splits and check the result."""
    notes = list(table.notes)
    class_of = _name_classes(table, entry, notes)
    names = _order(set(class_of.values()), entry)
    if not names:
        raise FedVLError(f"{table.where} has no labels; put them in a column `label`, or the images in class folders.")
    if not entry and all(class_name.isdecimal() for class_name in names):
        notes.append("The class names are numbers, which tell the model little; call the classes by words.")
    number = {class_name: position for position, class_name in enumerate(names)}
    number[""] = -1
    class_of[""] = ""
    kept = np.array([row for row, label in enumerate(table.labels) if label in class_of], np.int64)
    labels = np.array([number[class_of[table.labels[row]]] for row in kept], np.int64)
    parts = _settle_splits(table, kept, labels, notes)
    _check(table.where, names, {part: labels[index] for part, index in parts.items()})
    splits = {
        part: Split(
            table.store,
            kept[index],
            labels[index],
            _take(table.texts, kept[index]),
            _take(table.domains, kept[index]),
            units=units_of_rows(table.units, kept[index]),
        )
        for part, index in parts.items()
    }
    templates = dict(entry.templates) if entry else general_templates()
    return Dataset(name, names, templates, splits, tuple(notes))


def only_classes(dataset: Dataset, names: Sequence[str]) -> Dataset:
    """Keep the images of these classes, in the dataset's order, and those without a label."""
    wanted, known = {class_key(name): name for name in names}, {class_key(name) for name in dataset.class_names}
    if strangers := [name for key, name in wanted.items() if key not in known]:
        raise FedVLError(f"'{dataset.name}' has no class {_few(strangers)}; it has {_few(dataset.class_names)}.")
    kept = [number for number, name in enumerate(dataset.class_names) if class_key(name) in wanted]
    new = np.full(len(dataset.class_names) + 1, len(kept), np.int64)  # the last is of rows without a label
    new[kept], new[-1] = np.arange(len(kept)), -1
    splits = {}
    for part, split in dataset.splits.items():
        labels = new[split.labels]
        rows = np.flatnonzero(labels < len(kept))
        texts, domains = (None if column is None else list(column) for column in (split.texts, split.domains))
        units = units_of_rows(split.units, rows)
        splits[part] = Split(
            split.store, split.rows[rows], labels[rows], _take(texts, rows), _take(domains, rows), units=units
        )
    class_names = tuple(dataset.class_names[number] for number in kept)
    _check(f"'{dataset.name}' with these classes", class_names, {part: own.labels for part, own in splits.items()})
    note = f"{len(kept)} of the {len(dataset.class_names)} classes were kept (data.classes)."
    return Dataset(dataset.name, class_names, dataset.templates, splits, (*dataset.notes, note))


def with_corrected_labels(dataset: Dataset, labels: Mapping[str, str], where: str) -> Dataset:
    """Replace the labels of the named images; leave out those with a blank one."""
    numbers = {class_key(name): number for number, name in enumerate(dataset.class_names)}
    wanted = dict(labels)
    splits, changed, dropped = {}, 0, 0
    for part, split in dataset.splits.items():
        new, kept = split.labels.copy(), []
        for index in range(len(split)):
            name = split.describe(index)
            label = wanted.pop(name, wanted.pop(str(csv_cell(name)), None))
            if label and class_key(label) not in numbers:
                raise FedVLError(
                    f"{where} gives {name} the label {label!r}, but '{dataset.name}' has other classes "
                    f"({_few(dataset.class_names)}); correct it, or add a class folder of that name."
                )
            if label == "":
                dropped += 1
                continue
            if label is not None:
                changed += int(new[index] != numbers[class_key(label)])
                new[index] = numbers[class_key(label)]
            kept.append(index)
        rows = np.array(kept, np.int64)
        texts, domains = (None if column is None else list(column) for column in (split.texts, split.domains))
        units = units_of_rows(split.units, rows)
        splits[part] = Split(
            split.store, split.rows[rows], new[rows], _take(texts, rows), _take(domains, rows), units=units
        )
    if wanted:
        raise FedVLError(
            f"{where} names {_few(wanted)}, which '{dataset.name}' does not have; write names as test.csv of a run has them."
        )
    _check(
        f"'{dataset.name}' with these labels", dataset.class_names, {part: own.labels for part, own in splits.items()}
    )
    note = f"{changed} labels were corrected and {dropped} images left out by {where}."
    return replace(dataset, splits=splits, notes=(*dataset.notes, note))


def plain_name(label: str) -> str:
    """Return a class name as used in prompts: underscores become spaces, Unicode is composed."""
    return " ".join(unicodedata.normalize("NFC", label).replace("_", " ").split())


def _name_classes(table: Table, entry: CatalogueEntry | None, notes: list[str]) -> dict[str, str]:
    """Map raw labels to class names.

    The catalogue's spelling wins, and labels that it ignores are absent.
    """
    known = {class_key(class_name): class_name for class_name in entry.class_names} if entry else {}
    known.update({class_key(raw): class_name for raw, class_name in entry.rename.items()} if entry else {})
    ignored = {class_key(raw) for raw in entry.ignore} if entry else set()
    class_of: dict[str, str] = {}
    taken: dict[str, str] = {}
    unlisted = []
    for raw in sorted(set(table.labels) - {""}):
        key = class_key(raw)
        if key and key in ignored:
            count = table.labels.count(raw)
            notes.append(f"{count} images of {raw!r} were left out: it is not one of the classes.")
            continue
        if known and key not in known:
            unlisted.append(raw)
        class_of[raw] = known.get(key) or plain_name(raw)
        if not class_of[raw]:
            raise FedVLError(f"{table.where} has the class name {raw!r}, which is blank; rename it.")
        other = taken.setdefault(class_of[raw].casefold(), raw)
        if other != raw:
            raise FedVLError(f"{table.where} has two names for one class, {other!r} and {raw!r}; rename one of them.")
    if unlisted and entry:
        notes.append(f"The catalogue does not list these classes of {entry.title}, which were kept: {_few(unlisted)}.")
    if entry and 0 < len(class_of) - len(unlisted) < len(entry.class_names):
        notes.append(f"{len(class_of) - len(unlisted)} of the {entry.classes} classes of {entry.title} are present.")
    return class_of


def _order(present: set[str], entry: CatalogueEntry | None) -> tuple[str, ...]:
    known = [class_name for class_name in entry.class_names if class_name in present] if entry else []
    return (*known, *sorted(present - set(known)))


def _settle_splits(table: Table, kept: IntArray, labels: IntArray, notes: list[str]) -> dict[str, IntArray]:
    """Return the positions within `kept` that belong to each split."""
    stated = np.array([SPLIT_NAMES.get(table.splits[row].strip().casefold(), "") for row in kept])
    explicit = bool({"train", "val", "test"} & set(stated.tolist()))
    # Where some rows name a split, a row marked `all` belongs to none.
    stated = np.where(stated == "all", "" if explicit else "train", stated)
    if left_out := int(np.sum(stated == "")):
        names = Counter(table.splits[row] or "(none)" for row in kept[stated == ""])
        notes.append(f"{left_out} images are in neither train, val nor test and were left out (split {_few(names)}).")
    parts = {part: np.flatnonzero(stated == part) for part in ("train", "val", "test") if part in stated}
    if "train" not in parts:
        raise FedVLError(f"{table.where} has no images to train on; mark some rows with the split `train`.")
    if "test" not in parts and "val" in parts:
        parts["test"] = parts.pop("val")
        notes.append("There is no test split, so the val split is used as the test split.")
    elif "test" not in parts:
        rows = parts["train"]
        train, test = hold_out_test(table.store, kept[rows], labels[rows])
        parts = {"train": rows[train], "test": rows[test]}
        _check_held_out(table, kept, labels, parts)
        if explicit:
            notes.append("There is no test split, so a fifth of the training images, chosen by content, is held out.")
    return parts


def _check_held_out(table: Table, kept: IntArray, labels: IntArray, parts: dict[str, IntArray]) -> None:
    """Refuse a test that chance left empty, and classes with nothing left to train on."""
    unmarked = "or mark some with the split `test`"
    if not len(parts["test"]):
        raise FedVLError(
            f"None of the {len(kept)} images of {table.where} is in the fifth that is held out by content; "
            f"add images, {unmarked}."
        )
    lost = np.setdiff1d(labels[parts["test"]], labels[parts["train"]])
    if len(lost) and not np.any(labels[parts["train"]] < 0):
        name = table.labels[kept[parts["test"]][labels[parts["test"]] == lost[0]][0]]
        count = int(np.sum(labels[parts["test"]] == lost[0]))
        which = "The one image" if count == 1 else f"All {count} images"
        raise FedVLError(
            f"{which} of {name!r} in {table.where} fell in the fifth that is held out by content, and none is left "
            f"to train on; add images of it, {unmarked}."
        )


def _check(where: str, names: tuple[str, ...], labels: dict[str, IntArray]) -> None:
    if len(names) < 2:
        raise FedVLError(f"{where} has only one class, {names[0]!r}; at least two classes are needed.")
    if np.any(labels["test"] < 0):
        raise FedVLError(f"{where} has test images without a label; give them one or leave them out.")
    trained = {-1, *labels["train"].tolist()}
    for part in sorted(labels):
        unknown = [names[label] for label in np.unique(labels[part]) if label not in trained]
        if unknown and not np.any(labels["train"] < 0):  # Unlabelled training rows may be of any class.
            raise FedVLError(
                f"{where} has classes in its {part} split that are missing from its train split: {_few(unknown)}."
            )


def _take(values: list[str] | None, rows: IntArray) -> tuple[str, ...] | None:
    return None if values is None else tuple(values[row] for row in rows)


def units_of_rows(units: Mapping[str, Sequence[str]], rows: IntArray) -> dict[str, tuple[str, ...]]:
    return {column: tuple(values[row] for row in rows) for column, values in units.items()}


def _few(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
