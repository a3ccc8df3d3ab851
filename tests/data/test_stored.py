"""Rows that stay on disk: the same numbers as in memory, whatever is asked for, and no more memory than that."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize

from fedvl.data import stored
from fedvl.data.stored import DiskRows, StoredRows, fits_in_memory, table_in


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(50, 6, generator=torch.Generator().manual_seed(0))


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / "rows.safetensors")
    return folder / "rows.safetensors"


def rows_of(path: Path, name: str = "features", kept: np.ndarray | None = None, unit: bool = False) -> StoredRows:
    table = table_in(path, name)
    return StoredRows(DiskRows(table, name, np.arange(len(table)) if kept is None else kept), unit=unit)


def test_rows_are_those_of_the_tensor(tmp_path, table):
    path = written(tmp_path, features=table, other=torch.arange(7))
    rows = rows_of(path)
    assert (len(rows), rows.shape, rows.device) == (50, table.shape, torch.device("cpu"))
    for index in (
        torch.tensor([3, 3, 49, 0]),
        torch.tensor([[1, 2, 3], [7, 7, 7]]),
        torch.zeros(0, dtype=torch.long),
        np.array([5, 4]),
        slice(10, 20),
        slice(None),
        slice(48, 60),
        slice(60, 70),
        7,
    ):
        assert torch.equal(rows[index], table[index])
    taken = rows[slice(0, 2)]
    taken.add_(1)  # a copy: the file is as it was
    assert torch.equal(rows[:2], table[:2])


def test_features_come_as_unit_vectors_with_the_bits_of_the_whole(tmp_path, table):
    rows = rows_of(written(tmp_path, features=table), unit=True)
    whole = normalize(table, dim=-1)
    assert torch.equal(rows[:], whole)
    assert torch.equal(rows[torch.tensor([[4, 9], [9, 31]])], whole[torch.tensor([[4, 9], [9, 31]])])


def test_only_kept_rows_are_counted(tmp_path, table):
    kept = np.array([1, 4, 9, 16, 25])
    rows = rows_of(written(tmp_path, features=table), kept=kept)
    assert len(rows) == 5
    assert torch.equal(rows[1:3], table[[4, 9]])
    assert torch.equal(rows[torch.tensor([4, 0])], table[[25, 1]])


def test_features_in_16_bits_come_in_32(tmp_path, table):
    path = written(tmp_path, features=table.half())
    assert torch.equal(rows_of(path)[:], table.half().float())
    assert torch.equal(rows_of(path, unit=True)[:], normalize(table.half().float(), dim=-1))


@pytest.mark.parametrize("kind", [torch.float16, torch.uint8])
def test_other_types_stay_what_they_are(tmp_path, kind):
    pixels = torch.arange(24).reshape(4, 2, 3).to(kind)
    rows = rows_of(written(tmp_path, pixels=pixels), "pixels")
    assert rows[1:3].dtype == kind
    assert torch.equal(rows[torch.tensor([3, 1])], pixels[[3, 1]])


def test_some_rows_in_memory(tmp_path, table):
    disk = DiskRows(table_in(written(tmp_path, features=table.half()), "features"), "features", np.array([40, 3, 7]))
    assert torch.equal(disk.read(), table.half().float()[[40, 3, 7]])
    assert torch.equal(disk.take(np.array([2, 0])).read(), table.half().float()[[7, 40]])
    assert (len(disk), disk.bytes_in_memory) == (3, 3 * 6 * 4)  # as 32-bit floats
    assert disk.take(np.array([], np.int64)).read().shape == (0, 6)


def test_pages_are_given_back(tmp_path, monkeypatch):
    """As the kernel counts them: what this process holds of the file."""
    path = written(tmp_path, features=torch.zeros(8192, 512))  # 16 MiB
    order = torch.randperm(8192, generator=torch.Generator().manual_seed(0))

    def held(kept_bytes: int) -> int:
        monkeypatch.setattr(stored, "KEPT_BYTES", kept_bytes)
        rows = rows_of(path)
        for part in order.split(128):
            rows[part]
        return held_of(path)

    assert held(2**40) > 2**23
    assert held(2**20) == 0


def held_of(path: Path) -> int:
    """Bytes of a file that are in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.endswith(str(path))]
    return sum(1024 * int(lines[at + 4].split()[1]) for at in starts if lines[at + 4].startswith("Rss:"))


def test_what_fits_is_a_constant_on_a_processor_and_half_of_what_is_free_on_a_gpu(monkeypatch):
    assert fits_in_memory(stored.MAX_IN_MEMORY, "cpu")
    assert not fits_in_memory(stored.MAX_IN_MEMORY + 1, "cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert fits_in_memory(50, "cuda")
    assert not fits_in_memory(51, "cuda")
