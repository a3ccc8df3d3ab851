"""Named tensors: the one form in which model parts are trained, sent, merged, hashed and kept."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as serialise

from fedvl.errors import FedVLError
from fedvl.files import read_file, write_whole

MAX_BYTES = 2**34  # of a safetensors file
# rows that are summed in one go: few enough to stay in a processor's cache, enough to keep a GPU busy
ROWS_BY_DEVICE = {"cpu": 64, "cuda": 4096}

Tensors = dict[str, torch.Tensor]
ByClient = dict[int, Tensors]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def usable_cores() -> int:
    """Return the CPU cores that this process may use; macOS reports only those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Compute on so many processor threads, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def weighted_mean(items: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float]) -> Tensors:
    """Return the weighted mean, summed as :func:`mean_of_rows` does."""
    if not items:
        raise ValueError("a mean needs at least one item and a positive total weight")
    return {
        name: mean_of_rows(torch.stack([item[name] for item in items]), weights).to(first.dtype)
        for name, first in items[0].items()
    }


def mean_of_rows(rows: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of rows."""
    mean = RunningMean()
    mean.add(rows, torch.tensor(weights, dtype=torch.float64))
    return mean.finish()


class RunningMean:
    """A weighted mean of rows that come piece by piece, the same bits however they are cut.

    Rows are multiplied by their weights, summed in float64 by blocks in the order in which they
    come, and divided by all weights at the end.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.total: torch.Tensor | None = None
        self.dtype = torch.float32
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows, and their weights, that fill no block yet

    def add(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        self.dtype = rows.dtype
        block, first = block_of(rows), 0
        if self.waiting:
            first = block - sum(len(held) for held, _ in self.waiting)
            self.waiting.append((rows[:first], weights[:first]))
            if len(rows) < first:
                return
            self._combine_waiting()
        last = first + (len(rows) - first) // block * block
        for begin in range(first, last, block):
            self._combine(rows[begin : begin + block], weights[begin : begin + block])
        if last < len(rows):
            self.waiting.append((rows[last:], weights[last:]))

    def finish(self) -> torch.Tensor:
        """Return the mean of all that came."""
        if self.waiting:
            self._combine_waiting()
        if self.total is None or not self.weight > 0:
            raise ValueError("a mean needs at least one item and a positive total weight")
        return (self.total / self.weight).to(self.dtype)

    def _combine_waiting(self) -> None:
        rows, weights = ([each[part] for each in self.waiting] for part in (0, 1))
        self._combine(torch.cat(rows), torch.cat(weights))
        self.waiting = []

    def _combine(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        lifted = rows * weights.to(rows.device).view(-1, *(1 for _ in rows.shape[1:]))
        part = lifted.sum(0)
        self.total = part if self.total is None else self.total.add_(part)
        self.weight += float(weights.sum())


def block_of(rows: torch.Tensor) -> int:
    return ROWS_BY_DEVICE.get(rows.device.type, ROWS_BY_DEVICE["cpu"])


def placed(tensors: Mapping[str, torch.Tensor], device: torch.device | str) -> Tensors:
    """Return the tensors on a device: a method may draw its own on the processor."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def flatten(by_client: Mapping[int, Tensors]) -> Tensors:
    """Name the tensors of clients CLIENT/NAME."""
    return {f"{client}/{name}": tensor for client, own in by_client.items() for name, tensor in own.items()}


def unflatten(tensors: Mapping[str, torch.Tensor]) -> ByClient:
    """Sort tensors named CLIENT/NAME by client."""
    found: ByClient = {}
    for key, tensor in tensors.items():
        client, slash, name = key.partition("/")
        if not (slash and client.isascii() and client.isdigit() and len(client) < 10):
            raise FedVLError(f"A tensor is named {key[:100]!r}, not CLIENT/NAME; get a whole copy of its file.")
        found.setdefault(int(client), {})[name] = tensor
    return {client: found[client] for client in sorted(found)}


def count_elements(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def count_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; independent of the order of names."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        hasher.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        hasher.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def hash_as_tensor(name: str) -> torch.Tensor:
    """The bytes of a hash or another name in hexadecimal."""
    return torch.frombuffer(bytearray.fromhex(name), dtype=torch.uint8)


def tensor_as_hash(tensor: torch.Tensor) -> str:
    """The bytes of any tensor in hexadecimal: a stranger may have sent it."""
    return bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()).hex()


def to_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The content of a safetensors file, whatever the devices and strides of the tensors."""
    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    # none rather than empty metadata: safetensors writes the latter, beside no tensors, in a way that it cannot read
    content = bytes(serialise(on_cpu, metadata=dict(metadata) if metadata else None))
    return in_order(content) if metadata else content


def in_order(content: bytes) -> bytes:
    """Sort the metadata of a safetensors file, which safetensors writes in any order."""
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file whole and return the SHA-256 of its bytes."""
    content = to_bytes(tensors, metadata)
    write_whole(path, content)
    return hashlib.sha256(content).hexdigest()


def load(path: Path, sha256: str | None = None) -> Tensors:
    """Read a safetensors file; refuse one whose SHA-256 is not the one that was written."""
    try:
        content = read_file(path, MAX_BYTES)
    except OSError as error:
        raise FedVLError(
            f"Cannot read {path}: {error.strerror or error}; restore it from a copy, or make it anew."
        ) from error
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise FedVLError(
            f"{path} is damaged: its SHA-256 is not the one that was written; restore it from a copy, or make it anew."
        )
    try:
        return dict(parse_safetensors(content))
    except SafetensorError as error:
        raise FedVLError(
            f"{path} is not a whole safetensors file ({str(error)[:200]}); restore it from a copy, or make it anew."
        ) from error


def pick_device(name: str) -> str:
    """Return the device of this name; ``auto`` is a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise FedVLError(f"Device '{name}' cannot be used on this machine; use --device cpu, or auto.") from error
    return name
