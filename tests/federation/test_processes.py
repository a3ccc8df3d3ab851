"""Clients spread over processes: what is packed comes out the same, and a federation ends in the same bits."""

import json
import math
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers.spread import CHUNKS, finished

from fedvl.federation.local import Chunk, Member, Trained
from fedvl.federation.processes import pack_chunks, pack_results, unpack_chunks, unpack_results
from fedvl.methods.base import Update
from fedvl.tensors import digest

CPU = torch.device("cpu")
# averaged; private and per sample; keys; tensors handed to each client; a memory; the server's prompts; fused; experts
SPREAD = ["linear", "fst-cbdg", "cachefl", "fedpp", "pfedprompt", "fed-mp", "fedmsplit-p", "pfedmoap"]


def test_chunks_come_out_as_they_were_packed():
    begin = {"weight": torch.randn(3, 2), "a/b": torch.arange(4)}
    one = Chunk(
        [Member(7, torch.arange(3), {"labels": torch.tensor([1, -1])}), Member(2, torch.tensor([5]), {})], [begin]
    )
    two = Chunk([Member(4, torch.arange(2), {})], [{"weight": torch.zeros(3, 2), "a/b": torch.ones(4)}])
    round_index, found = unpack_chunks(pack_chunks(9, [one, two]), CPU)
    assert round_index == 9
    for there, here in zip(found, [one, two], strict=True):
        assert [member.client for member in there.members] == [member.client for member in here.members]
        assert [digest(begin) for begin in there.begins] == [digest(begin) for begin in here.begins]
        for left, right in zip(there.members, here.members, strict=True):
            assert torch.equal(left.used, right.used)
            assert digest(left.private) == digest(right.private)


def test_what_many_begin_from_travels_once_and_nothing_may_be_begun_from():
    shared = {"weight": torch.randn(3, 2)}
    chunks = [Chunk([Member(client, torch.arange(1), {})], [shared]) for client in range(3)]
    chunks.append(Chunk([Member(3, torch.arange(1), {})], [{}]))
    letter = pack_chunks(0, chunks)
    assert sum(name.startswith("begin/") for name in letter.tensors) == 1
    _, found = unpack_chunks(letter, CPU)
    assert [digest(chunk.begins[0]) for chunk in found] == [digest(shared)] * 3 + [digest({})]


def test_results_come_out_as_they_were_packed():
    results = [
        [Trained(Update(3, {"w": torch.tensor([0.1, math.inf])}, 1 / 3), {"kept": torch.ones(2)}, 0.1 + 0.2, 5)],
        [Trained(Update(0, {}, 2.0), {}, math.nan, 1), Trained(Update(1, {"w": torch.zeros(0)}, 1.0), {}, 0.0, 2)],
    ]
    found = unpack_results(pack_results(results), CPU)
    for there, here in zip(chain(*found), chain(*results), strict=True):
        assert digest(there.update.tensors) == digest(here.update.tensors)
        assert digest(there.private) == digest(here.private)
        assert there.update[::2] == here.update[::2]
        assert there.examples == here.examples
        assert there.loss == here.loss or (math.isnan(there.loss) and math.isnan(here.loss))


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path):
    tests = Path(__file__).parents[1]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(tests), *sys.path])
    subprocess.run(
        [sys.executable, *words, tests / "helpers" / "spread.py", tmp_path / "found.json", *SPREAD],
        check=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert json.loads((tmp_path / "found.json").read_text()) == {
        name: [finished(name, chunk, None) for chunk in CHUNKS] for name in SPREAD
    }
