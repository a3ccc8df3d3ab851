"""Discrepancies, also class by class, reversed gradients and loss of domains by hand and against plain loops."""

import math

import pytest
import torch

from fedvl.methods.parts.alignment import class_discrepancy, domain_loss, kernel_discrepancy, reverse_gradient


def test_discrepancy_of_two_points_by_hand():
    """Rows 0 and 3: the mean squared distance of different rows is 9, and each b is 9 times 1/4 ... 4."""
    left, right = torch.tensor([[0.0]]), torch.tensor([[3.0]])
    expected = sum(2 - 2 * math.exp(-1 / factor) for factor in (0.25, 0.5, 1, 2, 4))
    assert float(kernel_discrepancy(left, right, torch.ones(1))) == pytest.approx(expected, rel=1e-6)
    same = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    assert float(kernel_discrepancy(same, same, torch.ones(6))) == pytest.approx(0, abs=1e-6)


def test_discrepancy_equals_a_double_loop_and_ignores_padding():
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(4, 3, generator=generator), torch.randn(6, 3, generator=generator) + 1
    rows = [row.tolist() for row in (*left, *right)]

    def squared(a, b):
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    total = sum(squared(a, b) for a in rows for b in rows) / (10 * 9)

    def kernel(a, b):
        return sum(math.exp(-squared(a, b) / (total / 4 * 2**power)) for power in range(5))

    def mean(some, others):
        return sum(kernel(a, b) for a in some for b in others) / (len(some) * len(others))

    expected = mean(rows[:4], rows[:4]) + mean(rows[4:], rows[4:]) - 2 * mean(rows[:4], rows[4:])
    assert float(kernel_discrepancy(left, right, torch.ones(4))) == pytest.approx(expected, rel=1e-5)
    padded, mask = torch.cat([left, torch.full((2, 3), 50.0)]), torch.tensor([1.0, 1, 1, 1, 0, 0])
    assert float(kernel_discrepancy(padded, right, mask)) == pytest.approx(expected, rel=1e-5)
    gradient = torch.func.grad(kernel_discrepancy)(padded, right, mask)
    assert not gradient[4:].any()
    step = kernel_discrepancy(padded - 0.1 * gradient, right, mask)
    assert float(step) < expected  # downhill is towards the target


def test_identical_rows_have_no_discrepancy_and_a_finite_gradient():
    rows = torch.ones(3, 2)
    assert float(kernel_discrepancy(rows, rows, torch.ones(3))) == pytest.approx(0, abs=1e-6)
    assert torch.func.grad(kernel_discrepancy)(rows, rows, torch.ones(3)).isfinite().all()


def test_gradient_reversal_keeps_the_value_and_turns_the_gradient():
    x = torch.tensor([2.0, -3.0])

    def loss(x):
        return (reverse_gradient(x, torch.tensor(0.5)) ** 2).sum()

    gradient, value = torch.func.grad_and_value(loss)(x)
    assert value == 13.0
    assert gradient.tolist() == [-2.0, 3.0]  # -0.5 times 2x


def test_domain_loss_by_hand():
    scores = torch.tensor([0.0, math.log(3), 99.0]), torch.tensor([math.log(3)])
    # left: mean of log 2 and log 4 (the third row is padding); right: log(1 + 1/3)
    expected = ((math.log(2) + math.log(4)) / 2 + math.log(4 / 3)) / 2
    assert float(domain_loss(*scores, torch.tensor([1.0, 1.0, 0.0]))) == pytest.approx(expected, rel=1e-6)


def test_discrepancy_by_class_of_a_set_with_itself_or_of_equal_features_is_nothing():
    generator = torch.Generator().manual_seed(1)
    rows, classes = torch.randn(6, 3, generator=generator), torch.eye(3).repeat(2, 1)
    assert float(class_discrepancy(rows, rows, classes, classes, torch.ones(6))) == pytest.approx(0, abs=1e-6)
    same = torch.ones(6, 3)
    guessed = torch.rand(4, 3, generator=generator)
    assert float(class_discrepancy(same, same[:4], classes, guessed, torch.ones(6))) == pytest.approx(0, abs=1e-6)


def test_discrepancy_by_class_is_the_mean_of_discrepancies_within_classes():
    """With one-hot classes on both sides, and kernels as wide as in all rows together."""
    generator = torch.Generator().manual_seed(2)
    left, right = torch.randn(6, 2, generator=generator), torch.randn(4, 2, generator=generator) + 1
    labels, guessed = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([0, 1, 1, 2])
    classes = torch.eye(4)  # the fourth has no row
    found = class_discrepancy(left, right, classes[labels], classes[guessed], torch.ones(6))
    rows = torch.cat([left, right])
    distances = torch.cdist(rows, rows).square()
    mean = distances.sum() / (10 * 9)
    kernel = torch.stack([torch.exp(-distances / (mean * 2.0**power)) for power in range(-2, 3)]).sum(0)
    expected = []
    for c in range(3):
        of_left, of_right = torch.nonzero(labels == c)[:, 0], 6 + torch.nonzero(guessed == c)[:, 0]
        means = [
            kernel[one][:, two].mean() for one, two in ((of_left, of_left), (of_right, of_right), (of_left, of_right))
        ]
        expected.append(means[0] + means[1] - 2 * means[2])
    torch.testing.assert_close(found, sum(expected) / 3)
    counted = torch.tensor([1.0, 0.0, 1.0, 1.0])
    some = class_discrepancy(left, right, classes[labels], classes[guessed], torch.ones(6), counted)
    torch.testing.assert_close(some, (expected[0] + expected[2]) / 2)
    padded = torch.cat([left, torch.full((2, 2), 30.0)])
    more = torch.cat([classes[labels], classes[[3, 3]]])
    mask = torch.tensor([1.0] * 6 + [0, 0])
    torch.testing.assert_close(class_discrepancy(padded, right, more, classes[guessed], mask), found)
