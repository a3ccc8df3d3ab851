"""What is released with noise, and the solutions from it, by hand."""

import pytest
import torch

from fedvl.methods.base import SumNoise
from fedvl.methods.parts.moments import indicators, packed
from fedvl.methods.parts.noised_moments import COUNT, Noised, Release, noised_fit, noised_gaussian, noised_mixture

MANY = 10**9  # public number of images by which G and H are released


def noised(cross, sizes=None, deviation=0.0, count=16.0, values=8.0):
    """Moments about a mean of 0, with eigenvalues that are all the same."""
    width = len(cross)
    kept = None if sizes is None else torch.tensor(sizes).double()
    eye, zeros = torch.eye(width).double(), torch.zeros(width).double()
    return Noised(deviation, torch.tensor(count).double(), kept, zeros, cross, values * eye.diagonal(), eye, False)


def test_what_is_released_follows_from_public_numbers_alone():
    width = 16  # 16^1.5 = 64
    assert Release.of(SumNoise(1.0, 16), width, 3).gram
    assert not Release.of(SumNoise(1.0, 15), width, 3).gram
    assert not Release.of(SumNoise(1.0, 16, clip=2.0), width, 3).gram
    assert not Release.of(SumNoise(1.0, MANY), width, 3, gram=False).gram
    assert list(Release.of(SumNoise(1.0, 15), width, 3).roles) == ["cross", "count"]
    rows, labels = torch.eye(2).double(), torch.tensor([0, -1])
    found = Release.of(SumNoise(1.0, MANY), 2, 2, sizes=False).sums_of(rows, indicators(labels, 2))
    assert found["count"].tolist() == [COUNT]
    assert found["gram"].tolist() == [1.0, 0.0, 0.0]
    sizes = Release.of(SumNoise(1.0, MANY), 2, 2).sums_of(rows, indicators(labels, 2))
    assert sizes["counts"].tolist() == [COUNT, 0.0]
    assert list(sizes) == ["gram", "cross", "counts"]


def test_class_sizes_are_released_where_their_noise_is_a_third_of_a_class_or_less():
    """Of 3 classes, H alone: s = 2 sqrt(1 + 1 / 16), and images >= 3 * 3 * 4 s = 74.2."""
    assert Release.of(SumNoise(2.0, 75), 100, 3).sizes
    assert not Release.of(SumNoise(2.0, 74), 100, 3).sizes
    assert not Release.of(SumNoise(2.0, 75), 100, 3, sizes=False).sizes


def test_what_a_solution_reads_from_sums_is_by_hand():
    """G = 8 about a mean of 0; sizes 12 and 4 of 16, with and without noise that explains their spread."""
    cross = torch.tensor([[4.0, -4.0], [1.0, -1.0]]).double()
    sums = {"gram": packed(8 * torch.eye(2).double()), "cross": cross, "counts": COUNT * torch.tensor([12.0, 4.0])}
    release = Release.of(SumNoise(0.0, MANY), 2, 2)
    found = release.read(sums, lambda: pytest.fail("G is there"))
    assert found.sizes.tolist() == [12.0, 4.0]
    assert float(found.count) == 16
    torch.testing.assert_close(found.cross, cross)
    # deviation of a size s / COUNT = 4: of the spread 4^2 + 4^2 = 32 noise explains 4^2 (2 - 1) = 16, a half
    multiplier = 1 / (1 + 1 + 1 / 16) ** 0.5
    drawn = Release.of(SumNoise(multiplier, MANY), 2, 2).read(sums, lambda: pytest.fail("G is there"))
    assert drawn.sizes.tolist() == pytest.approx([10.0, 6.0])
    equal = {"cross": cross, "count": COUNT * torch.tensor([16.0])}
    public = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()  # covariance diag(1/2, 1/2)
    alone = Release.of(SumNoise(0.0, MANY), 2, 2, gram=False, sizes=False).read(equal, lambda: public)
    assert alone.sizes.tolist() == [8.0, 8.0]
    assert alone.values.tolist() == pytest.approx([8.0, 8.0])
    assert alone.public


def test_a_fit_of_sums_is_by_hand():
    """Two classes in the plane: G = 8 diag(1, 1) about a mean of 0, so that Gc = G; a = 1."""
    cross = torch.tensor([[4.0, -4.0], [1.0, -1.0]]).double()
    prior = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double()  # centred over classes: 1/2 and -1/2
    found = noised_fit(noised(cross), prior, None)
    torch.testing.assert_close(found.weight[:, 0], torch.tensor([(4 + 1 / 2) / 9, 1 / 9]).double())
    torch.testing.assert_close(found.weight[:, 1], -found.weight[:, 0])
    torch.testing.assert_close(found.bias, torch.tensor([0.5, 0.5]).double())
    of_public = noised_fit(Noised(**{**vars(noised(cross)), "public": True}), prior, None)
    torch.testing.assert_close(of_public.weight, found.weight)
    assert of_public.scale == pytest.approx(2)
    fixed = noised_fit(noised(cross), prior * 0, 8.0)
    torch.testing.assert_close(fixed.weight, cross / 16)


def test_gaussian_classes_are_by_hand():
    """In one dimension, sizes 12 and 4, a = max(s sqrt(d), 1) = 1: mu = (4 + 1/2) / 12.5 and -(4 + 1/2) / 4.5."""
    cross, prior = torch.tensor([[4.0, -4.0]]).double(), torch.tensor([[1.0, 0.0]]).double()
    weight, bias = noised_gaussian(noised(cross, [12.0, 4.0]), prior, 1.0, 1.0)
    expected = torch.tensor([[16 * 4.5 / 12.5 / 9, -16 * 4.5 / 4.5 / 9]]).double()
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(bias, -expected[0].square() * 8 / 16 / 2)
    twice, _ = noised_gaussian(noised(cross, [12.0, 4.0]), prior, 2.0, 0.0)  # a = 2, without texts
    torch.testing.assert_close(twice, torch.tensor([[16 * 4 / 13 / 10, -16 * 4 / 5 / 10]]).double())


def test_a_mixture_is_by_hand_and_nothing_is_left_of_noise():
    """One dimension, s = 2: a = 2, and of the spread 32 noise explains 4, so that 7/8 are left."""
    cross = torch.tensor([[4.0, -4.0]]).double()
    weight, bias = noised_mixture(noised(cross, [12.0, 4.0], 2.0), 0.5)
    expected = 7 / 8 * torch.tensor([[16 * 4 / 13 / 10, -16 * 4 / 5 / 10]]).double()
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close(bias, -expected[0].square() * 8 / 16 / 2)
    gone, none = noised_mixture(noised(cross, [12.0, 4.0], 6.0), 0.5)
    assert not gone.any()
    assert not none.any()


def test_shrinkage_draws_the_covariance_of_a_mixture_to_its_mean():
    cross = torch.tensor([[4.0, -4.0], [0.0, 0.0]]).double()
    moments = noised(cross, [8.0, 8.0])
    moments = Noised(**{**vars(moments), "values": torch.tensor([2.0, 6.0]).double()})
    weight, _ = noised_mixture(moments, 0.5)
    torch.testing.assert_close(weight[0], torch.tensor([16 / 2 / 3, -16 / 2 / 3]).double())
