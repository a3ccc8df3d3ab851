"""Peaks of memory: an array that was there and is gone still counts, until a new beginning."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedvl import memory

CPU = torch.device("cpu")
ARRAY = 64 * 2**20


def test_what_is_freed_counts_until_the_next_beginning() -> None:
    memory.begin(CPU)
    before = memory.peak(CPU)
    array = np.ones(ARRAY, np.uint8)  # every page is written
    del array
    after = memory.peak(CPU)
    assert before.gpu is after.gpu is None
    assert after.process >= before.process + ARRAY // 2
    memory.begin(CPU)
    assert memory.peak(CPU).process < after.process


def test_without_proc_it_is_the_peak_since_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = memory.peak(CPU).process
    monkeypatch.setattr(memory, "STATUS", tmp_path / "nothing")
    monkeypatch.setattr(memory, "RESET", tmp_path / "no" / "folder")
    memory.begin(CPU)
    assert memory.peak(CPU).process >= 0.9 * known
