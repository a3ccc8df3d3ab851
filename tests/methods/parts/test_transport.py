"""Transport plans: by hand, by their sums, against POT, and what they are for batching and gradients."""

import math

import pytest
import torch

from fedvl.methods.parts.transport import balanced_plan, partial_plan


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_balanced_plan_by_hand():
    """Two by two and symmetric: the diagonal is 1 / exp(-1 / epsilon) times as heavy as what is beside it."""
    cost, half = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0.5, 0.5])
    beside = math.exp(-1 / 0.5)
    expected = 0.5 / (1 + beside) * torch.tensor([[1.0, beside], [beside, 1.0]])
    torch.testing.assert_close(balanced_plan(cost, half, half, 0.5, 10), expected)


def test_a_partial_plan_by_hand():
    one_row = torch.tensor([0.8])
    free = partial_plan(torch.tensor([[0.0, 1.0]]), one_row, torch.tensor([9.0, 9.0]), 0.5, 10)
    torch.testing.assert_close(free, 0.8 * torch.softmax(torch.tensor([[0.0, -2.0]]), -1))  # no bound is reached
    bound = partial_plan(torch.zeros(1, 3), one_row, torch.tensor([0.1, 0.9, 0.9]), 0.5, 100)
    torch.testing.assert_close(
        bound, torch.tensor([[0.1, 0.35, 0.35]])
    )  # what the first may not carry, the others share


def test_sums_of_the_plans():
    cost, columns = draw(5, 2, 7), torch.full((7,), 1 / 7, dtype=torch.float64)
    rows = torch.tensor([0.7, 0.3], dtype=torch.float64)
    balanced = balanced_plan(cost, rows, columns, 0.1, 500)
    torch.testing.assert_close(balanced.sum(-1), rows.expand(5, 2))
    torch.testing.assert_close(balanced.sum(-2), columns.expand(5, 7))
    partial = partial_plan(cost, 0.8 * rows, columns, 0.1, 500)
    torch.testing.assert_close(partial.sum(-1), (0.8 * rows).expand(5, 2))
    assert (partial.sum(-2) <= columns + 1e-9).all()
    assert (partial.sum(-2) < 0.9 * columns).any()  # dear columns are left partly at home
    assert (partial.sum(-2) > columns - 1e-9).any()  # cheap ones are not


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.05])
def test_plans_equal_those_of_pot(epsilon):
    ot = pytest.importorskip("ot")
    rows, columns = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.full((9,), 1 / 9, dtype=torch.float64)
    for seed in range(3):
        cost = draw(2, 9, seed=seed)
        settings = {"reg": epsilon, "stopThr": 1e-12}
        theirs = ot.sinkhorn(rows, columns, cost, method="sinkhorn_log", numItermax=5000, **settings)
        torch.testing.assert_close(balanced_plan(cost, rows, columns, epsilon, 2000), theirs, rtol=1e-6, atol=1e-9)
        # POT bounds both sides and fixes the total; with a total equal to the bounds of the rows these are met exactly.
        theirs = ot.partial.entropic_partial_wasserstein(0.8 * rows, columns, cost, m=0.8, numItermax=5000, **settings)
        ours = partial_plan(cost, 0.8 * rows, columns, epsilon, 2000)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_a_hundred_iterations_suffice_for_cosines_at_epsilon_a_tenth():
    """The largest error of the plan falls to a fifth or less every five iterations, down to the rounding of 32 bits."""
    cost = 1 - (0.2 + 0.07 * torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(0)))
    rows, columns = torch.full((2,), 0.4), torch.full((64,), 1 / 64)
    exact = partial_plan(cost.double(), rows.double(), columns.double(), 0.1, 2000)
    errors = [
        float((partial_plan(cost, rows, columns, 0.1, count) - exact).abs().max() * 64) for count in (5, 10, 15, 100)
    ]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    assert errors[3] < 1e-5


def test_a_tiny_epsilon_gives_no_nan():
    cost = draw(3, 2, 8).float()  # exp(-cost / epsilon) is 0 in 32 bits for most of it
    plan = partial_plan(cost, torch.full((2,), 0.4), torch.full((8,), 1 / 8), 1e-3, 200)
    assert plan.isfinite().all()
    torch.testing.assert_close(plan.sum(-1), torch.full((3, 2), 0.4))


@pytest.mark.parametrize("solve", [balanced_plan, partial_plan])
def test_the_gradient_does_not_run_through_the_plan_and_clients_batch(solve):
    similarity = draw(4, 3, 2, 6).float()
    rows, columns = torch.full((2,), 0.5), torch.full((6,), 1 / 6)

    def value(similarity):
        plan = solve(1 - similarity, rows, columns, 0.1, 50)
        return (plan * similarity).sum(), plan

    gradient, plan = torch.func.grad(value, has_aux=True)(similarity)
    torch.testing.assert_close(gradient, plan)
    batched, _ = torch.func.vmap(torch.func.grad(value, has_aux=True))(similarity)
    torch.testing.assert_close(batched, gradient)
