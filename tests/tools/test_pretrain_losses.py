"""Losses, positive weights and sampling of the pretraining tool against values worked out by hand."""

import math

import pytest
import torch
from helpers.lazy import lazily

losses = lazily("tools.pretrain.losses")
training_set = lazily("tools.pretrain.training_set")


def test_multi_positive_contrast_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    prior = torch.tensor([0.0, 0.5, -0.5, 0.0])
    # Concepts 0 and 1 are positive and concept 2 may be true: only concept 3 is a negative.
    excluded = torch.tensor([[True, True, True, False]])
    weights = torch.tensor([[0.7, 0.3, 0.0, 0.0]])
    negative = math.exp(-1.0)
    expected = -0.7 * math.log(math.exp(2.0) / (math.exp(2.0) + negative))
    expected -= 0.3 * math.log(math.exp(1.5) / (math.exp(1.5) + negative))
    found = losses.multi_positive_contrast(logits, prior, excluded, weights)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_logit_adjustment_asks_more_of_rare_concepts() -> None:
    logits, excluded = torch.zeros(1, 2), torch.tensor([[True, False]])
    weights = torch.tensor([[1.0, 0.0]])
    rare, common = torch.tensor([0.1, 0.9]).log(), torch.tensor([0.9, 0.1]).log()
    # The softmax of the log priors themselves: the losses are -log of the priors.
    for prior, expected in ((rare, -math.log(0.1)), (common, -math.log(0.9))):
        found = losses.multi_positive_contrast(logits, prior, excluded, weights)
        assert found.item() == pytest.approx(expected, rel=1e-5)


def test_image_without_negatives_or_positives_costs_nothing() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    excluded = torch.ones(2, 3, dtype=torch.bool)
    found = losses.multi_positive_contrast(logits, torch.zeros(3), excluded, torch.ones(2, 3))
    found = found + losses.text_to_image_contrast(logits, ~excluded, excluded)
    found.backward()
    assert found.item() == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(2, 3))


def test_text_to_image_contrast_by_hand() -> None:
    logits = torch.tensor([[1.0, 5.0], [0.0, 5.0], [-1.0, 5.0]])
    positive = torch.tensor([[True, False], [True, False], [False, False]])
    excluded = torch.tensor([[True, True], [True, True], [False, True]])
    negative = math.exp(-1.0)
    each = [-math.log(math.exp(value) / (math.exp(value) + negative)) for value in (1.0, 0.0)]
    found = losses.text_to_image_contrast(logits, positive, excluded)  # the second text has no image: left out
    assert found.item() == pytest.approx(sum(each) / 2, rel=1e-6)


def test_pair_contrast_and_divergence_by_hand() -> None:
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(2.0)]])
    rows = -(math.log(3 / 4) + math.log(2 / 3)) / 2
    columns = -(math.log(3 / 4) + math.log(2 / 3)) / 2
    assert losses.pair_contrast(logits).item() == pytest.approx((rows + columns) / 2, rel=1e-6)
    target, own = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    expected = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert losses.divergence(target + 7, own - 2).item() == pytest.approx(expected, rel=1e-5)


def test_ancestor_cross_entropy_and_cosine_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    expected = math.log(2) - (0.5 * math.log(0.75) + 0.5 * math.log(0.25))
    found = losses.ancestor_cross_entropy(logits, torch.tensor([[1.0, 0.5]]))
    assert found.item() == pytest.approx(expected, rel=1e-6)
    found = losses.cosine_distance(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 3.0], [4.0, 4.0]]))
    assert found.item() == pytest.approx(0.5, abs=1e-6)


def test_relational_divergence_by_hand() -> None:
    angles = torch.tensor([0.0, 60.0, 90.0]).deg2rad()
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    targets = torch.eye(3)  # each other text is equally far: one half each
    found = losses.relational_divergence(embeddings, targets, torch.tensor(2.0))
    expected = 0.0
    for near, far in ((0.5, 0.0), (0.5, math.cos(math.pi / 6)), (0.0, math.cos(math.pi / 6))):
        total = math.exp(2 * near) + math.exp(2 * far)
        expected += sum(0.5 * math.log(0.5 / (math.exp(2 * value) / total)) for value in (near, far)) / 3
    assert found.item() == pytest.approx(expected, rel=1e-5)
    # Nothing is lost where the similarities are those of the target at the same temperature.
    same = losses.relational_divergence(embeddings, embeddings, torch.tensor(10.0))
    assert same.item() == pytest.approx(0, abs=1e-6)


def test_positive_weights_are_shared_out() -> None:
    found = losses.share_out(torch.tensor([[0.6, 0.2], [0.01, 0.0], [0.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.25], [0.2, 0.0], [0.0, 0.0]]))


def test_label_targets_by_hand() -> None:
    # Concepts 0 and 1 are ImageNet classes, both a kind of concept 2; concept 3 is another set's own, also of kind 2.
    ancestor = torch.tensor([[1.0, 0, 1, 0], [0, 1.0, 1, 0]])
    true = torch.tensor([[True, False, True, False], [False, False, True, True]])
    targets = training_set.label_targets(true, torch.tensor([0, 3]), ancestor)
    expected = torch.tensor([[0.75, 0.0, 0.25, 0.0], [0.0, 0.0, 0.25, 0.75], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(targets.weight, expected)
    # An image of class 0 has class 1 as a negative; one of the other set may be either class.
    assert targets.not_negative.tolist() == [[True, False, True, False], [True, True, True, True], [False] * 4]
    assert targets.true[:2].equal(true)


def test_sampling_gives_each_source_its_share() -> None:
    names = ["wn:a", "wn:b", "wn:c", "cal:x", "none"]
    key = torch.tensor([0] * 16 + [1] * 9 + [2] * 2 + [3] * 4 + [4])
    weight = training_set.sampling_weights(key, key, names)
    share = {name: weight[key == number].sum().item() for number, name in enumerate(names)}
    # Within Tiny-ImageNet 16 and 9 images at count^-1/2 each: 4 to 3. Two images: of the one-per-class source.
    assert share["wn:a"] == pytest.approx(0.78 * 4 / 7)
    assert share["wn:b"] == pytest.approx(0.78 * 3 / 7)
    assert [share[name] for name in names[2:]] == pytest.approx([0.025, 0.07, 0.01])


def test_log_prior_by_hand() -> None:
    label, sampling = torch.tensor([0, 0, 1]), torch.tensor([1.0, 1.0, 2.0])
    weight = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    logarithms = [math.log(0.25), math.log(0.75), math.log(1e-4)]
    expected = [value - sum(logarithms) / 3 for value in logarithms]
    assert training_set.log_prior(label, sampling, weight).tolist() == pytest.approx(expected, rel=1e-5)
