"""Ridge in one exchange: its equations on tiny tensors, its options, and its promises on real images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.declarations import assert_declared
from helpers.real import accuracy
from helpers.runs import run
from helpers.small import RAGGED, run_quietly, small_federation, small_method, small_samples
from sklearn.linear_model import Ridge as ReferenceRidge

from fedvl.methods.parts.moments import Moments, indicators, moments_of, unit_rows
from fedvl.methods.parts.regression import Regression
from fedvl.runs.settings import resolve_experiment


def solved(method, samples):
    shared = method.start(torch.Generator())
    return method.solve(shared, method.statistics(shared, samples))


def test_it_starts_as_the_zero_shot_model_or_at_zero():
    method = small_method("ridge")
    inputs = small_samples(method).inputs
    scores = method.predict(method.start(torch.Generator()), inputs)
    torch.testing.assert_close(scores.float(), small_method("zero-shot").predict({}, inputs))
    zeros = small_method("ridge", prior="zeros")
    assert not bool(zeros.predict(zeros.start(torch.Generator()), inputs).any())


def test_the_solution_by_hand():
    """Two samples (1, 0) and (0, 1) of two classes: centred rows are +-(1, -1) / 2, and labels too.

    G = [[1, -1], [-1, 1]] / 2 = H has the eigenvalue 1 for (1, -1), so that W = G / (1 + a).
    """
    method = small_method("ridge", prior="zeros", regularisation=0.25)
    features = torch.eye(6)[:2]
    samples = type(small_samples(method))({"features": features}, torch.tensor([0, 1]))
    found = solved(method, samples)
    weight = torch.zeros(6, 4).double()
    weight[:2, :2] = torch.tensor([[0.4, -0.4], [-0.4, 0.4]])
    torch.testing.assert_close(found["weight"], weight)
    torch.testing.assert_close(found["bias"], torch.tensor([0.5, 0.5, 0.0, 0.0]).double())
    scores = method.predict(found, samples.inputs) / found["scale"]
    torch.testing.assert_close(scores[0], torch.tensor([0.9, 0.1, 0.0, 0.0]).double())


def test_random_features_are_unit_vectors_of_a_gaussian_kernel():
    method = small_method("ridge", dimensions=4000, bandwidth=0.5)
    features = small_samples(method).inputs["features"].double()
    lifted = method.lift(features)
    torch.testing.assert_close(lifted.norm(dim=1), torch.ones(len(features)).double())
    kernel = torch.exp(-(torch.cdist(features, features) ** 2) / (2 * 0.5**2))
    assert float((lifted @ lifted.T - (features @ features.T + kernel) / 2).abs().max()) < 0.06
    torch.testing.assert_close(lifted, small_method("ridge", dimensions=4000, bandwidth=0.5).lift(features))


def test_whatever_rounds_are_asked_for_there_is_one_exchange_with_every_client():
    asked = {"method": {"name": "ridge"}, "federation": {"rounds": 50, "per_round": 2}}
    federation = resolve_experiment(asked).federation
    assert (federation.rounds, federation.per_round) == (1, None)
    assert "one exchange" in small_method("ridge").notes()[0]


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.1", "disjoint"])
def test_on_real_images_every_partition_gives_the_same_accuracy(partition):
    found, zero_shot = accuracy("ridge", {"data": {"partition": partition}})
    assert found == accuracy("ridge", {"data": {"partition": "iid", "clients": 500}})[0]
    assert found >= 76.5
    assert zero_shot < 54


def personal_method(**options):
    method = small_method("ridge", **options)
    method.task = replace(method.task, protocol="personal")
    return method


def test_a_clients_own_solution_is_ridge_of_scikit_learn_on_what_the_shared_one_leaves():
    method = personal_method(regularisation=0.5)
    federation = run_quietly(small_federation(method, rounds=1))
    shared, data = federation.shared, federation.engine.data
    assert set(federation.engine.private) == {client for client, size in enumerate(RAGGED) if size}
    for client, tensors in federation.engine.private.items():
        samples = data.take(federation.engine.rows[client])
        rows, labels = unit_rows(samples.inputs["features"]), indicators(samples.labels, 4)
        fit = Regression.of(Moments.of(moments_of(rows, labels)), shared["weight"]).solution(0.5)
        prior = fit.prior * (shared["weight"] - shared["weight"].mean(1, keepdim=True)).numpy()
        reference = ReferenceRidge(alpha=0.5, tol=1e-12).fit(rows.numpy(), labels.numpy() - rows.numpy() @ prior)
        weight, bias = prior + reference.coef_.T, reference.intercept_
        own = tensors["own"] / fit.scale
        np.testing.assert_allclose(own[:-1].numpy(), weight, atol=1e-9)
        np.testing.assert_allclose(own[-1].numpy(), bias, atol=1e-9)
        scores = method.predict({**shared, **tensors}, samples.inputs)
        np.testing.assert_allclose(scores.numpy(), fit.scale * (rows.numpy() @ weight + bias), atol=1e-9)


def test_a_personal_run_sends_what_any_run_sends():
    personal, plain = (
        run_quietly(small_federation(each, rounds=1)) for each in (personal_method(), small_method("ridge"))
    )
    assert personal.method.role.statistics_shapes == plain.method.role.statistics_shapes
    assert all(torch.equal(personal.server[name], tensor) for name, tensor in plain.server.items())
    assert all(torch.equal(personal.shared[name], tensor) for name, tensor in plain.shared.items())
    assert personal.records[0].bytes_up == plain.records[0].bytes_up
    assert not plain.engine.private


def test_where_clients_differ_their_own_solutions_are_better():
    settings = {"method": {"name": "ridge"}, "data": {"partition": "dirichlet:0.1"}}
    finished = run({**settings, "evaluation": {"protocol": "personal"}})
    shared = replace(finished.judge, private_of=lambda client: {}).judge(finished.federation.shared, {})
    assert finished.accuracy > shared.figures["accuracy"] + 10


def test_it_declares_what_the_table_says():
    assert_declared("ridge")
