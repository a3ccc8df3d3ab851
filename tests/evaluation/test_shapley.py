"""Shapley values against hand-computed games, the axioms, and all orders in turn."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvl.evaluation.shapley import shapley_values


def gloves(coalition):
    """Client 0 has a left glove, clients 1 and 2 a right one each; a pair is worth 1."""
    return float(0 in coalition and bool({1, 2} & coalition))


def table_game(seed, players):
    values = np.random.default_rng(seed).random(2 ** len(players))
    return lambda coalition: float(values[sum(2 ** players.index(player) for player in coalition)])


def over_all_orders(game, players):
    total = dict.fromkeys(players, 0.0)
    orders = list(permutations(players))
    for order in orders:
        for place, player in enumerate(order):
            total[player] += game(frozenset(order[: place + 1])) - game(frozenset(order[:place]))
    return [total[player] / len(orders) for player in players]


def test_the_glove_game_has_its_known_solution():
    found = shapley_values(gloves, (0, 1, 2))
    assert found.shapley == pytest.approx((2 / 3, 1 / 6, 1 / 6))
    assert found.leave_one_out == [1.0, 0.0, 0.0]
    assert (found.total, found.empty, found.orders, found.valued) == (1.0, 0.0, 0, 8)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 5))
def test_exact_values_are_the_mean_over_all_orders_and_efficient(seed, count):
    players = tuple(range(3, 3 + count))
    game = table_game(seed, players)
    found = shapley_values(game, players)
    assert found.shapley == pytest.approx(over_all_orders(game, players), abs=1e-12)
    assert sum(found.shapley) == pytest.approx(found.total - found.empty, abs=1e-12)
    assert found.leave_one_out[0] == pytest.approx(game(frozenset(players)) - game(frozenset(players[1:])))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_sampled_values_are_efficient_and_their_intervals_hold_the_exact_ones(seed):
    players = tuple(range(5))
    game = table_game(seed, players)
    found = shapley_values(game, players, orders=200, seed=seed)
    assert sum(found.shapley) == pytest.approx(found.total - found.empty, abs=1e-9)
    for value, (low, high), estimate in zip(
        shapley_values(game, players).shapley, found.intervals, found.shapley, strict=True
    ):
        assert low < estimate < high
        assert low - (high - low) < value < high + (high - low)


def test_intervals_cover_the_exact_value_in_about_95_of_100_draws():
    players = tuple(range(4))
    game = table_game(7, players)
    exact = shapley_values(game, players).shapley
    covered = [
        low <= value <= high
        for seed in range(150)
        for value, (low, high) in zip(exact, shapley_values(game, players, 40, seed).intervals, strict=True)
    ]
    assert 0.92 < np.mean(covered) < 0.98


def test_a_coalition_is_valued_once():
    asked = []

    def game(coalition):
        asked.append(coalition)
        return float(len(coalition))

    found = shapley_values(game, (0, 1, 2, 3))
    assert len(asked) == len(set(asked)) == found.valued == 16
    assert found.shapley == pytest.approx((1.0,) * 4)
