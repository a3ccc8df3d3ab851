"""FST-CBDG: its equations by hand, and what its paper says must hold on real images."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.real import accuracy
from helpers.small import run_quietly, small_federation, small_method, small_samples, small_task

from fedvl.methods.base import Batch, Samples
from fedvl.methods.fst_cbdg import FSTCBDG, FSTOptions


def two_class_method(**options):
    """Texts along the axes of the plane, so that scores can be read off."""
    task = replace(small_task(2, 2), text_embeddings=torch.eye(2))
    return FSTCBDG(FSTOptions(**options), task)


def batch_of(features, positions, whole, noise=None):
    return Batch(
        {"features": features},
        torch.full((len(features),), -1),
        torch.ones(len(features)),
        positions,
        {},
        noise or {},
        {"features": whole},
    )


def test_the_head_starts_at_the_texts_and_labels_at_the_zero_shot_prediction():
    method = two_class_method()
    start = method.start(torch.Generator())
    assert torch.equal(start["weight"], torch.eye(2))
    assert torch.equal(start["bias"], torch.zeros(2))
    features = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    private = method.first_private(Samples({"features": features}, torch.tensor([-1, -1])), torch.Generator())
    expected = torch.tensor(
        [[math.e / (math.e + 1), 1 / (math.e + 1)], [1 / (1 + math.exp(0.2)), 1 / (1 + math.exp(-0.2))]]
    )
    torch.testing.assert_close(private["soft_labels"], expected)  # eq. 2


def test_pseudo_labels_follow_the_head_by_equation_4():
    whole = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])  # the last row is padding
    old = torch.tensor([[0.5, 0.5], [0.2, 0.8], [0.0, 0.0]])
    tensors = {"weight": torch.eye(2), "bias": torch.zeros(2), "soft_labels": old, "sigma": torch.tensor(0.02)}
    batch = batch_of(whole[:1], torch.tensor([0]), whole)
    sharp = math.e / (math.e + 1)
    first = [0.9 * 0.5 + 0.1 * sharp, 0.9 * 0.5 + 0.1 * (1 - sharp)]
    second = [0.9 * 0.2 + 0.1 * (1 - sharp), 0.9 * 0.8 + 0.1 * sharp]
    every = two_class_method().renewed(tensors, batch)
    torch.testing.assert_close(every, torch.tensor([first, second, [0.0, 0.0]]))
    only_batch = two_class_method(update="batch").renewed(tensors, batch)
    torch.testing.assert_close(only_batch, torch.tensor([first, [0.2, 0.8], [0.0, 0.0]]))


def test_self_training_loss_is_equation_3():
    whole = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    tensors = {
        "weight": torch.eye(2),
        "bias": torch.zeros(2),
        "soft_labels": torch.full((2, 2), 0.5),
        "sigma": torch.tensor(0.02),
    }
    method = two_class_method(sampling="none", beta=1.0)
    noise = {"normal": torch.zeros(1, 2), "place": torch.tensor(0.5)}
    loss, _ = method.objective(tensors, batch_of(whole, torch.tensor([0, 1]), whole, noise))
    high, low = math.log(math.e / (math.e + 1)), math.log(1 / (math.e + 1))
    torch.testing.assert_close(loss, torch.tensor(-(0.5 * high + 0.5 * low)))
    padded = batch_of(whole, torch.tensor([0, 1]), whole, noise)._replace(mask=torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(method.objective(tensors, padded)[0], loss)  # a mean over real rows


def test_self_training_is_a_mean_over_real_rows_with_the_labels_that_the_step_renewed():
    """Unlike rows; half of a label is old (eq. 4) before the loss reads it."""
    whole, old = torch.tensor([[1.0, 0.0], [0.6, 0.8]]), torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    tensors = {"weight": torch.eye(2), "bias": torch.zeros(2), "soft_labels": old, "sigma": torch.tensor(0.02)}
    method = two_class_method(sampling="none", beta=0.5)
    batch = batch_of(whole, torch.tensor([0, 1]), whole, {"normal": torch.zeros(1, 2)})
    each = []
    for (a, b), (x, y) in zip(whole.tolist(), old.tolist(), strict=True):
        first = 1 / (1 + math.exp(b - a))
        each.append(-(0.5 * x + 0.5 * first) * math.log(first) - (0.5 * y + 0.5 * (1 - first)) * math.log(1 - first))
    assert abs(each[0] - each[1]) > 0.03
    for mask, expected in (([1.0, 1.0], sum(each) / 2), ([1.0, 0.0], each[0]), ([0.0, 1.0], each[1])):
        loss, _ = method.objective(tensors, batch._replace(mask=torch.tensor(mask)))
        torch.testing.assert_close(loss, torch.tensor(expected))


def test_pseudo_labels_are_constants_of_the_loss():
    """With beta 0 the labels are the head's own predictions, at which the cross-entropy has no slope."""
    method = two_class_method(beta=0.0, sampling="none")
    features, weight = torch.tensor([[0.8, 0.6]]), torch.tensor([[1.0, 0.2], [0.1, 0.9]])
    tensors = {"bias": torch.zeros(2), "soft_labels": torch.tensor([[0.5, 0.5]]), "sigma": torch.tensor(0.1)}
    noise = {"normal": torch.zeros(1, 2), "place": torch.tensor(0.5)}
    batch = batch_of(features, torch.tensor([0]), features, noise)
    slope = torch.func.grad(lambda head: method.objective({**tensors, "weight": head}, batch)[0])(weight)
    torch.testing.assert_close(slope, torch.zeros(2, 2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("gamma, expected", [(0.0, [0, 2, 1, 3]), (1.0, [3, 5, 4, 6])])
def test_rare_classes_get_more_synthetic_features_by_equation_7(gamma, expected):
    method = small_method("fst-cbdg", gamma=gamma)
    likeliest = torch.tensor([0, 0, 0, 1, 2, 2])  # m = 3, 1, 2, 0
    soft = torch.cat([torch.eye(4)[likeliest] * 0.6 + 0.1, torch.zeros(2, 4)])  # two rows of padding
    assert method.synthetic_counts(soft).tolist() == expected
    assert small_method("fst-cbdg", sampling="equal").synthetic_counts(soft).tolist() == [1, 1, 1, 1]


def test_sampling_loss_is_the_mean_of_equation_6_over_classes_spread_as_n():
    """n = (0, 2): both drawn features belong to class 1; without spread they are its text."""
    method = two_class_method(synthetic=2)
    tensors = {"weight": torch.tensor([[1.0, 0.0], [0.0, 3.0]]), "bias": torch.zeros(2), "sigma": torch.tensor(0.0)}
    noise = {"normal": torch.randn(2, 2), "place": torch.tensor(0.3)}
    soft = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    torch.testing.assert_close(method.sampling_loss(tensors, soft, noise), torch.tensor(math.log(1 + math.exp(-3.0))))
    tensors["sigma"] = torch.tensor(0.5)
    scores = (torch.tensor([0.0, 1.0]) + 0.5 * noise["normal"]) @ tensors["weight"].T
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([1, 1]))
    torch.testing.assert_close(method.sampling_loss(tensors, soft, noise), expected)


def test_the_sum_of_equation_6_counts_every_synthetic_feature():
    """n = (0, 3): the sum over three features is three times their mean, however many stand for them."""
    tensors = {"weight": torch.tensor([[1.0, 0.0], [0.0, 3.0]]), "bias": torch.zeros(2), "sigma": torch.tensor(0.0)}
    soft = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    for drawn in (1, 2, 7):
        noise = {"normal": torch.zeros(drawn, 2), "place": torch.tensor(0.3)}
        method = two_class_method(synthetic=drawn, reduction="sum")
        expected = torch.tensor(3 * math.log(1 + math.exp(-3.0)))
        torch.testing.assert_close(method.sampling_loss(tensors, soft, noise), expected)


def test_the_sum_of_equation_6_is_over_the_features_of_all_classes():
    """n = (0, 2, 1, 3) of four classes: six features, each of likelihood 1/4 under a head of zeros."""
    method = small_method("fst-cbdg", synthetic=5, reduction="sum")
    soft = torch.eye(4)[torch.tensor([0, 0, 0, 1, 2, 2])] * 0.6 + 0.1  # m = 3, 1, 2, 0
    tensors = {"weight": torch.zeros(4, 6), "bias": torch.zeros(4), "sigma": torch.tensor(0.1)}
    noise = {"normal": torch.randn(5, 6), "place": torch.tensor(0.3)}
    torch.testing.assert_close(method.sampling_loss(tensors, soft, noise), torch.tensor(6 * math.log(4)))


def test_the_loss_is_self_training_and_lambda_times_sampling_by_equation_8():
    whole, noise = torch.tensor([[1.0, 0.0], [0.6, 0.8]]), {"normal": torch.randn(3, 2), "place": torch.tensor(0.4)}
    tensors = {"weight": torch.eye(2), "bias": torch.zeros(2), "sigma": torch.tensor(0.5)}
    tensors["soft_labels"] = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    batch = batch_of(whole, torch.tensor([0, 1]), whole, noise)
    alone, _ = two_class_method(sampling="none").objective(tensors, batch)
    method = two_class_method(trade_off=2.5, synthetic=3)
    sampled = method.sampling_loss(tensors, method.renewed(tensors, batch), noise)
    assert sampled > 0.1
    torch.testing.assert_close(method.objective(tensors, batch)[0], alone + 2.5 * sampled)


@pytest.mark.parametrize("place", [0.0, 0.37, 0.999])
def test_the_classes_of_synthetic_features_are_spread_as_n(place):
    method = small_method("fst-cbdg", synthetic=40)
    seen = []

    def predict(tensors, inputs):
        seen.append(inputs["features"])
        return torch.zeros(40, 4)

    method.predict = predict
    soft = torch.eye(4)[torch.tensor([0, 0, 0, 0, 1, 1, 2])]  # m = 4, 2, 1, 0, so n = 0, 2, 3, 4
    noise = {"normal": torch.zeros(40, 6), "place": torch.tensor(place)}
    method.sampling_loss({"sigma": torch.tensor(0.0)}, soft, noise)
    drawn = [(seen[0] == text).all(1).sum().item() for text in method.task.text_features]
    assert drawn[0] == 0
    assert all(abs(count - 40 * n / 9) <= 1 for count, n in zip(drawn[1:], (2, 3, 4), strict=True))


def test_a_client_that_sees_all_classes_alike_needs_no_synthetic_features():
    method = two_class_method(synthetic=3)
    tensors = {"weight": torch.eye(2), "bias": torch.zeros(2), "sigma": torch.tensor(0.02)}
    noise = {"normal": torch.randn(3, 2), "place": torch.tensor(0.1)}
    assert method.sampling_loss(tensors, torch.eye(2), noise) == 0.0


def test_sigma_can_be_estimated_from_the_client():
    features = torch.tensor([[1.0, 0.2], [1.0, -0.2]])
    private = two_class_method(estimate_sigma=True).first_private(
        Samples({"features": features}, torch.tensor([-1, -1])), torch.Generator()
    )
    torch.testing.assert_close(private["sigma"], torch.tensor(math.sqrt(0.04 / 2)))


def test_labels_are_never_looked_at_and_clients_count_equally():
    method = small_method("fst-cbdg")
    with_labels, without = small_federation(method), small_federation(method)
    blind = small_samples(method)
    without.engine.data = Samples(blind.inputs, torch.full_like(blind.labels, -1))
    for name, tensor in run_quietly(with_labels).shared.items():
        assert torch.equal(tensor, run_quietly(without).shared[name])
    assert method.weighting == "clients"


def test_pseudo_labels_stay_with_the_client_and_are_probabilities():
    federation = run_quietly(small_federation(small_method("fst-cbdg")))
    for private in federation.engine.private.values():
        torch.testing.assert_close(private["soft_labels"].sum(-1), torch.ones(len(private["soft_labels"])))
    assert set(federation.shared) == {"weight", "bias"}


@pytest.mark.parametrize("partition", ["iid", "shards:2", "dirichlet:0.1"])
def test_it_beats_zero_shot_without_labels_and_sampling_by_need_is_what_does_it(partition):
    """Tables 1 to 4 in small: 20 clients, 5 a round, mean of two seeds."""

    def gain(**options):
        settings = {"data": {"clients": 20, "partition": partition}, "federation": {"per_round": 5}}
        runs = [accuracy("fst-cbdg", {**settings, "seed": seed}, **options) for seed in (0, 1)]
        return sum(found - zero_shot for found, zero_shot in runs) / 2

    whole = gain()
    assert whole > 0.5
    assert whole > gain(sampling="equal") + 0.3
    assert whole > gain(sampling="none") + 0.3


def test_counts_that_lag_behind_the_head_make_it_overshoot_where_clients_are_alike():
    """Why Algorithm 1 is read literally (see the method's docstring): as in the paper, a client takes part about once."""
    settings = {
        "data": {"clients": 100, "partition": "iid"},
        "federation": {"per_round": 10},
        "training": {"batch_size": 2},  # ten steps in a client's round, as the paper's clients of 500 images take
    }
    renewed, zero_shot = accuracy("fst-cbdg", settings)
    lagging, _ = accuracy("fst-cbdg", settings, update="batch")
    assert renewed > zero_shot + 1
    assert renewed > lagging + 2


def test_it_declares_what_the_table_says():
    assert_declared("fst-cbdg")
