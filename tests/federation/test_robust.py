"""Rules against hostile updates, by hand-computed values, independent formulas and properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import trim_mean

from fedvl.federation.robust import (
    RULES,
    by_root,
    centred_clipping,
    geometric_median,
    mean,
    median,
    merged_move,
    multi_krum,
    trimmed,
)

ONES = torch.ones(5)


def drawn(seed, clients=7, numbers=4):
    return torch.randn(clients, numbers, generator=torch.Generator().manual_seed(seed))


def test_rules_by_hand():
    moves = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 1.0], [100.0, -50.0]])
    assert median(moves, ONES).tolist() == [3.0, 0.0]
    assert median(moves[:4], ONES[:4]).tolist() == [2.5, 0.0]
    assert trimmed(moves, ONES).tolist() == [3.0, 0.0]  # of five, one at each end
    assert multi_krum(moves, ONES).tolist() == [2.5, 0.25]  # all but the one that is far from its neighbours


@pytest.mark.parametrize("seed", range(3))
def test_the_trimmed_mean_is_scipys(seed):
    moves = drawn(seed, 10)
    expected = torch.from_numpy(trim_mean(moves.numpy(), 0.2, axis=0))
    torch.testing.assert_close(trimmed(moves, torch.ones(10)), expected)


@pytest.mark.parametrize("seed", range(3))
def test_the_geometric_median_minimises_the_sum_of_distances(seed):
    moves, weights = drawn(seed), torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 5.0])

    def distances(point):
        return float((weights * (moves - torch.tensor(point).float()).norm(dim=1)).sum())

    best = minimize(distances, moves.mean(0).numpy(), method="Nelder-Mead", options={"maxiter": 4000, "fatol": 1e-9})
    assert distances(geometric_median(moves, weights).numpy()) <= best.fun * 1.002


def test_fltrust_by_hand():
    root = torch.tensor([2.0, 0.0])
    moves = torch.tensor([[4.0, 0.0], [0.0, 3.0], [-5.0, 0.0], [3.0, 4.0]])
    # cosines 1, 0, -1 and 0.6; all lengths become 2, the root's: (1 * (2, 0) + 0.6 * (1.2, 1.6)) / 1.6
    assert by_root(moves, root).tolist() == pytest.approx([(2 + 0.6 * 1.2) / 1.6, 0.6 * 1.6 / 1.6])
    assert by_root(100 * moves, root).tolist() == pytest.approx(by_root(moves, root).tolist())
    assert by_root(-moves[:1], root).tolist() == [2.0, 0.0]  # nobody agrees: the server's own move


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000))
def test_equal_moves_stay_what_they_are_and_order_does_not_matter(rule, seed):
    moves, weights = drawn(seed), torch.rand(7, generator=torch.Generator().manual_seed(seed)) + 0.5
    same = moves[:1].expand(7, -1)
    torch.testing.assert_close(RULES[rule](same, weights), moves[0], atol=1e-4, rtol=1e-4)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed + 1))
    torch.testing.assert_close(
        RULES[rule](moves[order], weights[order]), RULES[rule](moves, weights), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "mean"])
def test_one_huge_move_in_ten_is_withstood_where_the_mean_is_not(rule):
    moves, weights = 1 + 0.1 * drawn(0, 10), torch.ones(10)
    hostile = moves.clone()
    hostile[3] = -1e4
    assert (RULES[rule](hostile, weights) - 1).norm() < 0.8
    assert (RULES["mean"](hostile, weights) - 1).norm() > 1000


def test_clients_with_nothing_to_learn_do_not_stop_centred_clipping():
    moves = torch.zeros(10, 2)
    moves[:4] = torch.tensor([3.0, 4.0])
    # nobody is clipped at first: 0.4 of the move. Then six are 0.4 away and four 0.6, clipped at 0.4: less 0.08;
    # then six are 0.32 away and four 0.68, clipped at 0.32: less 0.064
    assert centred_clipping(moves, torch.ones(10)).tolist() == pytest.approx([0.256 * 3, 0.256 * 4])
    assert centred_clipping(torch.zeros(3, 2), torch.ones(3)).tolist() == [0, 0]
    assert centred_clipping(moves[:1], torch.ones(1)).tolist() == [3, 4]


def test_no_client_weighs_more_than_the_median_one_under_a_rule():
    moves, weights = torch.tensor([[1.0], [2.0], [3.0], [4.0], [-100.0]]), torch.tensor([1.0, 2.0, 3.0, 4.0, 1e6])
    seen = []

    def rule(moves, weights):
        seen.append(weights.tolist())
        return moves[0]

    merged_move(rule, moves, weights)
    merged_move(rule, moves[:1], weights[4:])
    merged_move(rule, torch.ones(10, 1), torch.arange(10.0) + 1)
    assert seen == [[1, 2, 3, 3, 3], [1e6], [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]]
    assert float(merged_move(mean, moves, weights)) < -99
    assert float(merged_move(geometric_median, moves, weights)) > 1


@pytest.mark.parametrize("rule", ["geometric-median", "centred-clipping"])
def test_almost_a_third_of_the_clients_cannot_move_a_rule_far_though_they_go_far_and_declare_much(rule):
    moves, weights = 1 + 0.1 * drawn(0, 20), torch.ones(20)
    moves[:6], weights[:6] = -1e4, 1e6
    assert (merged_move(RULES[rule], moves, weights) - 1).norm() < 2


def test_krum_counts_the_nearest_neighbours_but_the_liars_and_two_by_hand():
    """Of ten moves two may lie: six neighbours judge a move, and 26 and 29 are left out; five or seven leave out others."""
    moves = [29.0, 9, 26, 4, 3, 1, 18, 24, 21, 0]

    def kept(neighbours):
        sums = {one: sum(sorted((one - other) ** 2 for other in moves)[1 : neighbours + 1]) for one in moves}
        return set(sorted(moves, key=sums.__getitem__)[:8])

    assert kept(6) == set(moves) - {26, 29}
    assert all(kept(other) != kept(6) for other in (3, 4, 5, 7, 8, 9))
    assert multi_krum(torch.tensor(moves)[:, None], torch.ones(10)).item() == 80 / 8


@pytest.mark.parametrize("clients", [1, 2, 3, 4])
def test_krum_of_fewer_than_five_moves_leaves_out_none(clients):
    moves = drawn(0, clients)
    torch.testing.assert_close(multi_krum(moves, torch.ones(clients)), moves.mean(0))
