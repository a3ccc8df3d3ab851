"""Check images before training: read each file once, and name what is wrong with which."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvl.data.assemble import SPLIT_NAMES, Table, plain_name
from fedvl.data.catalogue import lookup, suggestion
from fedvl.data.embedded import read_sheets
from fedvl.data.faults import FAULT_KINDS, MAX_NAMED, Fault, ShownFault
from fedvl.data.images import DIM, BadImage, Decoded
from fedvl.data.imported import open_model
from fedvl.data.similar import MAX_COMPARED, groups_alike, groups_equal, same_names, small_copy
from fedvl.data.sources import Home, dataset_path, default_data_root, how_to_get, is_flat, read_flat, read_path
from fedvl.data.zero_shot_check import OF_LABELS, OF_POSITION, Agreement, compare_labels
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.files import Content, Count, Finite
from fedvl.models.clip import DualEncoder
from fedvl.tensors import IntArray
from fedvl.version import __version__

CHECKING_MODEL = "fedvl-tiny"
RARE_CLASS = 10  # training images from which a class is not rare
SHORT, OF_MEDIAN = 16, 0.25  # pixels; a shorter side below both
PLAIN = 2.0  # standard deviation of the brightness of an image of one colour
DARK, BRIGHT, OUTLIERS = 12.0, 243.0, 0.2  # mean brightness; the share of images up to which these are outliers
SHARED, ELSEWHERE = 0.8, 0.05  # shares of images with a property, in a class that is known by it and in others
SPLIT_FOLDERS = ("train", "test", "val")
DOUBTFUL = 20  # images that are named because the model thinks least of their label
MODES = ("8-bit colour", "8-bit grey", "more than 8 bits", "with a palette or transparency", "other")
SIDES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # limits of the shorter side in a histogram
BRIGHTNESS = tuple(range(16, 256, 16))
ORIENTATIONS = ("upright", "turned by EXIF")


class PropertyCount(Content):
    """Images with one property."""

    name: str
    images: Count


class ClassImages(Content):
    """Images of a class; ``unmarked`` are of no split."""

    name: str
    train: Count
    test: Count
    val: Count
    unmarked: Count


class DataCheck(Content):
    """What a check found, as ``--json`` prints it."""

    data: str
    fedvl_version: str
    model: str | None  # that labels were compared with
    images: Count
    readable: Count
    classes: list[ClassImages]
    unlabelled: Count
    sizes: list[PropertyCount]
    modes: list[PropertyCount]
    brightness: list[PropertyCount]
    orientation: list[PropertyCount]
    agreement: Finite | None  # of labels and the pretrained model, in percent
    faults: list[ShownFault]
    doubtful: list[str]
    notes: list[str]
    not_sought: list[str]  # kinds of faults that this check could not find

    @property
    def clean(self) -> bool:
        return not self.faults


@dataclass
class Images:
    """What was read of the images of a table, in its order."""

    table: Table
    labels: list[str]  # names of classes
    splits: list[str]
    problems: dict[int, str] = field(default_factory=dict)  # of rows that cannot be read
    sides: list[tuple[int, int]] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    turned: list[bool] = field(default_factory=list)
    highest: list[int] = field(default_factory=list)  # -1: no more than 8 bits
    brightness: list[float] = field(default_factory=list)
    contrast: list[float] = field(default_factory=list)
    copies: list[NDArray[np.float32]] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    readable: list[int] = field(default_factory=list)  # rows; the lists above are of these

    def __len__(self) -> int:
        return len(self.labels)

    def of(self, places: Iterable[int]) -> tuple[int, ...]:
        """Return the rows of places among the readable ones."""
        return tuple(self.readable[place] for place in places)

    def where(self, mask: NDArray[np.bool_]) -> tuple[int, ...]:
        return self.of(np.flatnonzero(mask).tolist())

    def name(self, row: int) -> str:
        return self.table.store.describe(row)


class CheckedImages(NamedTuple):
    """The images, their faults, and what the model says of their labels."""

    images: Images
    faults: list[Fault]
    agreement: Agreement | None
    model: str | None
    notes: list[str]
    not_sought: tuple[str, ...]


def check(name: str, display: Display, model: str | None = CHECKING_MODEL) -> tuple[DataCheck, CheckedImages]:
    """Check the images of a folder, file or named dataset; compare labels if a model is named."""
    empty: list[Path] = []
    table = open_table(name, empty)
    encoder = open_model(model) if model else None
    checked = check_table(table, empty, encoder, display)
    return shown(Path(name).name or name, checked), checked


def open_table(name: str, empty: list[Path]) -> Table:
    """Return the rows of images to check."""
    path = Path(name).expanduser().absolute()
    entry = lookup(name) if name == Path(name).name and not path.exists() else None
    if entry is not None and entry.embedded:
        return read_sheets(entry.name)
    if entry is not None:
        found = dataset_path(entry, default_data_root())
        if found is None:
            raise FedVLError(how_to_get(entry, default_data_root()))
        path = found
    if not path.exists():
        raise FedVLError(f"There is no dataset, folder or file '{name}'{suggestion(name)}")
    if not path.is_dir():
        return read_path(path)
    Home(path, None).check_links()
    return read_flat(path) if is_flat(path) else read_path(path, None, empty)


def check_table(table: Table, empty: Sequence[Path], encoder: object, display: Display) -> CheckedImages:
    """Check the rows of a table."""
    images = inspect(table, display.stage("Read images"))
    faults = [
        *unreadable(images),
        *(Fault("left-out", note) for note in table.notes),
        *(Fault("empty-class", f"The class folder {path.name} has no images.") for path in empty),
        *of_names(images),
        *of_counts(images),
        *copies(images),
        *units_in_both(images),
        *of_pixels(images),
        *shortcuts(images),
    ]
    agreement, notes, not_sought = None, list[str](), list[str]()
    if len(images.readable) > MAX_COMPARED:
        not_sought.append("near-duplicate")
        notes.append(f"Nearly equal images were not sought: there are more than {MAX_COMPARED:,}.")
    if isinstance(encoder, DualEncoder):
        agreement = agreement_of(images, encoder, display)
        faults += agreement.faults if agreement else []
    if agreement is not None and agreement.note:
        not_sought += OF_LABELS
        notes.append(agreement.note)
    if agreement is None:
        not_sought += [*OF_LABELS, *OF_POSITION]
        notes.append("Labels and orientation were not compared with a pretrained model.")
    name = encoder.name if agreement is not None and isinstance(encoder, DualEncoder) else None
    return CheckedImages(images, faults, agreement, name, notes, tuple(not_sought))


def inspect(table: Table, progress: Callable[[int, int], None]) -> Images:
    """Read each image once, and keep what the checks need of it."""
    labels = [plain_name(label) if label else "" for label in table.labels]
    splits = [SPLIT_NAMES.get(split.strip().casefold(), "") for split in table.splits]
    found = Images(table, labels, ["" if split == "all" else split for split in splits])
    for row in range(len(labels)):
        try:
            decoded = table.store.decoded(row)
        except BadImage as error:
            found.problems[row] = error.reason
            continue
        grey = np.asarray(decoded.image.convert("L"), np.float32)
        found.readable.append(row)
        found.sides.append(decoded.image.size)
        found.modes.append(mode_of(decoded))
        found.turned.append(decoded.orientation != 1)
        found.highest.append(-1 if decoded.highest is None else decoded.highest)
        found.brightness.append(float(grey.mean()))
        found.contrast.append(float(grey.std()))
        found.copies.append(small_copy(decoded.image))
        found.contents.append(table.store.content(row))
        progress(row + 1, len(labels))
    return found


def mode_of(decoded: Decoded) -> int:
    """Return the number of a mode in MODES."""
    if decoded.highest is not None:
        return 2
    return {"RGB": 0, "YCbCr": 0, "L": 1, "1": 1}.get(
        decoded.mode, 3 if decoded.mode in ("P", "PA", "LA", "RGBA") else 4
    )


# --- faults, one kind after the other


def unreadable(images: Images) -> list[Fault]:
    if not images.problems:
        return []
    reasons = Counter(images.problems.values())
    text = "; ".join(f"{count} because {reason.rstrip('.')}" for reason, count in reasons.most_common(3))
    return [Fault("unreadable", f"{files(len(images.problems))} cannot be read: {text}.", tuple(images.problems))]


def of_names(images: Images) -> list[Fault]:
    names = classes_of(images)
    found = [Fault("similar-names", f"{one} and {other} probably mean the same.") for one, other in same_names(names)]
    if names and all(name.isdecimal() for name in names):
        found.append(Fault("numbered-names", f"The classes are called {', '.join(names[:3])}."))
    return found


def of_counts(images: Images) -> list[Fault]:
    counts, found = counts_of(images), list[Fault]()
    tested = any(each.test for each in counts)
    for each in counts:
        trained = each.train + each.unmarked
        rows = tuple(row for row, label in enumerate(images.labels) if label == each.name)
        if trained < RARE_CLASS:
            found.append(Fault("rare-class", f"{each.name} has {files(trained, 'training image')}.", rows))
        if tested and not each.test:
            found.append(Fault("untested-class", f"{each.name} has no test image."))
    return found


def copies(images: Images) -> list[Fault]:
    """Name images that are there twice: in one class, in two, in training and test, or nearly."""
    equal = groups_equal(images.contents)
    again = {place for group in equal for place in group[1:]}
    near = groups_alike(np.array(images.copies)) if 1 < len(images.copies) <= MAX_COMPARED else []
    near = [group for group in near if len([place for place in group if place not in again]) > 1]
    found = list[Fault]()
    conflicts = [group for group in equal if len({images.labels[row] for row in images.of(group)} - {""}) > 1]
    leaks = [group for group in equal if in_both({images.splits[row] for row in images.of(group)})]
    plain = [group for group in equal if group not in conflicts and group not in leaks]
    for kind, groups, one, several in (
        ("duplicate", plain, "is there more than once", "are there more than once"),
        ("conflict", conflicts, "is in two classes", "are in two classes"),
        ("leak", leaks, "is for training and for the test", "are for training and for the test"),
        ("near-duplicate", near, "is there again, nearly the same", "are there again, nearly the same"),
    ):
        if groups:
            rows = tuple(row for group in groups for row in images.of(group))
            text = one if len(groups) == 1 else several
            more = between(groups, images) if kind == "near-duplicate" else ""
            found.append(Fault(kind, f"{files(len(groups), 'image')} {text}{more}.", rows))
    return found


def between(groups: Sequence[Sequence[int]], images: Images) -> str:
    """Say how many groups are in training and test, or in two classes."""
    splits = sum(in_both({images.splits[row] for row in images.of(group)}) for group in groups)
    labels = sum(len({images.labels[row] for row in images.of(group)} - {""}) > 1 for group in groups)
    said = [f"{splits} of {len(groups)} groups in training and test"] if splits else []
    said += [f"{labels} of {len(groups)} groups in two classes"] if labels else []
    return f" ({'; '.join(said)})" if said else ""


def in_both(splits: set[str]) -> bool:
    return "test" in splits and len(splits) > 1


def units_in_both(images: Images) -> list[Fault]:
    found = []
    for column, units in images.table.units.items():
        parts = defaultdict(set)
        for unit, split in zip(units, images.splits, strict=True):
            parts[unit].add(split)
        both = {unit for unit, splits in parts.items() if unit and in_both(splits)}
        if both:
            rows = tuple(row for row, unit in enumerate(units) if unit in both)
            found.append(Fault("unit-split", f"{files(len(both), column)} in training and test.", rows))
    return found


def of_pixels(images: Images) -> list[Fault]:
    if not images.readable:
        return []
    shorter = np.array([min(size) for size in images.sides])
    brightness, contrast, highest = (np.array(each) for each in (images.brightness, images.contrast, images.highest))
    dim = (highest >= 0) & (highest < DIM)
    blank = (contrast < PLAIN) & ~dim
    extreme = ((brightness < DARK) | (brightness > BRIGHT)) & ~blank & ~dim
    small = (shorter < SHORT) | (shorter < OF_MEDIAN * np.median(shorter))
    found = list[Fault]()
    if blank.any():
        found.append(Fault("blank", f"{files(int(blank.sum()), 'image')} of one colour.", images.where(blank)))
    if 0 < extreme.sum() <= max(OUTLIERS * len(extreme), 1):
        text = f"{files(int(extreme.sum()), 'image')} nearly black or white, unlike others."
        found.append(Fault("exposure", text, images.where(extreme)))
    if dim.any():
        text = f"{files(int(dim.sum()), 'image')} of 16 bits, with a largest value of {int(highest[dim].max()):,} of 65,535."
        found.append(Fault("dim", text, images.where(dim)))
    if small.any():
        largest, middle = int(shorter[small].max()), int(np.median(shorter))
        text = f"{files(int(small.sum()), 'image')} with a side of {largest} pixels or less; half of all have {middle} or more."
        found.append(Fault("small", text, images.where(small)))
    return found


def shortcuts(images: Images) -> list[Fault]:
    """Name classes that can be text by a property of their files alone."""
    labels = np.array([images.labels[row] for row in images.readable])
    properties: dict[str, list[str]] = {
        "size": [f"{width} x {height} pixels" for width, height in images.sides],
        "kind": [MODES[mode] for mode in images.modes],
        "orientation": [ORIENTATIONS[turned] for turned in images.turned],
    }
    found = []
    for values in map(np.array, properties.values()):
        for value in np.unique(values):
            inside = values == value
            for name in np.unique(labels[labels != ""]):
                own = labels == name
                others = (labels != "") & ~own
                if own.sum() < RARE_CLASS or others.sum() < RARE_CLASS:
                    continue
                if inside[own].mean() >= SHARED and inside[others].mean() <= ELSEWHERE:
                    text = f"Images of {name} are {value}, those of other classes are not."
                    found.append(Fault("shortcut", text, images.where(own & inside)))
    return found


def agreement_of(images: Images, encoder: DualEncoder, display: Display) -> Agreement | None:
    """Compare labels of readable images with the pretrained model; None if there are too few."""
    names = classes_of(images)
    number = {name: place for place, name in enumerate(names)}
    rows = np.array([row for row in images.readable if images.labels[row]], np.int64)
    if len(names) < 2 or not len(rows):
        return None
    labels = np.array([number[images.labels[row]] for row in rows], np.int64)
    return compare_labels(rows, labels, names, images.table.store.read, encoder, display.stage("Compare labels"))


# --- what is shown


def classes_of(images: Images) -> list[str]:
    return sorted(set(images.labels) - {""})


def counts_of(images: Images) -> list[ClassImages]:
    counted = Counter(zip(images.labels, images.splits, strict=True))
    return [
        ClassImages(name=name, unmarked=counted[name, ""], **{split: counted[name, split] for split in SPLIT_FOLDERS})
        for name in classes_of(images)
    ]


def shown(name: str, checked: CheckedImages) -> DataCheck:
    """Return what is shown of a check."""
    images, agreement = checked.images, checked.agreement
    tables = histograms(images, np.arange(len(images.readable)))
    return DataCheck(
        data=name,
        fedvl_version=__version__,
        model=checked.model,
        images=len(images),
        readable=len(images.readable),
        classes=counts_of(images),
        unlabelled=images.labels.count(""),
        **{key: bars(NAMES_OF_BARS[key], counts) for key, counts in tables.items()},
        agreement=None if agreement is None else 100 * float(agreement.right.mean()),
        faults=[shown_fault(fault, images) for fault in checked.faults],
        doubtful=[images.name(row) for row in agreement.doubtful[:DOUBTFUL]] if agreement else [],
        notes=checked.notes,
        not_sought=list(checked.not_sought),
    )


def shown_fault(fault: Fault, images: Images) -> ShownFault:
    kind = FAULT_KINDS[fault.kind]
    named = [images.name(row) for row in fault.rows[:MAX_NAMED]]
    return ShownFault(
        kind=fault.kind, title=kind.title, sentence=fault.sentence, fix=kind.fix, images=len(fault.rows), files=named
    )


def limits(values: Sequence[int], unit: str) -> tuple[str, ...]:
    """Return the names of the bins between these limits."""
    between = [f"{low} to {high - 1}{unit}" for low, high in pairwise(values)]
    return (f"below {values[0]}{unit}", *between, f"{values[-1]}{unit} and more")


NAMES_OF_BARS: Mapping[str, tuple[str, ...]] = {
    "sizes": limits(SIDES, " px"),
    "modes": MODES,
    "brightness": limits(BRIGHTNESS, ""),
    "orientation": ORIENTATIONS,
}


def histograms(images: Images, places: IntArray) -> dict[str, IntArray]:
    """Count some of the readable images by size, mode, brightness and orientation."""
    shorter = np.array([min(size) for size in images.sides], np.int64)[places]
    found = {
        "sizes": np.digitize(shorter, SIDES),
        "modes": np.array(images.modes, np.int64)[places],
        "brightness": np.digitize(np.array(images.brightness, np.float64)[places], BRIGHTNESS),
        "orientation": np.array(images.turned, np.int64)[places],
    }
    return {key: np.bincount(values, minlength=len(NAMES_OF_BARS[key])) for key, values in found.items()}


def bars(names: Sequence[str], counts: IntArray) -> list[PropertyCount]:
    return [PropertyCount(name=name, images=int(count)) for name, count in zip(names, counts, strict=True)]


def files(count: int, what: str = "file") -> str:
    """Return a count with its noun."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
