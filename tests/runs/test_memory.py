"""Peaks of memory: pages that were there and are gone still count, until a new beginning."""

import mmap
from pathlib import Path

import pytest
import torch

from fedvl.runs import memory

CPU = torch.device("cpu")
SIZE = 64 * 2**20


def test_what_is_freed_counts_until_the_next_beginning() -> None:
    memory.begin(CPU)
    before = memory.peak(CPU)
    with mmap.mmap(-1, SIZE) as pages:  # not by way of an allocator, which may have freed pages at hand
        pages.write(b"1" * SIZE)
    after = memory.peak(CPU)
    assert before.gpu is after.gpu is None
    assert after.process >= before.process + SIZE // 2
    memory.begin(CPU)
    assert memory.peak(CPU).process < after.process


def test_without_proc_it_is_the_peak_since_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = memory.peak(CPU).process
    monkeypatch.setattr(memory, "STATUS", tmp_path / "nothing")
    monkeypatch.setattr(memory, "RESET", tmp_path / "no" / "folder")
    memory.begin(CPU)
    assert memory.peak(CPU).process >= 0.9 * known
