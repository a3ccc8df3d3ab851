"""What is released with noise, and the solution from it, by hand."""

import pytest
import torch

from fedvl.methods.base import SumNoise
from fedvl.methods.parts.moments import indicators, packed
from fedvl.methods.parts.noised_moments import COUNT, noised_fit, noised_moments_of, noised_roles, plan_of

MANY = 10**9  # public number of images by which G and H are released


def test_what_is_released_follows_from_public_numbers_alone():
    width = 16  # 16^1.5 = 64
    assert plan_of(SumNoise(1.0, 16), width) == "G and H"
    assert plan_of(SumNoise(1.0, 15), width) == "class sums"
    assert plan_of(SumNoise(1.0, 16, clip=2.0), width) == "class sums"
    assert list(noised_roles(SumNoise(1.0, 15), width, 3)) == ["cross", "count"]
    rows, labels = torch.eye(2).double(), torch.tensor([0, -1])
    found = noised_moments_of(SumNoise(1.0, MANY), rows, indicators(labels, 2))
    assert found["count"].tolist() == [COUNT]
    assert found["gram"].tolist() == [1.0, 0.0, 0.0]


def test_a_fit_of_sums_is_by_hand():
    """Two classes in the plane: G = 8 diag(1, 1) about a mean of 0, so that Gc = G; a = 1."""
    noise = SumNoise(0.0, MANY)
    gram, cross = 8 * torch.eye(2).double(), torch.tensor([[4.0, -4.0], [1.0, -1.0]]).double()
    sums = {"gram": packed(gram), "cross": cross, "count": COUNT * torch.tensor([16.0]).double()}
    prior = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double()  # centred over classes: 1/2 and -1/2
    found = noised_fit(noise, sums, prior, lambda: pytest.fail("G is there"), None)
    torch.testing.assert_close(found.weight[:, 0], torch.tensor([(4 + 1 / 2) / 9, 1 / 9]).double())
    torch.testing.assert_close(found.weight[:, 1], -found.weight[:, 0])
    torch.testing.assert_close(found.bias, torch.tensor([0.5, 0.5]).double())
    public = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()  # covariance diag(1/2, 1/2)
    of_sums = noised_fit(noise, {k: v for k, v in sums.items() if k != "gram"}, prior, lambda: public, None)
    torch.testing.assert_close(of_sums.weight, found.weight)
    assert of_sums.scale == pytest.approx(2)
    fixed = noised_fit(noise, sums, prior * 0, lambda: public, 8.0)
    torch.testing.assert_close(fixed.weight, cross / 16)
