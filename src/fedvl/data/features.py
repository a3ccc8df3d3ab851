"""Feature cache: the output of a frozen encoder for each image, on disk and memory-mapped.

An entry is two files named after a hash of the encoder's fingerprint (weights and preprocessing),
the kind and the identity of the images: `<kind>-<key>.safetensors` with the tensor, and a JSON
file with its SHA-256 and the images that could not be used. Both are verified on every load,
because safetensors loads flipped bits without an error; a damaged entry is computed again. While an
entry is made it is a `.part`, and a `.done` says how many images it holds and their SHA-256: who is
interrupted goes on from there.
Features of the embedded image sets under the embedded model ship with the package in the same
form and are used first.

Features are rounded to 16-bit floats when computed, and used as 32-bit floats. The shipped files
are stored in 16 bits to stay small; because of the rounding, a run gives the same bits with them
as with a newly computed cache. (Two kinds of machine may still differ in the last of those bits.)
"""

import fcntl
import hashlib
import json
import math
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open

from fedvl.data.images import BadImage
from fedvl.errors import FedVLError
from fedvl.files import file_sha256, parse_json, read_file, write_whole
from fedvl.tensors import usable_cores

FORMAT = 1
SHIPPED = Path(__file__).parent / "embedded" / "features"
KINDS = {
    "features": (torch.float32, torch.float16),
    "pixels": (torch.uint8,),
    "patches": (torch.float16,),
}

# The header is padded to a fixed size, because the number of usable images is known only at the end.
_HEADER_SIZE = 248
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}
# Pillow releases the GIL while it decodes; more readers than this wait for each other.
_READERS = min(16, max(2, usable_cores()))
_BATCHES_AHEAD = 2  # that are read while one is encoded: readers have work while the last image of a batch is awaited
_BATCHES_AT_RISK = 16  # between two notes of what is done
# Features tell much of an image: only their owner reads them.
OWN_FOLDER, OWN_FILE = 0o700, 0o600
MAX_DESCRIPTION = 2**28  # bytes

Progress = Callable[[int, int], None]


class ImageSplit(Protocol):
    def __len__(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def read(self, index: int) -> Image.Image: ...

    def describe(self, index: int) -> str: ...


class ImageEncoder(Protocol):
    name: str
    encoding: str

    @property
    def fingerprint(self) -> str: ...

    def preprocess(self, image: Image.Image) -> torch.Tensor: ...

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


@runtime_checkable
class _EncodesImages(Protocol):
    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor: ...

    def encode_patches(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@runtime_checkable
class HoldsFeatures(Protocol):
    """An encoder whose features came from elsewhere."""

    def look_up(self, split: Any, kind: str) -> "Encoded": ...


@dataclass(frozen=True)
class Encoded:
    """Output of an encoder for a split: one row for each usable image.

    `kept` holds the indices of those images in the split, `bad` the names of the others with the
    reason. `note` says that a damaged file was replaced; it is empty otherwise. `mapped` says that
    the tensor is the one in the file at `path`, row by row.
    """

    tensor: torch.Tensor
    kept: npt.NDArray[np.int64]
    bad: list[tuple[str, str]]
    path: Path
    note: str = ""
    mapped: bool = False


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
    batch_size: int = 64,
) -> Encoded:
    """Return features, pixels or patches of a split.

    Features are n x d float32, pixels n x 3 x H x W uint8 and patches n x M x d float16. They come
    from the package, from the cache, or from the encoder, whose output is then cached. Processes
    that need the same entry wait for the first. `progress(done, total)` is called while encoding.
    """
    if isinstance(encoder, HoldsFeatures):
        return encoder.look_up(split, kind)
    key = _key(split, encoder, kind)
    cached = _Entry(cache_dir or default_cache_dir(), kind, key)
    found, shipped_damage = _Entry(SHIPPED, kind, key).find(split)
    if found is None:
        found, _ = cached.find(split)
    cache_damage = ""
    if found is None:
        keep_private(cached.folder)
        with cached.locked():
            # Look again: another process may have written it while we waited, or have been between its two files.
            found, cache_damage = cached.find(split)
            if found is None:
                found = cached.make(split, encoder, KINDS[kind][0], progress, batch_size)
    notes = []
    if shipped_damage:
        notes.append(f"The features that came with the package were not used because {shipped_damage}.")
    if cache_damage:
        notes.append(f"The {kind} in {cached.data} were computed again because {cache_damage}.")
    return replace(found, note=" ".join(notes))


def ship_features(split: ImageSplit, encoder: ImageEncoder, folder: Path, progress: Progress | None = None) -> Path:
    """Compute the features of an embedded set again, in the 16 bits in which they ship."""
    entry = _Entry(folder, "features", _key(split, encoder, "features"))
    with entry.locked():
        made = entry.make(split, encoder, torch.float16, progress, batch_size=64)
        entry.lock.unlink()
        for path in (entry.data, entry.description):
            path.chmod(0o644)
    return made.path


def _key(split: ImageSplit, encoder: ImageEncoder, kind: str) -> str:
    if kind not in KINDS:
        raise FedVLError(f"There is no kind of feature called '{kind}'; use features, pixels or patches.")
    if kind != "pixels" and not isinstance(encoder, _EncodesImages):
        raise FedVLError(f"Model {encoder.name} does not encode images separately from texts; use a CLIP model.")
    if len(split) == 0:
        raise FedVLError("There are no images to encode; check that the dataset is not empty.")
    parts = [FORMAT, encoder.fingerprint, kind, split.identity]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def keep_private(folder: Path) -> None:
    """Make the cache's folder and close it to others, unless another user owns it."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=OWN_FOLDER)
        with suppress(PermissionError):
            folder.chmod(OWN_FOLDER)


def _own(path: str, flags: int) -> int:
    return os.open(path, flags, OWN_FILE)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


class _DamagedError(FedVLError):
    """A damaged cache entry."""


@dataclass(frozen=True)
class _Entry:
    """The files of one cached tensor."""

    folder: Path
    kind: str
    key: str

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.kind}-{self.key[:16]}{suffix}"

    @property
    def data(self) -> Path:
        return self._file(".safetensors")

    @property
    def description(self) -> Path:
        return self._file(".json")

    @property
    def lock(self) -> Path:
        return self._file(".lock")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the entry's lock; the kernel releases it with the process, so it is never stale."""
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.lock, "ab", opener=_own)  # noqa: SIM115 (closed below)
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def find(self, split: ImageSplit) -> tuple[Encoded | None, str]:
        """Return the entry or None, and what is wrong with it if it is damaged."""
        if not self.data.exists() and not self.description.exists():
            return None, ""
        try:
            return self.load(split), ""
        except _DamagedError as error:
            return None, str(error)

    def load(self, split: ImageSplit) -> Encoded:
        try:
            described = parse_json(read_file(self.description, MAX_DESCRIPTION))
            total, bad = described["total"], described["bad"]
            if described["seal"] != _seal(described):
                raise _DamagedError("its description was changed")
            if (described["format"], described["key"], total) != (FORMAT, self.key, len(split)):
                raise _DamagedError("it is of other images, another model or another version")
            if file_sha256(self.data) != described["sha256"]:
                raise _DamagedError("its SHA-256 is not the one that was written")
            with safe_open(self.data, framework="pt") as file:  # memory-mapped: read on use, never written back
                tensor = file.get_tensor(self.kind)
        except OSError as error:
            raise _DamagedError(
                f"{Path(error.filename or self.data).name} cannot be read ({error.strerror})"
            ) from error
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise _DamagedError("it is not in FedVL's format") from error
        if tensor.dtype not in KINDS[self.kind] or len(tensor) != total - len(bad):
            raise _DamagedError("its type or length is wrong")
        good = np.ones(total, dtype=bool)
        good[[index for index, _ in bad]] = False
        return Encoded(
            tensor=tensor.float() if self.kind == "features" else tensor,
            kept=np.flatnonzero(good),
            bad=[(split.describe(index), reason) for index, reason in bad],
            path=self.data,
            mapped=True,
        )

    def make(
        self,
        split: ImageSplit,
        encoder: ImageEncoder,
        storage: torch.dtype,
        progress: Progress | None,
        batch_size: int,
    ) -> Encoded:
        """Encode the split and write the entry, replacing any old one; the lock must be held."""
        self._remove()
        with _Part(self._file(".part"), self.kind, storage, [FORMAT, self.key, len(split), batch_size]) as part:
            for done, rows, failed in _encoded_batches(split, encoder, self.kind, batch_size, part.done):
                part.append(done, rows, failed)
                if done // batch_size % _BATCHES_AT_RISK == 0:
                    part.note()
                if progress is not None:
                    progress(done, len(split))
            bad = part.bad
            if part.rows == 0:
                index, reason = min(bad)
                first = f"{split.describe(index)}: {reason.rstrip('.')}"
                raise FedVLError(f"None of the {len(split)} images can be used (the first is {first}).")
            described = {"format": FORMAT, "key": self.key, "total": len(split), "bad": sorted(bad)}
            described["sha256"] = part.finish()
            described["seal"] = _seal(described)
            try:
                with _writing(self.folder):
                    os.replace(part.path, self.data)
                    write_whole(self.description, json.dumps(described, indent=1, sort_keys=True).encode(), OWN_FILE)
                return self.load(split)
            except FedVLError:
                self._remove()
                raise

    def _remove(self) -> None:
        with _writing(self.folder):
            self.description.unlink(missing_ok=True)
            self.data.unlink(missing_ok=True)


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


class _Part:
    """A safetensors file of one tensor, written batch by batch, from where it was left.

    It is deleted if it cannot be finished, and kept if it was interrupted.
    """

    def __init__(self, path: Path, kind: str, storage: torch.dtype, of: list[Any]) -> None:
        self.path, self.kind, self.storage = path, kind, storage
        self.of = [*of, _NAMES[storage]]  # what it is a part of
        self.done = self.rows = 0  # images that were looked at, and those of them that are in it
        self.bad: list[tuple[int, str]] = []
        self.shape: torch.Size | None = None
        self.sha256 = hashlib.sha256()  # of the rows
        self.file: BinaryIO

    @property
    def notes(self) -> Path:
        return self.path.with_suffix(".done")

    def __enter__(self) -> Self:
        with _writing(self.path.parent):
            if not self._go_on():
                self.path.unlink(missing_ok=True)  # also a link, or a file that others can read
                self.notes.unlink(missing_ok=True)
                self.file = open(self.path, "xb", opener=_own)
                self.file.write(bytes(8 + _HEADER_SIZE))
        return self

    def _go_on(self) -> bool:
        """Open what an interrupted process left, if its rows are those that it noted."""
        try:
            noted = parse_json(read_file(self.notes, MAX_DESCRIPTION))
            if noted["seal"] != _seal(noted) or noted["of"] != self.of:
                return False
            shape = torch.Size(noted["shape"])
            size = noted["rows"] * math.prod(shape) * self.storage.itemsize
            self.file = open(self.path, "r+b", opener=_no_link)  # noqa: SIM115 (closed on exit)
            found = os.fstat(self.file.fileno())
            own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o77 == 0
            hasher = _hash_rows(self.file, size) if own else hashlib.sha256()
            if not own or hasher.hexdigest() != noted["sha256"]:
                self.file.close()
                return False
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self.file.truncate(8 + _HEADER_SIZE + size)
        self.file.seek(0, os.SEEK_END)
        self.sha256, self.shape = hasher, shape
        self.done, self.rows = noted["done"], noted["rows"]
        self.bad = [(index, reason) for index, reason in noted["bad"]]
        return True

    def append(self, done: int, rows: torch.Tensor, bad: list[tuple[int, str]]) -> None:
        self.done = done
        self.bad += bad
        if not len(rows):
            return
        self.shape = self.shape or rows.shape[1:]
        if rows.shape[1:] != self.shape:
            raise _uneven()
        self.rows += len(rows)
        content = rows.to(self.storage).contiguous().numpy().data
        self.sha256.update(content)
        with _writing(self.path.parent):
            self.file.write(content)

    def note(self) -> None:
        """Record progress, so that another process can continue after an interruption."""
        if self.shape is None:
            return
        noted = {"of": self.of, "done": self.done, "rows": self.rows, "shape": list(self.shape), "bad": self.bad}
        noted["sha256"] = self.sha256.hexdigest()
        noted["seal"] = _seal(noted)
        with _writing(self.path.parent):
            self.file.flush()
            os.fsync(self.file.fileno())
            write_whole(self.notes, json.dumps(noted).encode(), OWN_FILE)

    def finish(self) -> str:
        """Write the header, flush the file to disk and return its SHA-256."""
        shape = [self.rows, *(self.shape or ())]
        size = math.prod(shape) * self.storage.itemsize
        described = {self.kind: {"dtype": _NAMES[self.storage], "shape": shape, "data_offsets": [0, size]}}
        with _writing(self.path.parent):
            self.file.seek(0)
            self.file.write(struct.pack("<Q", _HEADER_SIZE) + json.dumps(described).encode().ljust(_HEADER_SIZE))
            self.file.flush()
            os.fsync(self.file.fileno())
            return file_sha256(self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # a failed write fails again here, and was already reported
            self.file.close()
        if error is None or isinstance(error, FedVLError) or not self.notes.exists():
            self.path.unlink(missing_ok=True)
            self.notes.unlink(missing_ok=True)


def _hash_rows(file: BinaryIO, size: int) -> "hashlib._Hash":
    """Return the hash of so many bytes behind the header, read piece by piece."""
    hasher, left = hashlib.sha256(), size
    file.seek(8 + _HEADER_SIZE)
    while left > 0 and (piece := file.read(min(left, 2**20))):
        hasher.update(piece)
        left -= len(piece)
    return hasher


class _Rows(NamedTuple):
    """Rows in the processor's memory, or on their way to it from a GPU."""

    tensor: torch.Tensor
    copied: torch.cuda.Event | None = None

    def arrived(self) -> torch.Tensor:
        if self.copied is not None:
            self.copied.synchronize()
        return self.tensor


class _Launched(NamedTuple):
    """A batch that a GPU may still be at work on."""

    done: int  # images looked at with this batch
    images: list[int]
    rows: _Rows
    failed: list[tuple[int, str]]

    def finished(self) -> tuple[int, torch.Tensor, list[tuple[int, str]]]:
        rows = self.rows.arrived()
        finite = rows.isfinite().flatten(1).all(1)
        reason = "the model gives numbers for it that are not finite."
        failed = [(index, reason) for index, fine in zip(self.images, finite.tolist(), strict=True) if not fine]
        return self.done, rows[finite], self.failed + failed


def _encoded_batches(
    split: ImageSplit, encoder: ImageEncoder, kind: str, batch_size: int, done: int
) -> Iterator[tuple[int, torch.Tensor, list[tuple[int, str]]]]:
    """Yield per batch: images done so far, rows of the good ones, the others with the reason.

    A batch is waited for when the next one is launched, so that a GPU always has work.
    """
    launched: _Launched | None = None
    for start, batch in _read_batches(split, encoder, batch_size, done):
        images = {index: pixels for index, pixels in batch if isinstance(pixels, torch.Tensor)}
        failed = [(index, reason) for index, reason in batch if isinstance(reason, str)]
        rows = _launch(encoder, kind, list(images.values())) if images else _Rows(torch.empty(0, 1))
        if launched is not None:
            yield launched.finished()
        launched = _Launched(start + len(batch), list(images), rows, failed)
    if launched is not None:
        yield launched.finished()


def encode_images(encoder: ImageEncoder, kind: str, images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Encode a batch of preprocessed images as rows of the given kind, rounded as in the cache."""
    return _launch(encoder, kind, images).arrived()


def _launch(encoder: ImageEncoder, kind: str, images: Sequence[torch.Tensor]) -> _Rows:
    """Begin to encode a batch; neither a GPU nor this thread waits for the other."""
    if any(image.shape != images[0].shape for image in images):
        raise _uneven()
    if not isinstance(encoder, _EncodesImages) or kind == "pixels":
        return _Rows(_stack(images))
    device = next(encoder.parameters()).device
    on_gpu = device.type == "cuda"
    lower = torch.autocast(device.type, torch.bfloat16, enabled=encoder.encoding == "bfloat16")
    with torch.inference_mode(), lower:
        normalised = encoder.normalise(_stack(images, pinned=on_gpu).to(device, non_blocking=on_gpu))
        rows = encoder.encode_image(normalised) if kind == "features" else encoder.encode_patches(normalised)[1]
        if not on_gpu:
            return _Rows(rows.half().cpu())
        # The copy back is in the queue before the next batch is, which it would otherwise wait for.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copy = rows.half().to("cpu", non_blocking=True)
        copied.record(torch.cuda.current_stream(device))
        return _Rows(copy, copied)


def _stack(images: Sequence[torch.Tensor], pinned: bool = False) -> torch.Tensor:
    """Stack by one thread: a team of PyTorch's would wait for cores that readers have."""
    stacked = torch.empty(len(images), *images[0].shape, dtype=images[0].dtype, pin_memory=pinned)
    np.stack([image.numpy() for image in images], out=stacked.numpy())
    return stacked


def _uneven() -> FedVLError:
    return FedVLError(
        "This model keeps the aspect ratio of images, and images of several shapes cannot be cached as one array; "
        "crop them to one shape first."
    )


def _read_batches(
    split: ImageSplit, encoder: ImageEncoder, batch_size: int, done: int
) -> Iterator[tuple[int, list[tuple[int, torch.Tensor | str]]]]:
    """Yield batches of (index, pixels or error) in order, reading ahead while one is encoded."""

    def read(index: int) -> torch.Tensor | str:
        try:
            return encoder.preprocess(split.read(index))
        except BadImage as error:
            return error.reason

    def submit(start: int) -> list[tuple[int, Future[torch.Tensor | str]]]:
        return [(index, pool.submit(read, index)) for index in range(start, min(start + batch_size, len(split)))]

    with ThreadPoolExecutor(_READERS) as pool:
        try:
            starts = range(done, len(split), batch_size)
            ahead = deque(map(submit, starts[:_BATCHES_AHEAD]))
            for number, start in enumerate(starts):
                batch = [(index, future.result()) for index, future in ahead.popleft()]
                ahead.extend(map(submit, starts[number + _BATCHES_AHEAD : number + _BATCHES_AHEAD + 1]))
                yield start, batch
        finally:
            pool.shutdown(cancel_futures=True)
