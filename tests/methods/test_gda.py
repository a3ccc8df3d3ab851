"""GDA in one exchange: against scikit-learn and formulas on samples, by hand, and on real images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.declarations import assert_declared
from helpers.real import accuracy
from helpers.small import labelled_rows, small_method, small_samples
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from fedvl.methods.base import SumNoise
from fedvl.methods.parts.moments import Moments, indicators, moments_of


def solved(method, samples):
    return method.solve(method.start(torch.Generator()), method.statistics({}, samples))


def ratio(one, two):
    """How much longer one tensor is than the other, which it is a multiple of."""
    factor = (one * two).sum() / (two * two).sum()
    torch.testing.assert_close(one, factor * two, rtol=1e-9, atol=1e-9)
    return float(factor)


def test_it_starts_as_the_zero_shot_model_or_at_zero():
    method = small_method("gda")
    inputs = small_samples(method).inputs
    scores = method.predict(method.start(torch.Generator()), inputs)
    torch.testing.assert_close(scores.float(), small_method("zero-shot").predict({}, inputs))
    without = small_method("gda", alpha=0)
    assert not bool(without.predict(without.start(torch.Generator()), inputs).any())


def test_without_texts_it_is_a_multiple_of_discriminant_analysis_of_scikit_learn():
    """Whose shrinkage a is towards tr(S) / d, with S = within / n: a tr / d / (1 - a) = r tr n / (n - C) / n."""
    rows, labels = labelled_rows(60, 6, 4, 0)[0], torch.arange(60) % 4  # of equal size, with which it weighs classes
    method = small_method("gda", alpha=0, shrinkage=0.5)
    sums = moments_of(rows, indicators(labels, 4))
    found = method.solve({}, sums)
    part = 0.5 * 6 / (60 - 4)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=part / (1 + part))
    oracle.fit(rows.numpy(), labels.numpy())
    # scikit-learn's are discriminants as well: x^T S^-1 mu - mu^T S^-1 mu / 2 + log(1/4)
    weight, bias = torch.from_numpy(oracle.coef_.T), torch.from_numpy(oracle.intercept_) - np.log(0.25)
    assert ratio(found["weight"], weight) == pytest.approx(ratio(found["bias"], bias), rel=1e-9)
    assert ratio(found["weight"], weight) > 0


def test_the_precision_is_the_one_of_the_paper_on_samples():
    rows, labels = labelled_rows(60, 6, 4, 1)
    means = torch.stack([rows[labels == c].mean(0) for c in range(4)])
    within = torch.zeros(6, 6).double()
    for x, y in zip(rows, labels, strict=True):
        within = within + torch.outer(x - means[y], x - means[y])
    covariance = within / (60 - 4)
    precision = 6 * torch.linalg.inv((60 - 4) * covariance + covariance.trace() * torch.eye(6).double())
    weight, bias = small_method("gda").gaussian(Moments.of(moments_of(rows, indicators(labels, 4))))
    factor = ratio(weight, precision @ means.T)
    torch.testing.assert_close(bias, -factor * (means @ precision * means).sum(1) / 2)


def test_two_samples_by_hand():
    """(1, 0) and (0, 1): no spread within classes; about the mean of all it is 1, so that P = 2 / 1."""
    method = small_method("gda", alpha=0)
    rows = torch.eye(6)[:2]
    weight, bias = method.gaussian(Moments.of(moments_of(rows, indicators(torch.tensor([0, 1]), 4))))
    wanted = torch.zeros(6, 4).double()
    wanted[:2] = torch.tensor([[1.0, 0.0, 0.5, 0.5], [0.0, 1.0, 0.5, 0.5]])  # classes without samples: the mean
    factor = ratio(weight, wanted)
    torch.testing.assert_close(bias, -factor * torch.tensor([0.5, 0.5, 0.25, 0.25]).double())


def test_scores_have_the_scale_of_those_of_ridge_with_the_same_penalty():
    rows, labels = labelled_rows(60, 6, 4, 2)
    method = small_method("gda", alpha=0)
    sums = moments_of(rows, indicators(labels, 4))
    penalty = float(method.penalty(Moments.of(sums)))
    ridge = small_method("ridge", prior="zeros", regularisation=penalty)
    line = ridge.solve({}, sums)
    inputs = {"features": rows}
    shares = line["scale"] * (rows @ line["weight"] + line["bias"])
    scores = method.predict(method.solve({}, sums), inputs)
    centred, other = (s - s.mean(1, keepdim=True) for s in (scores, shares))
    centred, other = centred - centred.mean(0), other - other.mean(0)
    assert float(((1 + 1e-4) * centred - other).norm()) > float((centred - other).norm())  # the nearest multiple
    assert float(((1 - 1e-4) * centred - other).norm()) > float((centred - other).norm())


def test_texts_weigh_d_over_d_plus_n():
    method, plain = small_method("gda"), small_method("gda", alpha=0)
    samples = small_samples(method)
    given = small_method("gda", alpha=6 / (6 + len(samples)))
    torch.testing.assert_close(solved(method, samples), solved(given, samples))
    moved = solved(method, samples)["weight"] - solved(plain, samples)["weight"]
    texts = method.task.text_features.double().T
    texts = texts - texts.mean(1, keepdim=True)
    factor = (moved * texts).sum() / (texts * texts).sum()
    torch.testing.assert_close(moved, factor * texts, atol=1e-6, rtol=1e-6)  # but for what the penalty leaves
    assert factor > 0


@pytest.mark.parametrize("partition", ["dirichlet:0.1", "disjoint"])
def test_on_real_images_every_partition_gives_the_same_accuracy(partition):
    found, _ = accuracy("gda", {"data": {"partition": partition}})
    assert found == accuracy("gda", {"data": {"partition": "iid"}})[0]
    assert found >= 77


def test_a_few_shots_with_texts_are_better_than_either():
    settings = {"data": {"shots": 4}}
    both, zero_shot = accuracy("gda", settings)
    assert both > max(zero_shot, accuracy("gda", settings, alpha=0)[0]) + 5


def private(epsilon, **data):
    return {
        "data": {"partition": "dirichlet:0.1", **data},
        "federation": {"secure_sum": True, "least_clients": 10},
        "privacy": {"unit": "record", "epsilon": epsilon},
    }


def test_with_noise_it_knows_the_sizes_of_unequal_classes():
    tail = private(3.0, long_tail=20, minimum=0)
    found, zero_shot = accuracy("gda", tail)
    assert found > zero_shot + 6
    assert found > accuracy("ridge", tail)[0] + 6
    assert accuracy("gda", private(8.0))[0] > 74
    assert accuracy("gda", private(0.3))[0] > 60


def test_its_note_says_what_is_released_with_noise():
    method = small_method("gda")
    method.task = replace(method.task, noise=SumNoise(1.0, 10**9))
    assert "Released with noise: G and H, and the class sizes" in method.notes()[0]


def test_it_declares_what_the_table_says():
    assert_declared("gda")
