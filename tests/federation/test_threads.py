"""Small steps run on one thread, large ones on as many as are set, whatever the machine does meanwhile."""

import threading

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method

from fedvl.federation import threads
from fedvl.federation.threads import fitting_threads, side_by_side
from fedvl.methods import method_names
from fedvl.tensors import digest, on_threads


@pytest.mark.parametrize(
    ("through_encoder", "elements", "rows", "expected"),
    [
        (False, 5_130, 500, 1),  # a linear head of 10 classes x 512 and 50 rows of 10 clients: 15 million operations
        (False, 51_300, 12_800, 4),  # 100 classes, 128 rows of 100 clients
        (False, 100_000, 33, 1),  # 19.8 million
        (False, 100_000, 34, 4),  # 20.4 million
        (True, 8_192, 32, 4),  # a context, trained through a text tower
    ],
)
def test_the_number_follows_from_sizes(through_encoder, elements, rows, expected):
    assert fitting_threads(through_encoder, elements, rows, most=4) == expected


@pytest.mark.parametrize(
    ("name", "small_step", "expected"), [("linear", 10**9, 1), ("linear", 0, 2), ("promptfl", 10**9, 2)]
)
def test_a_chunk_is_trained_on_them(monkeypatch, name, small_step, expected):
    monkeypatch.setattr(threads, "SMALL_STEP", small_step)
    federation, seen = small_federation(small_method(name), rounds=1), []
    steps = federation.engine._gradient_steps

    def noted(*arguments):
        seen.append(torch.get_num_threads())
        return steps[True](*arguments)

    federation.engine._gradient_steps = {True: noted}
    with on_threads(2):
        run_quietly(federation)
        assert torch.get_num_threads() == 2
    assert set(seen) == {expected}


def test_several_small_chunks_are_trained_by_other_threads_with_one_of_torch_each(monkeypatch):
    monkeypatch.setattr(threads, "SMALL_STEP", 0)  # by size alone each would have all threads
    federation, seen = small_federation(small_method("linear"), rounds=1, chunk=1), set()
    steps = federation.engine._gradient_steps

    def noted(*arguments):
        seen.add((torch.get_num_threads(), threading.current_thread() is threading.main_thread()))
        return steps[True](*arguments)

    federation.engine._gradient_steps = {True: noted}
    with on_threads(2):
        run_quietly(federation)
    assert seen == {(1, False)}


def test_work_side_by_side_comes_back_in_turn_each_on_one_thread_of_torch():
    both = threading.Barrier(2, timeout=30)  # nobody goes on alone: at least two work at a time

    def work(item):
        both.wait()
        return item, torch.get_num_threads()

    with on_threads(2):
        assert list(side_by_side(work, range(8), 2)) == [(item, 1) for item in range(8)]
        assert torch.get_num_threads() == 2


def test_what_fails_on_a_thread_is_raised_where_its_result_is_asked_for():
    found = side_by_side(lambda item: 1 // item, [1, 0, 1], 2)
    assert next(found) == 1
    with pytest.raises(ZeroDivisionError):
        next(found)


# methods whose steps are small: a classifier or an adapter on features
LIGHT = [
    "adapterfl",
    "cachefl",
    "centralised",
    "faa-clip",
    "facmic",
    "fed-mp",
    "fedadam",
    "fedavgm",
    "fedclip",
    "feddyn",
    "fedntd",
    "fedprox",
    "fedyogi",
    "fst-cbdg",
    "linear",
    "scaffold",
]


def test_light_methods_are_those_that_train_on_features_alone():
    methods = {name: small_method(name) for name in method_names()}
    trained = {name: method for name, method in methods.items() if not method.role.statistics}
    light = [name for name, method in trained.items() if small_federation(method).engine._light]
    assert sorted({*light} - {"zero-shot"}) == LIGHT


@pytest.mark.parametrize("name", LIGHT)
def test_threads_do_not_change_the_bits_of_several_small_chunks(name):
    def trained(threads):
        with on_threads(threads):
            federation = run_quietly(small_federation(small_method(name), chunk=2, rounds=2))
        private = {f"{client}/{key}": t for client, own in federation.engine.private.items() for key, t in own.items()}
        return digest(federation.shared | private), [record.loss for record in federation.records]

    assert trained(1) == trained(3)
