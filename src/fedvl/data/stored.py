"""Rows of a feature file that are read when they are asked for, where they do not fit into memory.

``rows[index]`` returns them as an ordinary tensor on the device of the run. The file is mapped, and
pages that were read are given back, so that memory does not grow with what a run has seen.
"""

import json
import math
import mmap
import struct
from pathlib import Path

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


class StoredRows:
    """One tensor of a safetensors file; ``kept`` are the rows of it that count, all if None."""

    def __init__(
        self,
        path: Path,
        name: str,
        device: str | torch.device = "cpu",
        unit: bool = False,
        kept: NDArray[np.int64] | None = None,
    ) -> None:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            described = json.loads(file.read(size))[name]
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # else each row brings its neighbours along
        shape, begin = described["shape"], 8 + size + described["data_offsets"][0]
        flat = np.frombuffer(self._map, TYPES[described["dtype"]], math.prod(shape), begin)
        self._rows, self._kept, self._begin, self._read = flat.reshape(shape), kept, begin, 0
        self._page_bytes = max(FAULT_BYTES, self._rows.strides[0])
        self.name, self.device, self.unit = name, torch.device(device), unit
        self.shape = torch.Size([len(self), *shape[1:]])

    def __len__(self) -> int:
        return len(self._rows if self._kept is None else self._kept)

    def __getitem__(self, index: Index) -> Tensor:
        """Return rows, features as unit vectors if so asked, as an index of a tensor would."""
        chosen = index.cpu().numpy() if isinstance(index, Tensor) else index
        if isinstance(chosen, slice) and self._kept is None:
            self._prefetch(chosen)
        found = np.array(self._rows[chosen if self._kept is None else self._kept[chosen]])
        self._release(found.size // max(1, math.prod(self.shape[1:])))
        tensor = torch.from_numpy(found).to(self.device)
        tensor = tensor.float() if self.name == "features" else tensor  # stored in 16 bits, or in 32
        return normalize(tensor, dim=-1) if self.unit else tensor

    def _prefetch(self, part: slice) -> None:
        """Read a part ahead: its rows lie side by side."""
        first, last, _ = part.indices(len(self))
        begin = self._begin + first * self._rows.strides[0]
        aligned = begin // mmap.PAGESIZE * mmap.PAGESIZE
        length = self._begin + last * self._rows.strides[0] - aligned
        if length > 0:
            self._map.madvise(mmap.MADV_WILLNEED, aligned, length)

    def _release(self, rows: int) -> None:
        """Give pages back, of which the system's own cache of files keeps what it has room for."""
        self._read += rows * self._page_bytes
        if self._read > KEPT_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._read = 0


def fits(size: int, device: str) -> bool:
    """Return whether so many bytes are held in memory, that of a GPU or of the processor."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return size <= free // 2
    return size <= MAX_IN_MEMORY
