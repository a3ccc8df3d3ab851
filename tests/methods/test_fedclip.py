"""fedclip: a gate on the features of images."""

import math

import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, encoder_of, small_method, small_samples
from torch.nn.functional import cross_entropy, normalize

from fedvl.methods.base import Batch, Task
from fedvl.methods.fedclip import FedCLIP


def test_fedclip_counts_clients_equally_and_scores_by_cosine():
    method = small_method("fedclip")
    assert method.weighting == "clients"
    tensors = method.start(torch.Generator().manual_seed(0))
    scores = method.predict(tensors, {"embeddings": torch.randn(7, 6)})
    assert scores.shape == (7, 4)
    assert scores.abs().max() <= 10.0 + 1e-4


def test_fedclip_loss_is_the_mean_of_both_directions_over_real_rows():
    """An even gate; scores 2 cos are ((2, 1.2), (0, 1.6)): rows and columns differ. The third row is padding."""
    texts = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    method = FedCLIP(FedCLIP.options_type(), Task(("a", "b"), texts, encoder_of(logit_scale=2.0), 2))
    gate = {name: torch.zeros_like(tensor) for name, tensor in method.start(torch.Generator()).items()}
    images, labels = torch.tensor([[3.0, 0.0], [0.0, 4.0], [5.0, 5.0]]), torch.tensor([0, 1, -1])
    batch = Batch({"embeddings": images}, labels, torch.tensor([1.0, 1.0, 0.0]), torch.arange(3), {}, {})
    to_text = (math.log(1 + math.exp(-0.8)) + math.log(1 + math.exp(-1.6))) / 2
    to_image = (math.log(1 + math.exp(-2.0)) + math.log(1 + math.exp(-0.4))) / 2
    torch.testing.assert_close(method.objective(gate, batch)[0], torch.tensor((to_text + to_image) / 2))


def test_fedclip_trains_the_gate_that_predicts():
    """Independent code: the gate z softmax(W1 tanh(W0 z + b0) + b1) before the cosines of images and their texts."""
    method = small_method("fedclip")
    samples = small_samples(method, 4)
    tensors = {name: 3 * tensor for name, tensor in method.start(torch.Generator().manual_seed(0)).items()}
    z = samples.inputs["embeddings"]
    hidden = torch.tanh(torch.nn.functional.linear(z, tensors["gate.0.weight"], tensors["gate.0.bias"]))
    gate = torch.nn.functional.linear(hidden, tensors["gate.1.weight"], tensors["gate.1.bias"]).softmax(-1)
    scores = 10 * normalize(gate * z, dim=-1) @ method.task.text_features[samples.labels].T
    expected = (cross_entropy(scores, torch.arange(4)) + cross_entropy(scores.T, torch.arange(4))) / 2
    torch.testing.assert_close(method.objective(tensors, batch_of(samples))[0], expected)
    predicted = method.predict(tensors, samples.inputs)
    torch.testing.assert_close(predicted, 10 * normalize(gate * z, dim=-1) @ method.task.text_features.T)


def test_it_declares_what_the_table_says():
    assert_declared("fedclip")
