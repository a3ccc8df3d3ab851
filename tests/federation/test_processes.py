"""Clients spread over processes: what is packed comes out the same, and a federation ends in the same bits."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.spread import CHUNKS, finished

from fedvl.federation.chunks import Chunk, Done
from fedvl.federation.processes import pack_chunks, pack_results, unpack_chunks, unpack_results
from fedvl.federation.stacks import Stack
from fedvl.tensors import digest

CPU = torch.device("cpu")
# averaged; private and per sample; keys; tensors handed to each client; a memory; the server's prompts; fused; experts
SPREAD = ["linear", "fst-cbdg", "cachefl", "fedpp", "pfedprompt", "fed-mp", "fedmsplit-p", "pfedmoap"]


def test_chunks_come_out_as_they_were_packed():
    begin = {"weight": torch.randn(3, 2), "a/b": torch.arange(4)}
    one = Chunk([7, 2], [3, 1], {"labels": torch.tensor([[1, -1], [0, 2]])}, [begin])
    two = Chunk([4], [2], {}, [{"weight": torch.zeros(3, 2), "a/b": torch.ones(4)}])
    round_index, found = unpack_chunks(pack_chunks(9, [one, two], True), CPU)
    assert round_index == 9
    for there, here in zip(found, [one, two], strict=True):
        assert there[:2] == here[:2]
        assert [digest(begin) for begin in there.begins] == [digest(begin) for begin in here.begins]
        assert digest(there.private) == digest(here.private)


def test_what_many_begin_from_travels_once_and_nothing_may_be_begun_from():
    shared = {"weight": torch.randn(3, 2)}
    chunks = [Chunk([client], [1], {}, [shared]) for client in range(3)]
    chunks.append(Chunk([3], [1], {}, [{}]))
    letter = pack_chunks(0, chunks, True)
    assert sum(name.startswith("begin/") for name in letter.tensors) == 1
    _, found = unpack_chunks(letter, CPU)
    assert [digest(chunk.begins[0]) for chunk in found] == [digest(shared)] * 3 + [digest({})]


def test_results_come_out_as_they_were_packed():
    ragged = [torch.ones(2), torch.zeros(0)]
    results = [
        Done(
            [3], {"w": torch.tensor([[0.1, math.inf]])}, [Stack([3], {"kept": torch.ones(1, 2)})], torch.tensor([0.1])
        ),
        Done([0, 1], {"w": ragged, "b": torch.arange(2)}, [], torch.tensor([math.nan, 0.2])),
    ]
    found = unpack_results(pack_results(results), CPU)
    for there, here in zip(found, results, strict=True):
        assert there.clients == here.clients
        assert list(there.sent) == list(here.sent)
        for name, column in here.sent.items():
            assert type(there.sent[name]) is type(column)
            assert all(torch.equal(left, right) for left, right in zip(there.sent[name], column, strict=True))
        assert [stack.clients for stack in there.private] == [stack.clients for stack in here.private]
        assert [digest(stack.tensors) for stack in there.private] == [digest(stack.tensors) for stack in here.private]
        torch.testing.assert_close(there.losses, here.losses, rtol=0, atol=0, equal_nan=True)


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
