"""Image stores (files, parquet rows, contact sheets) and the datasets built on them."""

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedvl.data.catalogue import general_templates
from fedvl.data.images import MAX_IMAGE_BYTES, BadImage, Decoded, decode, decode_fully
from fedvl.errors import FedVLError
from fedvl.files import read_file
from fedvl.tensors import IntArray

Pixels = npt.NDArray[np.uint8]


class ImageStore(Protocol):
    """Images by row number, in the order of their source."""

    def read(self, row: int) -> Image.Image: ...

    def decoded(self, row: int) -> Decoded:
        """Return an image with what its file said of it."""

    def source(self, row: int) -> Path | bytes | None:
        """Return the file of an image, or what is in it; None where an image is not a file."""

    def describe(self, row: int) -> str: ...

    def content(self, row: int) -> bytes:
        """Return bytes that are the same for the same image file, whatever its name."""

    def fingerprint(self, row: int) -> bytes:
        """Return bytes that change when the image changes, but not when it is moved."""


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of a store with labels (-1: none), texts, domains ("": none), and whose they are."""

    store: ImageStore
    rows: IntArray
    labels: IntArray
    texts: tuple[str, ...] | None = None
    domains: tuple[str, ...] | None = None
    parts: tuple["Split", ...] = ()  # of several datasets, whose rows follow each other
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by column, such as patient

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Image.Image:
        """Return the image as upright 8-bit RGB, or raise `BadImage`."""
        return self.store.read(int(self.rows[index]))

    def source(self, index: int) -> Path | bytes | None:
        """Return the file of an image, or what is in it; None where an image is not a file."""
        return self.store.source(int(self.rows[index]))

    def describe(self, index: int) -> str:
        """Return the path or row number, for messages."""
        return self.store.describe(int(self.rows[index]))

    def content(self, index: int) -> bytes:
        """Return what names an image's content, the same for the same file under any name."""
        return self.store.content(int(self.rows[index]))

    def sha256(self, index: int) -> str:
        """Return the SHA-256 of an image's file; tiles of a sheet have no file hash."""
        return self.content(index).decode().rpartition(" ")[2]

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the images in order; every byte is read once."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(self.store.fingerprint(int(row)))
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """Classes, prompt templates and splits ("train", "test" and sometimes "val").

    `notes` says what was left out and why. `origins` names the dataset of each class of several.
    """

    name: str
    class_names: tuple[str, ...]
    templates: dict[str, tuple[str, ...]]
    splits: dict[str, Split]
    notes: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    before: int = 0  # number of classes before images were added, where some were


def size_and_hash(data: bytes) -> str:
    return f"{len(data)} {hashlib.sha256(data).hexdigest()}"


def content_of(source: Path | bytes) -> bytes:
    """Return what names an image's content, whatever its file is called."""
    try:
        return size_and_hash(source if isinstance(source, bytes) else read_file(source, MAX_IMAGE_BYTES)).encode()
    except (OSError, FedVLError):
        return b"unreadable"


@dataclass(frozen=True)
class FileStore:
    """One file per image; names are relative to the source, so that it can be moved."""

    paths: Sequence[Path]
    names: Sequence[str]
    _contents: dict[int, bytes] = field(default_factory=dict)  # each file is hashed once

    def read(self, row: int) -> Image.Image:
        return self.decoded(row).image

    def decoded(self, row: int) -> Decoded:
        return decode_fully(self.paths[row], self.names[row])

    def source(self, row: int) -> Path:
        return self.paths[row]

    def describe(self, row: int) -> str:
        return self.names[row]

    def content(self, row: int) -> bytes:
        if row not in self._contents:
            self._contents[row] = content_of(self.paths[row])
        return self._contents[row]

    def fingerprint(self, row: int) -> bytes:
        return self.names[row].encode("utf-8", "surrogateescape") + b"\0" + self.content(row) + b"\n"


@dataclass
class Sheet:
    """An image file that holds many small images, read on first use.

    `cut` splits its pixels into the images.
    """

    path: Path
    count: int
    cut: Callable[[Pixels], Pixels]
    sha256: str | None = None

    @cached_property
    def file_sha256(self) -> str:
        return hashlib.sha256(self._bytes()).hexdigest()

    @cached_property
    def tiles(self) -> Pixels:
        data = self._bytes()
        if self.sha256 is not None and hashlib.sha256(data).hexdigest() != self.sha256:
            raise FedVLError(
                f"{self.path.name} is not the file it should be (its SHA-256 differs); install fedvl again."
            )
        try:
            tiles = self.cut(np.asarray(decode(data, self.path.name)))
        except (BadImage, ValueError) as error:
            raise FedVLError(
                f"{self.path} cannot be used ({str(error).rstrip('.')}); delete it and get the dataset again."
            ) from error
        if len(tiles) < self.count:
            raise FedVLError(
                f"{self.path} holds {len(tiles)} images but has {self.count} labels; get the dataset again."
            )
        return tiles

    def _bytes(self) -> bytes:
        try:
            return read_file(self.path, MAX_IMAGE_BYTES)
        except OSError as error:
            raise FedVLError(f"{self.path} cannot be read ({error.strerror}); get the dataset again.") from error


@dataclass(frozen=True)
class SheetStore:
    """Images of several sheets in order."""

    sheets: Sequence[Sheet]

    def read(self, row: int) -> Image.Image:
        sheet, tile = self._find(row)
        return Image.fromarray(sheet.tiles[tile])

    def decoded(self, row: int) -> Decoded:
        return Decoded(self.read(row))

    def source(self, row: int) -> None:
        return None

    def describe(self, row: int) -> str:
        sheet, tile = self._find(row)
        return f"{sheet.path.name} image {tile}"

    def content(self, row: int) -> bytes:
        sheet, tile = self._find(row)
        return f"{sheet.sha256 or sheet.file_sha256} {tile}".encode()

    def fingerprint(self, row: int) -> bytes:
        return self.content(row) + b"\n"

    def _find(self, row: int) -> tuple[Sheet, int]:
        for sheet in self.sheets:
            if row < sheet.count:
                return sheet, row
            row -= sheet.count
        raise IndexError(row)


class TableStore(ABC):
    """Images as bytes in the rows of a file."""

    path: Path

    def read(self, row: int) -> Image.Image:
        return self.decoded(row).image

    def decoded(self, row: int) -> Decoded:
        return decode_fully(self._bytes(row), self.describe(row))

    def source(self, row: int) -> bytes:
        return self._bytes(row)

    def describe(self, row: int) -> str:
        return f"{self.path.name} row {row}"

    def content(self, row: int) -> bytes:
        try:
            return size_and_hash(self._bytes(row)).encode()
        except BadImage:
            return b"unreadable"

    def fingerprint(self, row: int) -> bytes:
        return self.content(row) + b"\n"

    @abstractmethod
    def _bytes(self, row: int) -> bytes: ...


@dataclass
class ParquetStore(TableStore):
    """Image bytes in a column of a parquet file.

    One row group is held at a time, so reading in order is cheap.
    """

    path: Path
    file: Any  # pyarrow.parquet.ParquetFile
    starts: IntArray  # first row of each row group
    column: str = "image"  # or a part of it
    _group: int = -1
    _images: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def _bytes(self, row: int) -> bytes:
        with self._lock:
            group = int(np.searchsorted(self.starts, row, side="right")) - 1
            if group != self._group:
                try:
                    self._images = self.file.read_row_group(group, columns=[self.column]).column(0)
                except Exception as error:  # pyarrow raises many kinds; one damaged group must not stop the others.
                    raise BadImage("its part of the parquet file is damaged.", self.describe(row)) from error
                self._group = group
            return image_bytes(self._images[row - int(self.starts[group])].as_py())


@dataclass(frozen=True)
class ArrowStore(TableStore):
    """Image bytes in a column of an Arrow file, which is memory-mapped."""

    path: Path
    images: Any  # pyarrow.ChunkedArray

    def _bytes(self, row: int) -> bytes:
        return image_bytes(self.images[row].as_py())


def image_bytes(value: Any) -> bytes:
    """Return the bytes of a cell: themselves, or in {"bytes": ..., "path": ...} of `datasets`."""
    return (value.get("bytes") if isinstance(value, dict) else value) or b""


@dataclass(frozen=True)
class JoinedStore:
    """The images of several stores in order."""

    stores: Sequence[ImageStore]
    starts: IntArray  # first row of each

    def read(self, row: int) -> Image.Image:
        store, own = self._find(row)
        return store.read(own)

    def decoded(self, row: int) -> Decoded:
        store, own = self._find(row)
        return store.decoded(own)

    def source(self, row: int) -> Path | bytes | None:
        store, own = self._find(row)
        return store.source(own)

    def describe(self, row: int) -> str:
        store, own = self._find(row)
        return store.describe(own)

    def content(self, row: int) -> bytes:
        store, own = self._find(row)
        return store.content(own)

    def fingerprint(self, row: int) -> bytes:
        store, own = self._find(row)
        return store.fingerprint(own)

    def _find(self, row: int) -> tuple[ImageStore, int]:
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.stores[number], row - int(self.starts[number])


def unite(datasets: Sequence[Dataset]) -> Dataset:
    """Join datasets: the classes of one after those of another, also where names are the same."""
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise FedVLError(f"'{'+'.join(names)}' names a dataset twice; name each once.")
    if incomplete := [dataset.name for dataset in datasets if not {"train", "test"} <= dataset.splits.keys()]:
        raise FedVLError(
            f"'{incomplete[0]}' has no labels, so that it cannot be one of several datasets; leave it out."
        )
    ends = np.cumsum([len(dataset.class_names) for dataset in datasets])
    numbers = [np.arange(end - len(each.class_names), end) for each, end in zip(datasets, ends, strict=True)]
    alike = all(dataset.templates == datasets[0].templates for dataset in datasets)
    notes = [f"{dataset.name}: {note}" for dataset in datasets for note in dataset.notes]
    notes += [] if alike else ["The datasets have different templates; the general ones are used for all."]
    return Dataset(
        "+".join(names),
        tuple(name for dataset in datasets for name in dataset.class_names),
        datasets[0].templates if alike else general_templates(),
        {part: join_splits(splits_of(datasets, part), numbers, names) for part in ("train", "test")},
        tuple(notes),
        tuple(dataset.name for dataset in datasets for _ in dataset.class_names),
    )


def splits_of(datasets: Sequence[Dataset], part: str) -> list[Split]:
    return [dataset.splits[part] for dataset in datasets]


def join_splits(splits: Sequence[Split], numbers: Sequence[IntArray], names: Sequence[str] | None = None) -> Split:
    """Join splits, given the new numbers of their classes; images without a label stay without.

    The name of its dataset is the domain of an image, where there are names.
    """
    images = np.cumsum([0, *(int(split.rows.max(initial=-1)) + 1 for split in splits)])[:-1]
    labels = [np.append(own, -1)[split.labels] for split, own in zip(splits, numbers, strict=True)]
    texts = [split.texts for split in splits]
    columns = set.intersection(*(set(split.units) for split in splits))
    return Split(
        JoinedStore([split.store for split in splits], images),
        np.concatenate([split.rows + first for split, first in zip(splits, images, strict=True)]),
        np.concatenate(labels),
        None if None in texts else tuple(text for own in texts for text in own or ()),
        _domains(splits, names),
        tuple(splits),
        {column: tuple(unit for split in splits for unit in split.units[column]) for column in sorted(columns)},
    )


def _domains(splits: Sequence[Split], names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the domain of each image; one is unknown ("") where only other splits have them."""
    if names is None and splits[0].domains is None:
        return None
    named = names or [""] * len(splits)
    own = [
        [name] * len(split) if names or split.domains is None else split.domains
        for name, split in zip(named, splits, strict=True)
    ]
    return tuple(domain for of_split in own for domain in of_split)
