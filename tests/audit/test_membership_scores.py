"""Weights and deviations of scores by hand, and the regression against its own equations."""

import pytest
import torch

from fedvl.audit.membership_scores import (
    PENALTY,
    centres_of,
    deviations,
    logistic,
    matched_weights,
    told_by_score,
    with_tails,
)


def test_images_outside_weigh_as_much_in_each_class_as_those_inside():
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    inside = torch.tensor([True, True, False, False, True, False, False])
    weights = matched_weights(labels, inside)
    assert weights.tolist() == [1, 1, 1, 1, 1, 1, 0]  # 2 of class 0 over 2 outside; class 2 has none inside
    inside[1] = False
    assert matched_weights(labels, inside).tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3, 1, 1, 0])


def test_a_score_is_a_deviation_from_images_outside_of_the_same_class():
    """Class 0 has mean 2 and deviation 1 outside, class 1 mean 10 and deviation 2: the class alone gives nothing away."""
    scores = torch.tensor([1.0, 2.0, 3.0, 8.0, 10.0, 12.0, 4.0, 10.0])
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1])
    free = torch.tensor([True] * 6 + [False] * 2)
    assert deviations(scores, labels, free).tolist() == pytest.approx([-1, 0, 1, -1, 0, 1, 2, 0])


def test_a_class_with_few_images_outside_is_compared_with_all():
    scores, labels = torch.tensor([1.0, 3.0, 1.0, 3.0, 2.0]), torch.tensor([0, 0, 1, 1, 1])
    free = torch.tensor([True, True, True, True, False])
    assert deviations(scores, labels, free).tolist() == pytest.approx([-1, 1, -1, 1, 0])


def test_the_regression_is_a_stationary_point_of_its_penalised_likelihood():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(300, 2, generator=generator).double()
    inside = (table[:, 0] + torch.randn(300, generator=generator) > 0).double()
    weights = torch.rand(300, generator=generator).double() + 0.5
    found = logistic(table, inside, weights).requires_grad_()
    intercept = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(50):  # the intercept that is best for these coefficients
        likelihood = torch.sigmoid(table @ found.detach() + intercept.detach())
        slope = (weights * (likelihood - inside)).sum() + 1e-6 * intercept.detach()
        intercept.data -= slope / ((weights * likelihood * (1 - likelihood)).sum() + 1e-6)
    scores = table @ found + intercept
    loss = (weights * torch.nn.functional.binary_cross_entropy_with_logits(scores, inside, reduction="none")).sum()
    [slope] = torch.autograd.grad(loss + PENALTY / 2 * found.square().sum(), [found])
    assert slope.abs().max() < 1e-6
    assert found[0] > 5 * found[1].abs()


def test_a_score_that_separates_members_is_told_and_noise_is_not():
    inside = torch.arange(400) < 100
    noise = torch.randn(400, generator=torch.Generator().manual_seed(0))
    weights = torch.where(inside, 1.0, 1 / 3)
    assert told_by_score(noise, inside, weights) < 3
    assert told_by_score(noise + 2.0 * inside, inside, weights) > 10
    assert told_by_score(noise, inside, torch.zeros(400)) == 0.0


def test_a_score_beyond_the_tail_counts_twice():
    assert with_tails(torch.tensor([[1.0, 5.0]])).tolist() == [[1.0, 5.0, 0.0, 2.0]]


def test_a_centre_is_of_items_that_all_have_in_one_shape():
    messages = [
        {"a": torch.tensor([1.0]), "b": torch.ones(1), "c": torch.ones(1)},
        {"a": torch.tensor([3.0]), "b": torch.ones(2)},
    ]
    found = centres_of(messages)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [2.0]}
