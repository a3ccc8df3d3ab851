"""Scores of cosines keep their precision under bfloat16."""

import torch
from torch.nn.functional import normalize

from fedvl.methods.parts.cosines import cosine_scores


def test_scores_are_the_scale_times_cosines_also_under_autocast():
    generator = torch.Generator().manual_seed(0)
    images, texts = (normalize(torch.randn(n, 64, generator=generator), dim=-1) for n in (5, 3))
    expected = 100 * torch.einsum("id,cd->ic", images.double(), texts.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = cosine_scores(100.0, images, texts)
        assert (100 * images @ texts.T - expected).abs().max() > 0.01  # what would be lost
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
