"""Small steps run on one thread, large ones on as many as are set, whatever the machine does meanwhile."""

import pytest
import torch
from helpers.small import run_quietly, small_federation, small_method

from fedvl.federation import threads
from fedvl.federation.threads import fitting_threads
from fedvl.tensors import on_threads


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
