"""Losses by hand, and without what is padding."""

import math

import pytest
import torch

from fedvl.methods.base import Batch
from fedvl.methods.parts.losses import candidate_loss, contrastive, cross_entropy, label_loss


def test_padding_rows_do_not_count():
    scores = torch.tensor([[0.0, math.log(3)], [5.0, -5.0]])
    loss = cross_entropy(scores, torch.tensor([1, -1]), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(loss, torch.tensor(math.log(4 / 3)))


def test_contrastive_loss_by_hand_and_without_padding():
    images, texts = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    expected = math.log(1 + math.exp(-5))  # scores are 5 on the diagonal and 0 elsewhere, both ways
    torch.testing.assert_close(contrastive(images, texts, 5.0, torch.ones(2)), torch.tensor(expected))
    more_images, more_texts = (torch.cat([part, torch.ones(1, 2)]) for part in (images, texts))
    masked = contrastive(more_images, more_texts, 5.0, torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(masked, torch.tensor(expected))
    torch.testing.assert_close(contrastive(images[:1], texts[:1], 5.0, torch.ones(1)), torch.tensor(0.0))


def test_contrastive_loss_is_the_mean_of_two_directions_that_differ():
    images, texts = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    # scores are 2 2 / 0 0: each image has two equal texts; each text has the images 2 and 0, and its own is one of them
    to_text = math.log(2)
    to_image = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    assert to_text != pytest.approx(to_image, abs=0.1)
    loss = contrastive(images, texts, 2.0, torch.ones(2))
    assert loss.item() == pytest.approx((to_text + to_image) / 2, abs=1e-6)
    assert contrastive(texts, images, 2.0, torch.ones(2)).item() == pytest.approx(loss.item(), abs=1e-6)


def test_the_loss_of_candidates_is_that_of_their_summed_probability():
    scores = torch.log(torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8], [1.0, 1.0, 1.0]])).requires_grad_()
    candidates, mask = torch.tensor([[1.0, 1, 0], [0, 0, 1], [0, 0, 0]]), torch.tensor([1.0, 1, 0])
    loss = candidate_loss(scores, candidates, mask)
    assert loss.item() == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, scores)
    assert torch.isfinite(gradient).all()
    assert not gradient[2].any()


def test_one_candidate_is_a_label():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(6, 4, generator=generator), torch.tensor([0, 3, 2, 1, 1, 0])
    batch = Batch({}, labels, torch.ones(6), torch.arange(6), {})
    hot = torch.nn.functional.one_hot(labels, 4).float()
    expected = cross_entropy(scores, labels, batch.mask)
    torch.testing.assert_close(label_loss(scores, batch), expected)
    torch.testing.assert_close(label_loss(scores, batch._replace(inputs={"candidates": hot})), expected)


def test_classes_that_a_client_does_not_know_of_do_not_compete():
    scores = torch.log(torch.tensor([[0.2, 0.3, 0.4, 0.1], [0.2, 0.3, 0.4, 0.1], [0.2, 0.3, 0.4, 0.1]]))
    known = torch.tensor([[True, True, False, False], [True, True, True, True], [True, True, False, False]])
    batch = Batch({"class_list": known}, torch.tensor([1, 1, 3]), torch.ones(3), torch.arange(3), {})
    # Among 0 and 1 the share is 0.3 / 0.5; a label that is not on the list (a wrong one) competes too: 0.1 / 0.6.
    expected = -(math.log(0.6) + math.log(0.3) + math.log(0.1 / 0.6)) / 3
    assert label_loss(scores, batch).item() == pytest.approx(expected, abs=1e-6)
    grown = scores + torch.tensor([[0.0, 0.0, 50.0, 0.0], [0.0] * 4, [0.0] * 4])
    assert label_loss(grown, batch).item() == pytest.approx(expected, abs=1e-6)
