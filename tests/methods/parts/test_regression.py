"""Ridge from moments against scikit-learn, samples, and densities of the model computed independently."""

import math

import numpy as np
import pytest
import torch
from helpers.small import labelled_rows, small_method, small_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge

from fedvl.methods.parts.moments import Moments, indicators, moments_of
from fedvl.methods.parts.regression import BELIEF, GRID, LIKELY, SPREAD, Regression


def problem(count=30, width=5, classes=3, seed=0, prior=True):
    rows, labels = labelled_rows(count, width, classes, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    initial = torch.randn(width, classes, generator=generator).double() * prior
    initial -= initial.mean(1, keepdim=True)
    moments = Moments.of(moments_of(rows, indicators(labels, classes)))
    return rows, indicators(labels, classes), initial, Regression.of(moments, initial)


@given(seed=st.integers(0, 50), regularisation=st.floats(1e-3, 1e3), count=st.integers(4, 40))
@settings(max_examples=25, deadline=None)
def test_without_a_prior_it_is_ridge_of_scikit_learn(seed, regularisation, count):
    rows, targets, _, regression = problem(count=count, seed=seed, prior=False)
    found = regression.solution(regularisation)
    oracle = Ridge(alpha=regularisation).fit(rows.numpy(), targets.numpy())
    np.testing.assert_allclose(found.weight.T.numpy(), oracle.coef_, atol=1e-10)
    np.testing.assert_allclose(found.bias.numpy(), oracle.intercept_, atol=1e-10)


@given(seed=st.integers(0, 50), regularisation=st.floats(1e-2, 1e2))
@settings(max_examples=25, deadline=None)
def test_with_a_prior_it_is_ridge_on_what_the_prior_leaves(seed, regularisation):
    rows, targets, initial, regression = problem(seed=seed)
    found = regression.solution(regularisation)
    left = targets - found.prior * rows @ initial
    oracle = Ridge(alpha=regularisation).fit(rows.numpy(), left.numpy())
    np.testing.assert_allclose(found.weight.numpy(), oracle.coef_.T + found.prior * initial.numpy(), atol=1e-10)


@given(seed=st.integers(0, 50), regularisation=st.floats(1e-2, 1e2), prior=st.booleans())
@settings(max_examples=25, deadline=None)
def test_gcv_of_the_sums_is_gcv_of_the_samples(seed, regularisation, prior):
    """With the matrix that makes fitted values of labels, of which GCV takes the trace, column by column."""
    rows, targets, initial, regression = problem(seed=seed, prior=prior)
    count = len(rows)
    found = regression.solution(regularisation)
    offset = found.prior * rows @ initial
    hat = torch.stack(
        [
            torch.from_numpy(Ridge(alpha=regularisation).fit(rows.numpy(), unit.numpy()).predict(rows.numpy()))
            for unit in torch.eye(count).double()
        ],
        1,
    )
    fitted = offset + hat @ (targets - offset)
    residual = sum(float((targets[i] - fitted[i]) @ (targets[i] - fitted[i])) for i in range(count))
    wanted = residual / count / (1 - float(hat.trace()) / count) ** 2
    a = torch.tensor([regularisation], dtype=torch.float64)
    assert float(regression.gcv(a)) == pytest.approx(wanted, rel=1e-9)
    assert float(regression.freedom(a)) == pytest.approx(float(hat.trace()), rel=1e-9)


@pytest.mark.parametrize("prior", [False, True])
def test_the_evidence_is_the_density_of_labels_under_the_model(prior):
    """y - s X w_0 is normal with covariance v (1 + X X^T / a) on the contrasts, s about 1; v is the likeliest."""
    rows, targets, initial, regression = problem(count=12, prior=prior)
    count = len(rows)
    contrasts = torch.linalg.qr(torch.eye(count).double() - 1 / count).Q[:, : count - 1].numpy()
    values = []
    for a in (0.1, 1.0, 7.0):
        s = float(regression.prior(torch.tensor([a], dtype=torch.float64)))
        left = contrasts.T @ (targets - s * rows @ initial).numpy()
        shape = contrasts.T @ (np.eye(count) + (rows @ rows.T).numpy() / a) @ contrasts
        basis = np.linalg.qr(np.eye(3) - 1 / 3)[0][:, :2]  # labels of a sample add up to 1: two of three are free
        left = left @ basis
        belief = BELIEF * (s - 1) ** 2
        variance = (np.trace(left.T @ np.linalg.solve(shape, left)) + belief) / (11 * 2)
        assert regression.solution(a).variance == pytest.approx(variance, rel=1e-9)
        log = sum(multivariate_normal(cov=variance * shape).logpdf(column) for column in left.T) - belief / variance / 2
        values.append(float(regression.evidence(torch.tensor([a], dtype=torch.float64))) + 2 * log)
    assert values == pytest.approx([values[0]] * 3, rel=1e-9)  # but for a constant


def test_the_weight_of_the_prior_is_the_likeliest():
    rows, targets, initial, regression = problem()
    a = torch.tensor([2.0]).double()
    best = float(regression.prior(a))
    centred = rows - rows.mean(0)

    def misfit(s):
        left = (targets - s * rows @ initial).numpy()
        left -= left.mean(0)
        fit = np.trace(left.T @ np.linalg.solve(np.eye(30) + (centred @ centred.T).numpy() / 2.0, left))
        return float(fit) + BELIEF * (s - 1) ** 2

    assert best > 0
    assert misfit(best) < min(misfit(best * 0.99), misfit(best * 1.01))
    opposite = -torch.linalg.lstsq(rows, targets).solution
    assert float(Regression.of(regression.moments, opposite).prior(a)) == 0  # what points the other way is dropped


def test_without_data_for_or_against_it_the_prior_has_its_full_weight():
    rows, targets, initial, _ = problem()
    same = Moments.of(moments_of(rows[:1].expand(8, 5), targets[:8]))  # eight times the same image say nothing
    assert float(Regression.of(same, initial).prior(torch.tensor([1.0]).double())) == pytest.approx(1.0)


def test_what_all_classes_have_in_common_is_no_prior():
    _, _, initial, regression = problem()
    moved = Regression.of(regression.moments, initial + torch.arange(5)[:, None])
    torch.testing.assert_close(moved.solution(1.0).weight, regression.solution(1.0).weight)


def test_shares_are_those_of_a_gaussian_of_six_tenths_of_the_precision():
    _, _, _, regression = problem()
    found = regression.solution(1.0)
    assert found.scale == pytest.approx(0.6 / found.variance)


@pytest.mark.parametrize("name", ["ridge", "gda", "fed-em"])
def test_one_image_has_a_finite_solution(name):
    method = small_method(name)
    shared = method.start(torch.Generator())
    found = method.solve(shared, method.statistics(shared, small_samples(method, 1)))
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())


@pytest.mark.parametrize("by", ["evidence", "gcv"])
def test_the_choice_has_the_least_cost_of_the_grid(by):
    _, _, _, regression = problem(count=60)
    costs = regression.evidence(GRID) if by == "evidence" else 60 * 2 * regression.gcv(GRID).log()
    belief = torch.tensor([(math.log(a / LIKELY) / SPREAD) ** 2 for a in GRID.tolist()])
    assert regression.best(by).regularisation == float(GRID[(costs + belief).argmin()])
    assert regression.best(0.7).regularisation == 0.7
