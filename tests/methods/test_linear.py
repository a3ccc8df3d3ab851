"""linear: its start and its loss."""

import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, small_method, small_samples

from fedvl.methods.base import Batch
from fedvl.methods.linear import softmax_gradients


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


def test_the_closed_form_is_the_gradient_of_the_objective_for_each_client():
    """Two clients, of which the second has one row of padding."""
    method, generator = small_method("linear", scale=2.0), torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(2, *shape, generator=generator) for name, shape in (("weight", (4, 6)), ("bias", (4,)))
    }
    features = torch.randn(2, 3, 6, generator=generator)
    labels, mask = torch.tensor([[0, 1, 3], [2, 2, -1]]), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    batch = Batch({"features": features}, labels, mask, torch.zeros(2, 3, dtype=torch.long), {}, {})
    gradients, losses, changed = softmax_gradients(method, tensors, batch)
    assert changed == {}
    for client in range(2):
        own = {name: tensor[client].clone().requires_grad_() for name, tensor in tensors.items()}
        one = Batch({"features": features[client]}, labels[client], mask[client], torch.arange(3), {}, {})
        loss, _ = method.objective(own, one)
        loss.backward()
        torch.testing.assert_close(losses[client], loss.detach())
        for name in own:
            torch.testing.assert_close(gradients[name][client], own[name].grad)


def test_it_declares_what_the_table_says():
    assert_declared("linear")
