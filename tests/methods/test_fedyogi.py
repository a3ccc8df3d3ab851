"""fedyogi: the second moment by hand (algorithm 2)."""

import math

import pytest
from helpers.declarations import assert_declared
from helpers.small import small_method, stepped


def test_two_steps_of_the_server_by_hand():
    """v grows by a quarter of the squared move, 4, then falls by a quarter of 0.25, since it is above 0.25."""
    options = {"server_rate": 0.5, "server_betas": (0.8, 0.75), "tau": 0.1}
    found, state = stepped(small_method("fedyogi", **options), [2.0, 0.5])
    v = [0.01 + 0.25 * 4]
    v.append(v[0] - 0.25 * 0.25)
    first = 0.5 * 0.4 / (math.sqrt(v[0]) + 0.1)
    assert found == pytest.approx([first, first + 0.5 * 0.42 / (math.sqrt(v[1]) + 0.1)], rel=1e-5)
    assert float(state["v.bias"][0]) == pytest.approx(v[1])


def test_it_declares_what_the_table_says():
    assert_declared("fedyogi")
