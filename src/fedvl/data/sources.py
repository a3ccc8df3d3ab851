"""Open a dataset by name or path: embedded, catalogue, hub, image folder, table or manifest."""

import csv
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from fedvl.config import DataConfig
from fedvl.data.additions import extend, parse_addition
from fedvl.data.arrow import read_parquet, read_saved, read_tables, tables_in
from fedvl.data.assemble import (
    SPLIT_NAMES,
    UNIT_COLUMNS,
    Table,
    assemble,
    only_classes,
    plain_name,
    with_corrected_labels,
)
from fedvl.data.catalogue import CatalogueEntry, class_key, general_templates, lookup, suggestion
from fedvl.data.embedded import read_cifar10, read_emoji, read_sheets
from fedvl.data.fetch import HUB, default_data_root, fetch_from_hub, stored_in
from fedvl.data.images import EXTENSIONS, UNREAD, BadImage, decode, how_to_read, is_image
from fedvl.data.imported import ImportedEncoder, open_model
from fedvl.data.stores import Dataset, FileStore, Split, unite
from fedvl.errors import FedVLError
from fedvl.files import SHORTENED, parse_json, regular
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder

__all__ = ["BadImage", "Dataset", "Split", "decode", "default_data_root", "open_dataset"]

MANIFESTS = (".csv", ".jsonl")
CIFAR10 = "data_batch_1.png"  # of its package, where images are rows of a picture
TABLES = (*MANIFESTS, ".parquet", ".arrow")
MAX_MANIFEST = 2**30  # bytes
MAX_HEADER = 2**16  # characters
# What tables call the image and its label: ours, Hugging Face's, Kaggle's.
PATH_COLUMNS = ("path", "file_name", "filename", "file", "image_path", "image", "image_id", "id")
LABEL_COLUMNS = ("label", "class", "category", "class_name", "target")
TRUTH_COLUMNS = ("truth", *LABEL_COLUMNS)  # of corrected labels
# Kaggle's tables name images without their extension.
ENDINGS = ("", ".jpg", ".jpeg", ".png", ".tif", ".dcm")


def open_dataset(name: str, data_root: Path | None = None, classes: tuple[str, ...] | None = None) -> Dataset:
    """Open an embedded set, a catalogue name under `data_root`, a hub name, a folder or a file.

    Several are joined by a plus (`caltech101+dtd`), unless there is a file or folder of that name.
    `classes` are those to keep; for a folder of images without labels, the names of its classes.
    """
    if "+" in name and not os.path.exists(os.path.expanduser(name)):
        if classes:
            raise FedVLError("Classes of several datasets cannot be chosen; leave data.classes out.")
        return unite([open_dataset(part, data_root) for part in name.split("+")])
    if name.startswith(HUB):
        folder = fetch_from_hub(name)
        Home(folder, stored_in(folder)).check_links()  # the hub's client links to files beside
        dataset = assemble(name.split("/")[-1], read_tables(folder))
        return only_classes(dataset, classes) if classes else dataset
    entry = lookup(name) if name == Path(name).name else None
    path = Path(os.path.abspath(Path(name).expanduser()))
    if classes and entry is None and name and "\0" not in name and is_flat(path):
        Home(path, data_root).check_links()
        return unlabelled(path, classes)
    dataset = open_entry(entry, data_root) if entry else open_path(name, path, data_root)
    return only_classes(dataset, named_list(dataset, classes)) if classes else dataset


def named_list(dataset: Dataset, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes of a list that the catalogue names, or the given ones."""
    if len(classes) > 1:
        return classes
    entry = lookup(dataset.name)
    lists = entry.class_lists if entry else {}
    if classes[0] not in lists:
        known = f", or a list of the catalogue: {', '.join(lists)}" if lists else ""
        raise FedVLError(f"data.classes has one name, '{classes[0]}'; name two or more classes{known}.")
    return tuple(name for name in dataset.class_names if name not in lists[classes[0]])


def open_path(name: str, path: Path, data_root: Path | None) -> Dataset:
    if not name or "\0" in name or not os.path.exists(path):  # which is False also for a name that is too long
        raise FedVLError(f"There is no dataset, folder or file {SHORTENED.repr(name)}{suggestion(name)}")
    return assemble(path.name if path.is_dir() else path.stem, read_path(path, data_root))


def open_entry(entry: CatalogueEntry, data_root: Path | None) -> Dataset:
    if entry.embedded:
        return assemble(entry.name, read_sheets(entry.name), entry)
    root = data_root or default_data_root()
    if path := dataset_path(entry, root):
        if not (entry.domains and path.is_dir()):
            return assemble(entry.name, read_path(path, root), entry)
        Home(path, root).check_links()
        return assemble(entry.name, read_domains(path, entry.domains), entry)
    here = f" To use the one in this folder, write ./{entry.name}." if Path(entry.name).exists() else ""
    raise FedVLError(how_to_get(entry, root) + here)


def dataset_path(entry: CatalogueEntry, root: Path) -> Path | None:
    """Return where a catalogue dataset is stored, or None if it is not there."""
    candidates = [root / entry.name, *(root / f"{entry.name}{suffix}" for suffix in (".parquet", *MANIFESTS))]
    return next((path for path in candidates if path.exists()), None)


def how_to_get(entry: CatalogueEntry, root: Path) -> str:
    """Return a sentence that says what to download and where to put it."""
    if entry.fetchable:
        return f"{entry.title} is not in {root} yet; run `fedvl data get {entry.name}` to fetch it."
    place = root / entry.name
    further = ", text" if entry.text else ", domain" if entry.domains else ""
    if entry.domains:
        layout = f"{place}/DOMAIN/CLASS/ for the domains {', '.join(entry.domains)}"
    elif entry.text:
        layout = f"{place}.csv (path, label, text, split)"
    else:
        layout = f"{place}/train/CLASS/ and {place}/test/CLASS/"
    return (
        f"{entry.title} is not in {root}; get it from {entry.source}, and put it there as {layout}, "
        f"or as {place}.parquet (image, label, split{further})."
    )


def read_path(path: Path, data_root: Path | None = None, empty: list[Path] | None = None) -> Table:
    """Read a file or folder in any supported layout.

    Images are below it (a manifest: below its folder) or below the folder of the datasets. Class
    folders without images are added to ``empty``, or named in a note without such a list.
    """
    home = Home(path if path.is_dir() else path.parent, data_root)
    if path.is_dir():
        home.check_links()
        if (path / CIFAR10).exists():
            return read_cifar10(path)
        if (path / "emoji.json").exists():
            return read_emoji(path)
        for suffix in MANIFESTS:
            if (path / f"manifest{suffix}").exists():
                return read_manifest(path / f"manifest{suffix}", home)
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return read_saved(path)
        if any(tables_in(path)):
            return read_tables(path)
        try:
            return read_folder(path, empty)
        except OSError as error:
            raise FedVLError(f"{error.filename} cannot be read ({error.strerror}).") from error
    if path.suffix.lower() == ".parquet":
        return read_parquet(path)
    if path.suffix.lower() in MANIFESTS:
        return read_manifest(path, home)
    raise FedVLError(
        f"{path} is not a dataset: give a folder of class folders, a .parquet file, or a table as .csv (in Excel: "
        "save as CSV UTF-8) or .jsonl."
    )


class Home:
    """Where the images of a dataset may be: a stranger's manifest or link must not name others."""

    def __init__(self, folder: Path, data_root: Path | None) -> None:
        self.folder = folder
        self.allowed = [place.resolve() for place in (folder, data_root or default_data_root())]
        self._seen: dict[Path, bool] = {}  # folders

    def holds(self, path: Path) -> bool:
        """Whether a path leads to a place in here, also by way of links."""
        if path.is_symlink():
            return self._inside(path)
        if path.parent not in self._seen:
            self._seen[path.parent] = self._inside(path.parent)
        return self._seen[path.parent] and path.name != ".."

    def _inside(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))  # of links in a circle too, which ``resolve`` raises for
        return any(real.is_relative_to(place) for place in self.allowed)

    def check_links(self) -> None:
        """Refuse a folder with a link, at any depth, that leads away."""
        for path in links_in(self.folder):
            if not self._inside(path):
                raise FedVLError(
                    f"{path} is a link that leads out of {self.folder}; put a copy there, or set FEDVL_DATA to a folder of "
                    "both."
                )


def links_in(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder and its folders, but for hidden ones."""
    waiting = [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:  # what cannot be listed is not read
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    yield Path(entry.path)
                elif entry.is_dir():
                    waiting.append(entry.path)


def read_folder(root: Path, empty: list[Path] | None = None) -> Table:
    """Read root/CLASS/images, or root/train/CLASS/images and root/test/CLASS/images.

    Class folders without images are added to ``empty``, or named in a note if there is no list.
    """
    folders = _folders(root)
    split_layout = "train" in {SPLIT_NAMES.get(folder.name.casefold()) for folder in folders} and all(
        SPLIT_NAMES.get(folder.name.casefold()) in ("train", "val", "test") and _folders(folder) for folder in folders
    )
    parts = [(folder.name, folder) for folder in folders] if split_layout else [("all", root)]
    paths: list[Path] = []
    labels: list[str] = []
    splits: list[str] = []
    notes = []
    unread = _unread(path for path in root.iterdir() if path.is_file())
    for split, part in parts:
        for class_folder in _folders(part):
            files = sorted(_files(class_folder))
            images = list(filter(_is_image, files))
            others = _unread(files)
            if not images and empty is not None:
                empty.append(class_folder)
            elif not images:
                why = f" that FedVL reads ({_formats(others)}); {how_to_read(others)}" if others else ""
                notes.append(f"The class folder {class_folder.name!r} was left out: it has no images{why}.")
            paths += images
            labels += [class_folder.name] * len(images)
            splits += [split] * len(images)
            unread += others
        if stray := sum(1 for path in part.iterdir() if _is_image(path)):
            notes.append(f"{_images(stray)} of {part.name!r} outside any class folder left out.")
    if not paths:
        raise FedVLError(_no_class_folders(root, unread))
    if unread:
        notes.append(_left_out(unread))
    names = [path.relative_to(root).as_posix() for path in paths]
    return Table(str(root), FileStore(paths, names), labels, splits, notes=notes)


def read_domains(root: Path, domains: Iterable[str]) -> Table:
    """Read root/DOMAIN/CLASS/images; the domains go by the catalogue's names."""
    folders = {class_key(folder.name): folder for folder in _folders(root)}
    paths, names, of_domains, parts = list[Path](), list[str](), list[str](), list[Table]()
    for domain in domains:
        if class_key(domain) not in folders:
            raise FedVLError(f"{root} has no folder of the domain {domain}; put DOMAIN/CLASS/image.jpg below it.")
        folder = folders[class_key(domain)]
        parts.append(read_folder(folder))
        store = parts[-1].store
        assert isinstance(store, FileStore)
        paths += store.paths
        names += [f"{folder.name}/{name}" for name in store.names]
        of_domains += [domain] * len(store.paths)
    return Table(
        str(root),
        FileStore(paths, names),
        [label for part in parts for label in part.labels],
        [split for part in parts for split in part.splits],
        domains=of_domains,
        notes=[note for part in parts for note in part.notes],
    )


def is_flat(path: Path) -> bool:
    """Whether a path is a folder of images without labels: no class folders, and no table."""
    if not os.path.isdir(path) or (path / CIFAR10).exists():
        return False
    return not _folders(path) and not _tables(path) and any(map(_is_image, path.iterdir()))


def read_flat(root: Path) -> Table:
    """Read a folder of images without labels."""
    files = sorted(root.iterdir())
    images = list(filter(_is_image, files))
    unread = _unread(files)
    store, blank = FileStore(images, [image.name for image in images]), [""] * len(images)
    return Table(str(root), store, blank, blank, notes=[_left_out(unread)] if unread else [])


def unlabelled(path: Path, classes: tuple[str, ...]) -> Dataset:
    """Open a flat folder: all of it is for training, since nothing can be tested without labels."""
    if len(set(map(class_key, classes))) < max(2, len(classes)):
        raise FedVLError("--classes takes two or more names that differ, such as --classes cat,dog.")
    table = read_flat(path)
    count = len(table.labels)
    notes = ("The images have no labels: all are trained on, and no accuracy is measured.", *table.notes)
    split = Split(table.store, np.arange(count), np.full(count, -1, np.int64))
    return Dataset(path.name, tuple(map(plain_name, classes)), general_templates(), {"train": split}, notes)


def _no_class_folders(root: Path, unread: Counter[str]) -> str:
    """Return what to do with a folder that holds no class folder with images."""
    if is_flat(root):
        return (
            f"{root} has images and no class folders; make one sub-folder for each class, or name the classes "
            "(--classes cat,dog) and use a method that needs no labels, fst-cbdg or fedpp."
        )
    if (tables := _tables(root)) and any(map(_is_image, root.iterdir())):
        return f"{root} has images and no class folders; to use the table beside them, give its path: {tables[0]}."
    if unread:
        return f"{root} has no images that FedVL reads ({_formats(unread)}); {how_to_read(unread)}, in class folders."
    return f"{root} has no images in class folders; expected CLASS/image.jpg or train/CLASS/image.jpg below it."


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _tables(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.suffix.lower() in TABLES and not path.name.startswith("."))


def _files(folder: Path) -> Iterator[Path]:
    for parent, children, files in os.walk(folder):
        children[:] = [child for child in children if not child.startswith(".")]
        yield from (Path(parent, file) for file in files)


def _is_image(path: Path) -> bool:
    return is_image(path, EXTENSIONS)


def _unread(paths: Iterable[Path]) -> Counter[str]:
    """Count pictures in formats that are not read."""
    return Counter(
        path.suffix[1:].upper() for path in paths if path.suffix.lower() in UNREAD and not path.name.startswith(".")
    )


def _formats(unread: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(unread.items()))


def _left_out(unread: Counter[str]) -> str:
    return f"{_formats(unread)} left out: FedVL does not read such files here; {how_to_read(unread)}."


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def read_manifest(path: Path, home: Home) -> Table:
    """Read a CSV with a header, or JSON lines: path, and optionally label, text, split, domain.

    Names of columns that are usual elsewhere do as well; ``UNIT_COLUMNS`` say whose an image is.
    """
    reader = _csv_rows if path.suffix.lower() == ".csv" else _json_rows
    paths: list[Path] = []
    names: list[str] = []
    columns: dict[str, list[str]] = {name: [] for name in ("label", "split", "text", "domain", *UNIT_COLUMNS)}
    try:
        for line, row in reader(path):
            name = _first(row, PATH_COLUMNS)
            if not name:
                raise FedVLError(
                    f"Line {line} of {path} has no `path`; name the column of image files so "
                    f"(its columns: {SHORTENED.repr(', '.join(row))})."
                )
            names.append(name)
            paths.append(_image_of(path, line, name, home))
            row["label"] = _first(row, LABEL_COLUMNS)
            for column, values in columns.items():
                values.append(row.get(column, ""))
    except UnicodeDecodeError as error:
        raise FedVLError(f"{path} cannot be read: it is not in UTF-8; save it so (in Excel: as CSV UTF-8).") from error
    except (OSError, ValueError, csv.Error) as error:
        raise FedVLError(f"{path} cannot be read as a UTF-8 {path.suffix[1:].upper()} manifest ({error}).") from error
    if not paths:
        raise FedVLError(f"{path} lists no images; write one row per image with the columns path, label, text, split.")
    if not any(map(os.path.isfile, paths)):
        raise FedVLError(
            f"None of the {len(paths)} images that {path} names is there (the first: {SHORTENED.repr(names[0])}); "
            f"write their paths as seen from {home.folder}."
        )
    # Absolute paths differ between machines; the identity of the images must not.
    stable = [Path(name).name if Path(name).is_absolute() else Path(name).as_posix() for name in names]
    texts, domains = (columns[name] if any(columns[name]) else None for name in ("text", "domain"))
    units = {name: columns[name] for name in UNIT_COLUMNS if any(columns[name])}
    return Table(str(path), FileStore(paths, stable), columns["label"], columns["split"], texts, domains, units=units)


def read_corrections(path: Path) -> dict[str, str]:
    """Return the label of each image in a CSV file, such as test.csv of a run."""
    try:
        rows = [row for _, row in _csv_rows(path)]
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise FedVLError(
            f"{path} cannot be read as a CSV file in UTF-8 ({reason}); give one with the columns `file` and `label`."
        ) from error
    columns = [
        next((name for name in names if rows and name in rows[0]), None) for names in (PATH_COLUMNS, TRUTH_COLUMNS)
    ]
    if None in columns:
        raise FedVLError(
            f"{path} has no rows with the columns `file` and `label` (or `truth`); take test.csv of a run."
        )
    return {row[str(columns[0])]: row[str(columns[1])] for row in rows}


def _first(row: dict[str, str], columns: Sequence[str]) -> str:
    """Return the value of the first of these columns that the table has."""
    return next((row[column] for column in columns if column in row), "")


def _place_of(manifest: Path, name: str) -> Path:
    """Return where an image is: as named, or in TRAIN/ or images/ beside a table TRAIN.csv."""
    path = manifest.parent / name
    if os.path.exists(path):
        return path
    if "\\" in name:  # as Windows writes paths
        return manifest.parent / name.replace("\\", "/")
    if os.path.basename(name) != name:
        return path
    folders = (manifest.parent, manifest.parent / manifest.stem, manifest.parent / "images")
    found = (folder / f"{name}{ending}" for folder in folders for ending in ENDINGS)
    return next(filter(os.path.isfile, found), path)


def _image_of(manifest: Path, line: int, name: str, home: Home) -> Path:
    """Return the path of a row's image; refuse one outside, or one that is not a regular file."""
    path = _place_of(manifest, name) if "\0" not in name else manifest.parent / name
    try:
        os.fsencode(name)
        there = "\0" not in name and home.holds(path)
        odd = there and path.exists() and not path.is_file()
    except (OSError, ValueError):  # too long, or half a character
        there = odd = False
    if not there:
        raise FedVLError(
            f"Line {line} of {manifest} names {SHORTENED.repr(name)}, which is not below {home.folder}; put it there, or "
            "set FEDVL_DATA to the folder that holds the images."
        )
    if odd:
        raise FedVLError(
            f"Line {line} of {manifest} names {SHORTENED.repr(name)}, which is not a regular file; remove the line."
        )
    return path


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with regular(path, MAX_MANIFEST).open(encoding="utf-8-sig", newline="") as file:
        header = file.readline(MAX_HEADER)
        file.seek(0)
        # Excel writes semicolons where the comma is the decimal sign.
        reader = csv.DictReader(file, delimiter=max(",;\t", key=header.count), strict=True)
        for row in reader:
            named = {key.strip().lower(): value for key, value in row.items() if isinstance(key, str)}
            yield reader.line_num, {key: (value or "").strip() for key, value in named.items()}


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with regular(path, MAX_MANIFEST).open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise FedVLError(f"Line {number} of {path} is not JSON ({error}).") from error
            if not isinstance(row, dict):
                raise FedVLError(f'Line {number} of {path} is not a JSON object like {{"path": ..., "label": ...}}.')
            yield number, {key: "" if value is None else str(value) for key, value in row.items()}


@dataclass(frozen=True)
class Opener:
    dataset: Callable[[str, Path | None], Dataset] = open_dataset
    model: Callable[[str, str], DualEncoder | FusedEncoder | ImportedEncoder] = open_model

    def dataset_of(self, data: DataConfig) -> Dataset:
        """Open an experiment's dataset; one without labels gets its classes from there."""
        root = Path(data.root) if data.root else None
        base = open_dataset(data.dataset, root, data.classes) if data.classes else self.dataset(data.dataset, root)
        if data.corrections is not None:
            base = with_corrected_labels(base, read_corrections(Path(data.corrections)), Path(data.corrections).name)
        added = [self.dataset(source, root) for _, source in map(parse_addition, data.additions)]
        return extend(base, added) if added else base

    @classmethod
    def once(cls) -> "Opener":
        return cls(cache(open_dataset), cache(open_model))


OPEN_ANEW = Opener()
