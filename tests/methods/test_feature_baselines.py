"""zero-shot, linear, fedprox, centralised and fedclip: their equations by hand."""

import math

import torch
from helpers.small import small_method, small_samples

from fedvl.methods import method_names, method_summaries
from fedvl.methods.base import Batch
from fedvl.methods.fedntd import not_true_distance
from fedvl.methods.parts.adapters import gate_start, gated
from fedvl.methods.parts.losses import contrastive, cross_entropy


def batch_of(method, count=5, received=None):
    samples = small_samples(method, count)
    return Batch(samples.inputs, samples.labels, torch.ones(count), torch.arange(count), received or {}, {}, {})


def test_every_method_says_what_it_is():
    assert set(method_summaries()) == set(method_names())
    assert all(len(summary) > 20 for summary in method_summaries().values())


def test_zero_shot_picks_the_nearest_text():
    method = small_method("zero-shot")
    assert method.start(torch.Generator()) == {}
    scores = method.predict({}, {"features": method.task.text_features})
    assert scores.argmax(1).tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(scores.diagonal(), 10 * torch.ones(4))  # the logit scale


def test_linear_starts_as_the_zero_shot_model():
    method = small_method("linear")
    inputs = small_samples(method).inputs
    linear = method.predict(method.start(torch.Generator()), inputs)
    torch.testing.assert_close(linear, small_method("zero-shot").predict({}, inputs))


def test_linear_loss_is_the_cross_entropy_of_torch():
    method = small_method("linear", initial="zeros", scale=2.0)
    batch = batch_of(method)
    tensors = {"weight": torch.randn(4, 6), "bias": torch.randn(4)}
    loss, changed = method.objective(tensors, batch)
    scores = 2.0 * batch.inputs["features"] @ tensors["weight"].T + tensors["bias"]
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(scores, batch.labels))
    assert changed == {}
    assert not any(tensor.any() for tensor in method.start(torch.Generator()).values())


def test_padding_rows_do_not_count():
    scores = torch.tensor([[0.0, math.log(3)], [5.0, -5.0]])
    loss = cross_entropy(scores, torch.tensor([1, -1]), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(loss, torch.tensor(math.log(4 / 3)))


def test_fedprox_adds_the_proximal_term_and_its_gradient():
    plain, proximal = small_method("linear"), small_method("fedprox", mu=0.4)
    start = plain.start(torch.Generator())
    moved = {"weight": start["weight"] + 2.0, "bias": start["bias"] - 1.0}
    batch = batch_of(plain, received=start)
    extra = proximal.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    torch.testing.assert_close(extra, torch.tensor(0.4 / 2 * (24 * 4.0 + 4 * 1.0)), rtol=1e-4, atol=0)
    gradients = [torch.func.grad(lambda t, m=m: m.objective(t, batch)[0])(moved)["bias"] for m in (proximal, plain)]
    torch.testing.assert_close(gradients[0] - gradients[1], torch.full((4,), -0.4), rtol=1e-4, atol=1e-5)


def test_gate_by_hand():
    """Two features: hidden = tanh(z), gate = softmax([log 3, 0]) = [3/4, 1/4] through the second bias alone."""
    tensors = {
        "gate.0.weight": torch.eye(2),
        "gate.0.bias": torch.zeros(2),
        "gate.1.weight": torch.zeros(2, 2),
        "gate.1.bias": torch.tensor([math.log(3), 0.0]),
    }
    torch.testing.assert_close(gated(tensors, torch.tensor([[4.0, -8.0]])), torch.tensor([[3.0, -2.0]]))
    tensors["gate.1.weight"] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    a, b = 3 * math.exp(math.tanh(4)), math.exp(math.tanh(-8))
    expected = torch.tensor([[4 * a / (a + b), -8 * b / (a + b)]])
    torch.testing.assert_close(gated(tensors, torch.tensor([[4.0, -8.0]])), expected)


def test_gate_has_the_size_of_table_0_2():
    assert sum(t.numel() for t in gate_start(512, torch.Generator()).values()) == 525_312


def test_contrastive_loss_by_hand_and_without_padding():
    images, texts = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    expected = math.log(1 + math.exp(-5))  # scores are 5 on the diagonal and 0 elsewhere, both ways
    torch.testing.assert_close(contrastive(images, texts, 5.0, torch.ones(2)), torch.tensor(expected))
    padded = [torch.cat([part, torch.ones(1, 2)]) for part in (images, texts)]
    masked = contrastive(*padded, 5.0, torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(masked, torch.tensor(expected))
    torch.testing.assert_close(contrastive(images[:1], texts[:1], 5.0, torch.ones(1)), torch.tensor(0.0))


def test_fedclip_counts_clients_equally_and_scores_by_cosine():
    method = small_method("fedclip")
    assert method.counts_clients_equally
    tensors = method.start(torch.Generator().manual_seed(0))
    scores = method.predict(tensors, {"embeddings": torch.randn(7, 6)})
    assert scores.shape == (7, 4)
    assert scores.abs().max() <= 10.0 + 1e-4


def test_fedntd_distance_by_hand():
    """Three classes, label 0: over classes 1 and 2 the server says (3/4, 1/4) and the client (1/2, 1/2)."""
    server, local = torch.tensor([[9.0, math.log(3), 0.0]]), torch.tensor([[-4.0, 1.0, 1.0]])
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    torch.testing.assert_close(not_true_distance(local, server, torch.tensor([0]), 1.0), torch.tensor([expected]))
    softer = not_true_distance(local, server, torch.tensor([0]), 2.0)
    share = math.sqrt(3) / (math.sqrt(3) + 1)
    torch.testing.assert_close(
        softer, torch.tensor([share * math.log(2 * share) + (1 - share) * math.log(2 * (1 - share))])
    )


def test_fedntd_loss_adds_the_distance_to_what_the_server_sent():
    method, plain = small_method("fedntd", beta=0.7, temperature=2.0), small_method("linear")
    start = plain.start(torch.Generator())
    moved = {name: tensor + 0.3 * torch.randn(tensor.shape) for name, tensor in start.items()}
    batch = batch_of(plain, received=start)
    scores = [plain.predict(tensors, batch.inputs) for tensors in (moved, start)]
    distance = not_true_distance(*scores, batch.labels, 2.0).mean()
    extra = method.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    torch.testing.assert_close(extra, 0.7 * 4 * distance)
    assert method.objective(start, batch)[0] == plain.objective(start, batch)[0]
