import hashlib
import itertools
import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from fedvl.errors import FedVLError
from fedvl.files import file_sha256
from fedvl.tensors import RunningMean, count_bytes, digest, load, save, to_bytes, unflatten, usable_cores, weighted_mean

IMPORT_ALL_AS_ON_MACOS = """
import importlib, os, pkgutil
del os.sched_getaffinity
import fedvl
for module in pkgutil.walk_packages(fedvl.__path__, "fedvl."):
    if module.name not in ("fedvl.__main__", "fedvl.methods.parts.transport_kernel"):  # runs a command; needs triton
        importlib.import_module(module.name)
"""


def test_cores_are_those_of_this_process_or_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 8}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


def test_every_module_is_imported_without_sched_getaffinity():
    subprocess.run([sys.executable, "-c", IMPORT_ALL_AS_ON_MACOS], check=True)


def test_weighted_mean_by_hand():
    mean = weighted_mean([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, 8.0])}], [1, 2])
    assert mean["w"].tolist() == [3.0, 6.0]
    assert mean["w"].dtype == torch.float32


@given(st.permutations(range(6)))
def test_the_order_of_arrival_cannot_be_seen(order):
    generator = torch.Generator().manual_seed(0)
    items = [{"w": torch.randn(20, generator=generator)} for _ in range(6)]
    weights = [3.0, 1.0, 7.0, 2.0, 5.0, 11.0]
    shuffled = weighted_mean([items[i] for i in order], [weights[i] for i in order])
    assert torch.equal(shuffled["w"], weighted_mean(items, weights)["w"])


@given(st.lists(st.integers(0, 150), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0), st.data())
def test_a_running_mean_has_the_same_bits_however_its_rows_are_cut(sizes, data):
    """Blocks of 64 rows are summed; pieces of any size fill them."""
    generator = torch.Generator().manual_seed(sum(sizes))
    rows = torch.randn(sum(sizes), 3, generator=generator)
    weights = torch.tensor([data.draw(st.integers(1, 9)) for _ in range(sum(sizes))], dtype=torch.float64)

    def mean_of(pieces):
        mean = RunningMean()
        for some, heavy in zip(rows.split(pieces), weights.split(pieces), strict=True):
            mean.add(some, heavy)
        assert torch.equal(mean.finish(), mean.finish())
        return mean.finish()

    found = mean_of(sizes)
    assert torch.equal(found, mean_of([len(rows)]))
    assert torch.equal(found, mean_of([1] * len(rows)))
    exact = [
        float(sum(Fraction(x) * int(w) for x, w in zip(column, weights, strict=True)) / int(weights.sum()))
        for column in rows.T.tolist()
    ]
    assert found.tolist() == pytest.approx(exact, rel=1e-6, abs=1e-9)


def test_a_mean_of_nothing_is_an_error():
    with pytest.raises(ValueError):
        weighted_mean([], [])


def test_bytes_by_hand():
    tensors = {"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]], dtype=torch.float64)}
    assert count_bytes(tensors) == 4 + 8


def test_digest_sees_names_shapes_dtypes_and_values_but_not_order():
    base = {"a": torch.zeros(2), "b": torch.ones(3)}
    assert digest(base) == digest(dict(reversed(base.items())))
    others = [
        {"a": torch.zeros(2), "c": torch.ones(3)},
        {"a": torch.zeros(2, 1), "b": torch.ones(3)},
        {"a": torch.zeros(2, dtype=torch.int32), "b": torch.ones(3)},
        {"a": torch.tensor([0.0, 1e-9]), "b": torch.ones(3)},
    ]
    assert len({digest(base), *map(digest, others)}) == 5


def test_files_round_trip_and_damage_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"w": torch.arange(6.0).view(2, 3).T, "flag": torch.tensor(True)}
    sha256 = save(path, tensors, {"who": "me"})
    assert sha256 == file_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = load(path, sha256)
    assert torch.equal(loaded["w"], tensors["w"])
    assert bool(loaded["flag"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    load(path)  # safetensors itself sees nothing wrong
    with pytest.raises(FedVLError, match="damaged"):
        load(path, sha256)
    path.write_bytes(content[:-3])
    with pytest.raises(FedVLError, match="not a whole"):
        load(path)
    with pytest.raises(FedVLError, match="Cannot read"):
        load(tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("metadata", [None, {}, {"who": "me"}])
def test_a_file_of_no_tensors_can_be_read_again(tmp_path, metadata):
    path = tmp_path / "none.safetensors"
    assert load(path, save(path, {}, metadata)) == {}


def test_the_same_tensors_and_metadata_are_the_same_bytes(tmp_path):
    """Tried on version 0.1: of seven equal runs the models had two hashes."""
    tensors = {"b": torch.arange(3.0), "a": torch.ones(2, 2, dtype=torch.int64)}
    metadata = {"method": "linear ü", "fedvl": '{"seed": 0}', "a": "1", "b": "2", "c": "3"}
    orders = [dict(items) for items in itertools.permutations(metadata.items())][:60]
    contents = {to_bytes(tensors, order) for order in orders}
    assert len(contents) == 1
    content = contents.pop()
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == metadata
        assert {name: file.get_tensor(name).tolist() for name in tensors} == {
            name: tensor.tolist() for name, tensor in tensors.items()
        }
    assert int.from_bytes(content[:8], "little") % 8 == 0
    assert to_bytes({}, {"b": "1", "a": "2"}) == to_bytes({}, {"a": "2", "b": "1"})


@pytest.mark.parametrize("name", ["x", "/x", "-1/x", "1.5/x", "99999999999/x", "٣/x"])
def test_a_tensor_of_no_client_is_refused(name):
    with pytest.raises(FedVLError, match="not CLIENT/NAME"):
        unflatten({name: torch.ones(1)})
