"""How far clients move, and how far apart, by hand."""

import math

import pytest
import torch

from fedvl.federation.drift import drift


def test_drift_diversity_and_cosine_distance_by_hand():
    before = [{"visual": torch.tensor([[1.0, 0.0]]), "context": torch.zeros(1, 2)}] * 2
    after = [{"visual": torch.tensor([[2.0, 0.0]]), "context": torch.tensor([[1.0, 0.0]])}]
    after += [{"visual": torch.tensor([[1.0, 1.0]]), "context": torch.tensor([[2.0, 0.0]])}]
    figures = drift(before, after, ["visual", "context"])
    assert figures["drift_diversity_visual"] == pytest.approx((1 + 1) / 2)  # eq. 6: moves (1, 0) and (0, 1)
    assert figures["drift_diversity_context"] == pytest.approx((1 + 4) / 9)
    assert figures["cosine_distance_visual"] == pytest.approx(1 - 2 / math.sqrt(8))
    assert figures["cosine_distance_context"] == pytest.approx(0)
    assert drift(before[:1], after[:1], ["visual", "context"]) == {}


def test_moves_that_cancel_out_have_no_diversity_and_stay_numbers():
    before = [{"visual": torch.zeros(2)}] * 2
    after = [{"visual": torch.tensor([1.0, 0.0])}, {"visual": torch.tensor([-1.0, 0.0])}]
    assert drift(before, after, ["visual"]) == {"cosine_distance_visual": pytest.approx(2)}
    assert all(math.isfinite(value) for value in drift(before, before, ["visual"]).values())
