"""fedclip: a gate on the features of images."""

import torch
from helpers.small import small_method


def test_fedclip_counts_clients_equally_and_scores_by_cosine():
    method = small_method("fedclip")
    assert method.weighting == "clients"
    tensors = method.start(torch.Generator().manual_seed(0))
    scores = method.predict(tensors, {"embeddings": torch.randn(7, 6)})
    assert scores.shape == (7, 4)
    assert scores.abs().max() <= 10.0 + 1e-4
