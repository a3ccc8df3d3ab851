"""linear: its start and its loss."""

import torch
from helpers.published import assert_published
from helpers.small import batch_of, small_method, small_samples


def test_linear_starts_as_the_zero_shot_model():
    method = small_method("linear")
    inputs = small_samples(method).inputs
    linear = method.predict(method.start(torch.Generator()), inputs)
    torch.testing.assert_close(linear, small_method("zero-shot").predict({}, inputs))


def test_linear_loss_is_the_cross_entropy_of_torch():
    method = small_method("linear", initial="zeros", scale=2.0)
    batch = batch_of(small_samples(method, 5))
    tensors = {"weight": torch.randn(4, 6), "bias": torch.randn(4)}
    loss, changed = method.objective(tensors, batch)
    scores = 2.0 * batch.inputs["features"] @ tensors["weight"].T + tensors["bias"]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, batch.labels))
    assert changed == {}
    assert not any(tensor.any() for tensor in method.start(torch.Generator()).values())


def test_it_declares_what_was_published():
    assert_published("linear")
