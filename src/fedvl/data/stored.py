"""Rows of a feature file that are read when they are asked for, where they do not fit into memory.

``rows[index]`` returns them as an ordinary tensor on the device of the run. The file is mapped, and
pages that were read are given back, so that memory does not grow with what a run has seen.
"""

import json
import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

MAX_IN_MEMORY = 2**30  # bytes of one form of a split on a processor; on a GPU half of what is free
KEPT_BYTES = 2**27  # of pages that were read before they are given back
FAULT_BYTES = 2**16  # that Linux maps around a row which it has in its cache
TYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8}

Index = Tensor | NDArray[np.int64] | slice | int


@dataclass(frozen=True)
class DiskTable:
    """A tensor in a file: rows of one shape behind each other."""

    path: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]  # of a row
    begin: int = 0  # first byte
    count: int | None = None  # rows; all to the end of the file if None

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(TYPES[self.dtype]).itemsize

    def __len__(self) -> int:
        return (self.path.stat().st_size - self.begin) // self.row_bytes if self.count is None else self.count

    def take(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return rows in memory."""
        if not len(places):
            return np.empty((0, *self.shape), TYPES[self.dtype])
        rows = np.memmap(self.path, TYPES[self.dtype], "r", self.begin, (len(self), *self.shape))
        return np.asarray(rows[places])


def table_in(path: Path, name: str) -> DiskTable:
    """Return a tensor of a safetensors file."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        described = json.loads(file.read(size))[name]
    count, *shape = described["shape"]
    return DiskTable(path, described["dtype"], tuple(shape), 8 + size + described["data_offsets"][0], count)


@dataclass(frozen=True)
class DiskRows:
    """Some rows of a table; features are used as 32-bit floats, however they are stored."""

    table: DiskTable
    name: str
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def bytes_in_memory(self) -> int:
        width = math.prod(self.table.shape)
        return len(self) * (4 * width if self.name == "features" else self.table.row_bytes)

    def take(self, rows: NDArray[np.int64]) -> "DiskRows":
        return replace(self, places=self.places[rows])

    def read(self) -> Tensor:
        tensor = torch.from_numpy(self.table.take(self.places))
        return tensor.float() if self.name == "features" else tensor


class StoredRows:
    """Rows that are read when they are asked for; features as unit vectors if so asked."""

    def __init__(self, source: DiskRows, device: str | torch.device = "cpu", unit: bool = False) -> None:
        table, self.name, self._places = source.table, source.name, source.places
        with open(table.path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # else each row brings its neighbours along
        flat = np.frombuffer(self._map, TYPES[table.dtype], len(table) * math.prod(table.shape), table.begin)
        self._rows, self._begin, self._read = flat.reshape(len(table), *table.shape), table.begin, 0
        self._page_bytes = max(FAULT_BYTES, self._rows.strides[0])
        self.device, self.unit = torch.device(device), unit
        self.shape = torch.Size([len(self), *table.shape])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Index) -> Tensor:
        """Return rows, as an index of a tensor would."""
        chosen = self._places[index.cpu().numpy() if isinstance(index, Tensor) else index]
        if isinstance(index, slice) and len(chosen):
            self._prefetch(int(chosen[0]), int(chosen[-1]))
        found = np.array(self._rows[chosen])
        self._release(found.size // max(1, math.prod(self.shape[1:])))
        tensor = torch.from_numpy(found).to(self.device)
        tensor = tensor.float() if self.name == "features" else tensor  # stored in 16 bits, or in 32
        return normalize(tensor, dim=-1) if self.unit else tensor

    def _prefetch(self, first: int, last: int) -> None:
        """Read a part ahead: rows of images encoded together lie side by side."""
        begin = self._begin + first * self._rows.strides[0]
        aligned = begin // mmap.PAGESIZE * mmap.PAGESIZE
        length = self._begin + (last + 1) * self._rows.strides[0] - aligned
        if 0 < length <= KEPT_BYTES:
            self._map.madvise(mmap.MADV_WILLNEED, aligned, length)

    def _release(self, rows: int) -> None:
        """Give pages back, of which the system's own cache of files keeps what it has room for."""
        self._read += rows * self._page_bytes
        if self._read > KEPT_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._read = 0


def fits_in_memory(size: int, device: str) -> bool:
    """Return whether so many bytes are held in memory, that of a GPU or of the processor."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return size <= free // 2
    return size <= MAX_IN_MEMORY
