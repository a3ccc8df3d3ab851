"""fedadam: two steps of the server by hand (algorithm 2)."""

import math

import pytest
from helpers.declarations import assert_declared
from helpers.small import small_method, stepped

OPTIONS = {"server_rate": 0.5, "server_betas": (0.8, 0.75), "tau": 0.1}


def test_two_steps_of_the_server_by_hand():
    """m is 0.4 and 0.72; v begins at tau^2 = 0.01."""
    found, state = stepped(small_method("fedadam", **OPTIONS), [2.0, 2.0])
    v = [0.75 * 0.01 + 0.25 * 4]
    v.append(0.75 * v[0] + 0.25 * 4)
    first = 0.5 * 0.4 / (math.sqrt(v[0]) + 0.1)
    assert found == pytest.approx([first, first + 0.5 * 0.72 / (math.sqrt(v[1]) + 0.1)], rel=1e-5)
    assert float(state["m.bias"][0]) == pytest.approx(0.72)
    assert float(state["v.bias"][0]) == pytest.approx(v[1])


def test_what_has_not_moved_stays():
    _, state = stepped(small_method("fedadam", **OPTIONS), [2.0])
    assert (state["weight"] == small_method("fedadam").start(None)["weight"]).all()


def test_it_declares_what_the_table_says():
    assert_declared("fedadam")
