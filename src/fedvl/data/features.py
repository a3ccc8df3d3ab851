"""Feature cache: the output of a frozen encoder for each image, on disk and memory-mapped.

For each encoder (weights, preprocessing, precision) and kind there is a table, two files named
after a hash of them: `<kind>-<key>.rows` with a row for each image that was ever encoded, and
`.index` with the SHA-256 of each image's file, its row, and a SHA-256 over both. So an image is
encoded once, in whichever datasets it is. Rows are only added. Each row is
verified when it is read; a damaged one is computed again. Who is interrupted, or writes beside
another process, loses nothing.
Features of the embedded image sets under the embedded model ship with the package, as
`features-<key>.safetensors` with a description, and are used first.

Features are rounded to 16-bit floats when computed, and used as 32-bit floats. Because of the
rounding, a run gives the same bits with shipped features as with computed ones. (Two kinds of
machine may still differ in the last of those bits.)
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors import SafetensorError

from fedvl.data.decoders import Decoders
from fedvl.data.encoding import EncodesImages, ImageEncoder, Progress, decoders_for, encode_rows
from fedvl.data.images import DECODING
from fedvl.data.staging import uneven
from fedvl.data.stored import DiskRows, DiskTable, table_in
from fedvl.errors import FedVLError
from fedvl.files import file_sha256, parse_json, read_file, write_whole
from fedvl.tensors import save

CACHE_FORMAT = 2  # of the index
SHIPPED_FORMAT = 1
SHIPPED = Path(__file__).parent / "embedded" / "features"
DTYPES = {"features": "F16", "pixels": "U8", "patches": "F16"}

# Features tell much of an image: only their owner reads them.
OWN_FOLDER, OWN_FILE = 0o700, 0o600
MAX_DESCRIPTION = 2**28  # bytes
MAX_INDEX = 2**34
INDEX_HEAD = 512  # bytes of the index before its records
INDEX_RECORD = np.dtype([("image", "u1", 32), ("row", "<u8"), ("seal", "u1", 32)])
BATCHES_AT_RISK = 16  # between two that are flushed to the disk
VERIFIED_AT_ONCE = 4096  # rows
ABSENT = -1

Places = npt.NDArray[np.int64]
Digests = npt.NDArray[np.uint8]


class ImageSplit(Protocol):
    def __len__(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def read(self, index: int) -> Image.Image: ...

    def source(self, index: int) -> Path | bytes | None: ...

    def describe(self, index: int) -> str: ...

    def content(self, index: int) -> bytes: ...


@runtime_checkable
class HoldsFeatures(Protocol):
    """An encoder whose features came from elsewhere."""

    def look_up(self, split: Any, kind: str) -> "EncodedSplit": ...


@runtime_checkable
class CarriesFeatures(Protocol):
    """A split whose features came with it, in place of its images."""

    def carried(self, kind: str) -> "EncodedSplit": ...


@dataclass(frozen=True)
class EncodedSplit:
    """Output of an encoder for a split: one row for each usable image.

    `kept` holds the indices of those images in the split, `bad` the names of the others with the
    reason. `note` says that a damaged file was replaced; it is empty otherwise.
    """

    rows: torch.Tensor | DiskRows
    kept: Places
    bad: list[tuple[str, str]]
    note: str = ""

    @property
    def tensor(self) -> torch.Tensor:
        """The rows in memory."""
        return self.rows if isinstance(self.rows, torch.Tensor) else self.rows.read()


def default_cache_dir() -> Path:
    """Return the folder of the feature cache: FEDVL_CACHE, or one in the user's cache."""
    if chosen := os.environ.get("FEDVL_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvl" / "features"


def encode_split(
    split: ImageSplit,
    encoder: ImageEncoder | HoldsFeatures,
    kind: str,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> EncodedSplit:
    """Return features, pixels or patches of a split, of which at least one image is usable.

    Features are n x d float32, pixels n x 3 x H x W uint8 and patches n x M x d float16. They come
    from the package, from the cache, or from the encoder, whose output is then cached. Processes
    that need images of the same encoder wait for each other. `progress(done, total)` is called
    while encoding.
    """
    if isinstance(split, CarriesFeatures):
        return split.carried(kind)
    if isinstance(encoder, HoldsFeatures):
        return encoder.look_up(split, kind)
    if len(split) == 0:
        raise FedVLError("There are no images to encode; check that the dataset is not empty.")
    found = encode_each(split, encoder, kind, cache_dir, progress)
    if not len(found.kept):
        name, reason = found.bad[0]
        raise FedVLError(f"None of the {len(split)} images can be used (the first is {name}: {reason.rstrip('.')}).")
    return found


def encode_each(
    split: ImageSplit,
    encoder: ImageEncoder,
    kind: str,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> EncodedSplit:
    """Return the same, also where no image can be used."""
    table = _Table(cache_dir or default_cache_dir(), kind, table_key(encoder, kind))
    with ExitStack() as stack:
        # Processes start while files are hashed, where the table is too short to have all images.
        decoders = stack.enter_context(decoders_for(split, len(split) - table.length(), encoder, kind))
        shipped = _Shipped(SHIPPED, kind, shipped_key(split, encoder, kind))
        found, damage = shipped.find(split)
        if found is not None:
            return found
        notes = [f"The features that came with the package were not used because {damage}."] if damage else []
        images = _digests(split)
        places, damage = table.find(images)
        bad: dict[int, str] = {}
        if (places == ABSENT).any():
            keep_private(table.folder)
            with table.locked():
                places, damage = table.find(images)  # again: another process may have added them meanwhile
                if damage:
                    notes.append(f"Some of the {kind} in {table.rows} were computed again because {damage}.")
                if decoders is None:
                    absent = int((places == ABSENT).sum())
                    decoders = stack.enter_context(decoders_for(split, absent, encoder, kind))
                bad = table.add(split, images, places, encoder, progress, decoders)
    kept = np.flatnonzero(places != ABSENT)
    rows = DiskRows(table.on_disk(), kind, places[kept]) if len(kept) else torch.empty(0, 1)
    return EncodedSplit(rows, kept, [(split.describe(index), bad[index]) for index in sorted(bad)], " ".join(notes))


def ship_features(split: ImageSplit, encoder: ImageEncoder, folder: Path, progress: Progress | None = None) -> Path:
    """Compute the features of an embedded set again, in the 16 bits in which they ship."""
    key = shipped_key(split, encoder, "features")
    entry = _Shipped(folder, "features", key)
    parts, bad = [], []
    for batch in encode_rows(split, range(len(split)), encoder, "features"):
        parts.append(batch.rows)
        bad += [[index, reason] for index, reason in batch.failed]
        if progress is not None:
            progress(len(batch.images), len(split))
    folder.mkdir(parents=True, exist_ok=True)
    described = {"format": SHIPPED_FORMAT, "key": key, "total": len(split), "bad": sorted(bad)}
    described["sha256"] = save(entry.data, {"features": torch.cat(parts)})
    described["seal"] = _seal(described)
    write_whole(entry.description, json.dumps(described, indent=1, sort_keys=True).encode())
    return entry.data


def shipped_key(split: ImageSplit, encoder: ImageEncoder, kind: str) -> str:
    """Name the features of a set of images in their order."""
    return _hash_of([SHIPPED_FORMAT, fingerprint_for(encoder, kind), kind, split.identity])


def table_key(encoder: ImageEncoder, kind: str) -> str:
    """Name what an encoder makes of images as this version decodes them."""
    return _hash_of([CACHE_FORMAT, fingerprint_for(encoder, kind), kind, DECODING])


def fingerprint_for(encoder: ImageEncoder, kind: str) -> str:
    if kind not in DTYPES:
        raise FedVLError(f"There is no kind of feature called '{kind}'; use features, pixels or patches.")
    if kind != "pixels" and not isinstance(encoder, EncodesImages):
        raise FedVLError(f"Model {encoder.name} does not encode images separately from texts; use a CLIP model.")
    return encoder.fingerprint


def _hash_of(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _digests(split: ImageSplit) -> Digests:
    """Return a row of 32 bytes for each image, the same for the same file under any name."""
    found = b"".join(hashlib.sha256(split.content(index)).digest() for index in range(len(split)))
    return np.frombuffer(found, np.uint8).reshape(-1, 32)


def keep_private(folder: Path) -> None:
    """Make the cache's folder and close it to others, unless another user owns it."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=OWN_FOLDER)
        with suppress(PermissionError):
            folder.chmod(OWN_FOLDER)


def _own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, OWN_FILE)


def _head_of(path: Path) -> bytes:
    with open(path, "rb", opener=_own) as file:
        return file.read(INDEX_HEAD)


class _DamagedError(FedVLError):
    """A damaged file of the cache."""


class _Found(NamedTuple):
    """What is in a table for some images."""

    places: Places  # the row of each image
    damage: str


@dataclass(frozen=True)
class _Table:
    """All rows of one encoder and kind; a later record of an image replaces an earlier one."""

    folder: Path
    kind: str
    key: str

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.kind}-{self.key[:16]}{suffix}"

    @property
    def rows(self) -> Path:
        return self._file(".rows")

    @property
    def index(self) -> Path:
        return self._file(".index")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the table's lock; the kernel releases it with the process, so it is never stale."""
        with _writing(self.folder):
            file = open(self._file(".lock"), "ab", opener=_own)  # noqa: SIM115 (closed below)
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def length(self) -> int:
        """Return how many records the index has room for."""
        try:
            return max(0, self.index.stat().st_size - INDEX_HEAD) // INDEX_RECORD.itemsize
        except OSError:
            return 0

    def on_disk(self) -> DiskTable:
        """Return the rows as a table, with the shape that the index names."""
        return DiskTable(self.rows, DTYPES[self.kind], self._shape(_head_of(self.index)))

    def find(self, images: Digests) -> _Found:
        """Return the verified row of each image, and what is wrong with damaged ones."""
        absent = np.full(len(images), ABSENT, np.int64)
        try:
            if self.index.is_symlink() or self.rows.is_symlink():
                raise _DamagedError("its files are links")
            content = read_file(self.index, MAX_INDEX)
            table = DiskTable(self.rows, DTYPES[self.kind], self._shape(content))
            records = np.frombuffer(
                content, INDEX_RECORD, (len(content) - INDEX_HEAD) // INDEX_RECORD.itemsize, INDEX_HEAD
            )
            chosen = _latest(records["image"], images)
            known = np.flatnonzero(chosen != ABSENT)
            places = absent.copy()
            places[known] = records["row"][chosen[known]].astype(np.int64)
            wrong = self._damaged(table, images[known], places[known], records["seal"][chosen[known]])
        except FileNotFoundError as error:
            missing = self.index.exists() or self.rows.exists()
            return _Found(absent, f"{Path(error.filename).name} is missing" if missing else "")
        except _DamagedError as error:
            return _Found(absent, str(error))
        except OSError as error:
            return _Found(absent, f"{Path(error.filename or self.rows).name} cannot be read ({error.strerror})")
        places[known[wrong]] = ABSENT
        return _Found(places, "their SHA-256 is not the one that was written" if wrong.any() else "")

    def _shape(self, content: bytes) -> tuple[int, ...]:
        """Return the shape of a row, which the head of the index names under its own hash."""
        try:
            if len(content) < INDEX_HEAD:
                raise _DamagedError("the index is cut off")
            described = parse_json(content[:INDEX_HEAD])
            if described["seal"] != _seal(described) or (described["format"], described["key"]) != (
                CACHE_FORMAT,
                self.key,
            ):
                raise _DamagedError("the index is of another model or version, or was changed")
            return tuple(described["shape"])
        except (ValueError, KeyError, TypeError) as error:
            raise _DamagedError("the index is not in FedVL's format") from error

    def _damaged(self, table: DiskTable, images: Digests, places: Places, seals: Digests) -> npt.NDArray[np.bool_]:
        """Return which rows are not those that were written for these images."""
        wrong = (places < 0) | (places >= len(table))
        for first in range(0, len(images), VERIFIED_AT_ONCE):
            part = np.arange(first, min(first + VERIFIED_AT_ONCE, len(images)))
            part = part[~wrong[part]]
            for number, row in zip(part.tolist(), table.take(places[part]), strict=True):
                wrong[number] = _row_seal(images[number], row) != seals[number].tobytes()
        return wrong

    def add(
        self,
        split: ImageSplit,
        images: Digests,
        places: Places,
        encoder: ImageEncoder,
        progress: Progress | None,
        decoders: Decoders | None,
    ) -> dict[int, str]:
        """Encode what is absent, and note its places; return why others are unusable.

        The lock must be held.
        """
        wanted = np.flatnonzero(places == ABSENT).tolist()
        bad: dict[int, str] = {}
        done = 0
        with _Adding(self) as adding:
            for number, batch in enumerate(encode_rows(split, wanted, encoder, self.kind, decoders), 1):
                if len(batch.images):
                    places[batch.images] = adding.append(images[batch.images], batch.rows)
                bad |= dict(batch.failed)
                done += len(batch.images) + len(batch.failed)
                if number % BATCHES_AT_RISK == 0:
                    adding.flush()
                if progress is not None:
                    progress(done, len(wanted))
            adding.flush()
        return bad


class _Adding:
    """Appends rows to a table: first the rows, then the records that name them."""

    def __init__(self, table: _Table) -> None:
        self.table = table
        self.files: tuple[BinaryIO, BinaryIO] | None = None  # rows and index
        self.shape: tuple[int, ...] | None = None  # of a row

    def __enter__(self) -> "_Adding":
        return self

    def append(self, images: Digests, rows: torch.Tensor) -> Places:
        """Return the places of the rows."""
        content = rows.contiguous().numpy()
        if self.shape not in (None, content.shape[1:]):
            raise uneven()
        with _writing(self.table.folder):
            data, index = self.files or self._open(content.shape[1:])
            width = content[0].nbytes
            first = -(-data.seek(0, os.SEEK_END) // width)  # behind a row that was cut off
            data.seek(first * width)
            data.write(content.data)
            data.flush()
            places = np.arange(first, first + len(content))
            records = np.empty(len(content), INDEX_RECORD)
            records["image"], records["row"] = images, places
            seals = b"".join(_row_seal(image, row) for image, row in zip(images, content, strict=True))
            records["seal"] = np.frombuffer(seals, np.uint8).reshape(-1, 32)
            end = index.seek(0, os.SEEK_END)
            index.seek(end - (end - INDEX_HEAD) % INDEX_RECORD.itemsize)
            index.write(records.tobytes())
            index.flush()
        return places

    def _open(self, shape: tuple[int, ...]) -> tuple[BinaryIO, BinaryIO]:
        table = self.table
        try:
            known = table._shape(_head_of(table.index))
            safe = all(path.is_file() and not path.is_symlink() for path in (table.rows, table.index))
        except (OSError, _DamagedError):
            known, safe = (), False
        if not safe:
            described: dict[str, Any] = {"format": CACHE_FORMAT, "key": table.key, "shape": list(shape)}
            described["seal"] = _seal(described)
            table.rows.unlink(missing_ok=True)  # damaged; open readers keep their copy
            write_whole(table.index, json.dumps(described).encode().ljust(INDEX_HEAD), OWN_FILE)
            open(table.rows, "xb", opener=_own).close()
        elif known != shape:
            raise uneven()
        data = open(table.rows, "r+b", opener=_own)  # noqa: SIM115 (closed on exit)
        index = open(table.index, "r+b", opener=_own)  # noqa: SIM115
        self.files, self.shape = (data, index), shape
        return self.files

    def flush(self) -> None:
        """Write through to the disk."""
        with _writing(self.table.folder):
            for file in self.files or ():
                os.fsync(file.fileno())

    def __exit__(self, *_: object) -> None:
        for file in self.files or ():
            with suppress(OSError):  # a failed write fails again here, and was already reported
                file.close()


def _row_seal(image: Digests, row: npt.NDArray[Any]) -> bytes:
    return hashlib.sha256(image.tobytes() + row.tobytes()).digest()


def _latest(known: Digests, images: Digests) -> Places:
    """Return the last place of each image among the known ones."""
    chosen = np.full(len(images), ABSENT, np.int64)
    if not len(known):
        return chosen
    order = np.argsort(_beginnings(known), kind="stable")
    last = np.searchsorted(_beginnings(known)[order], _beginnings(images), side="right") - 1
    candidates = order[np.maximum(last, 0)]
    same = (last >= 0) & (known[candidates] == images).all(1)
    chosen[same] = candidates[same]
    return chosen


def _beginnings(digests: Digests) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]


@dataclass(frozen=True)
class _Shipped:
    """The files of the features of one set of images, in its order."""

    folder: Path
    kind: str
    key: str

    @property
    def data(self) -> Path:
        return self.folder / f"{self.kind}-{self.key[:16]}.safetensors"

    @property
    def description(self) -> Path:
        return self.data.with_suffix(".json")

    def find(self, split: ImageSplit) -> tuple[EncodedSplit | None, str]:
        """Return the rows or None, and what is wrong with them if they are damaged."""
        if not self.data.exists() and not self.description.exists():
            return None, ""
        try:
            return self.load(split), ""
        except _DamagedError as error:
            return None, str(error)

    def load(self, split: ImageSplit) -> EncodedSplit:
        try:
            described = parse_json(read_file(self.description, MAX_DESCRIPTION))
            total, bad = described["total"], described["bad"]
            if described["seal"] != _seal(described):
                raise _DamagedError("its description was changed")
            if (described["format"], described["key"], total) != (SHIPPED_FORMAT, self.key, len(split)):
                raise _DamagedError("it is of other images, another model or another version")
            if file_sha256(self.data) != described["sha256"]:
                raise _DamagedError("its SHA-256 is not the one that was written")
            table = table_in(self.data, self.kind)
        except OSError as error:
            raise _DamagedError(
                f"{Path(error.filename or self.data).name} cannot be read ({error.strerror})"
            ) from error
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise _DamagedError("it is not in FedVL's format") from error
        if table.dtype != DTYPES[self.kind] or len(table) != total - len(bad):
            raise _DamagedError("its type or length is wrong")
        good = np.ones(total, dtype=bool)
        good[[index for index, _ in bad]] = False
        return EncodedSplit(
            rows=DiskRows(table, self.kind, np.arange(len(table))),
            kept=np.flatnonzero(good),
            bad=[(split.describe(index), reason) for index, reason in bad],
        )


def _seal(described: dict[str, Any]) -> str:
    content = {name: value for name, value in described.items() if name != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FedVLError(
            f"The feature cache in {folder} cannot be written ({error.strerror or error}); "
            "free some space there, or set FEDVL_CACHE to a folder that can be written."
        ) from error
