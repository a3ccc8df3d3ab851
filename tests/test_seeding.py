import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedvl.seeding import (
    Integers,
    Normal,
    Uniform,
    derived_seed,
    hashes,
    keys_of,
    numpy_generator,
    permutations,
    torch_generator,
)
from fedvl.tensors import on_threads


def test_streams_differ_by_every_part_of_the_purpose():
    seeds = [
        derived_seed(0),
        derived_seed(1),
        derived_seed(0, "a"),
        derived_seed(0, "b"),
        derived_seed(0, "a", 1),
        derived_seed(0, "a", "1"),
        derived_seed(0, "a", 1, 1),
        derived_seed(0, "a", 11),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_streams_are_fixed_for_ever():
    """A change here would change every published result."""
    assert derived_seed(0, "order", 3, 7) == EXPECTED
    assert (
        torch.rand(1, generator=torch_generator(5, "x")).item()
        == torch.rand(1, generator=torch_generator(5, "x")).item()
    )
    assert numpy_generator(5, "x").random() == numpy_generator(5, "x").random()


EXPECTED = 4502975733693527648  # of SHA-256("0\x1fstr:order\x1fint:3\x1fint:7")


CLIENTS = torch.arange(50)


def splitmix(state: int, count: int) -> list[int]:
    """SplitMix64 as it is published, in whole numbers."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        found.append(z ^ z >> 31)
    return found


def unsigned(numbers: torch.Tensor) -> list[int]:
    return [number % 2**64 for number in numbers.tolist()]


def test_published_numbers() -> None:
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert unsigned(hashes(torch.tensor([1234567]), 5)[0]) == known == splitmix(1234567, 5)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**7), st.integers(0, 10**6))
def test_keys_are_hashes_of_seed_client_and_step(seed, client, step) -> None:
    signed = keys_of(seed, torch.tensor([client]), step)
    of_client = splitmix(seed + client * 0x9E3779B97F4A7C15, 1)[0]
    assert unsigned(signed) == splitmix(of_client + step * 0x9E3779B97F4A7C15, 1)
    assert unsigned(hashes(signed, 3)[0]) == splitmix(unsigned(signed)[0], 3)


@pytest.mark.parametrize("draw", [Uniform((3, 5)), Normal((3, 5)), Normal(), Integers(7, (2,)), Uniform()])
def test_a_client_draws_the_same_whoever_is_beside_it(draw) -> None:
    together = draw(keys_of(1, CLIENTS, 4))
    assert together.shape == (50, *draw.shape)
    for client in (0, 17, 49):
        assert torch.equal(draw(keys_of(1, torch.tensor([client]), 4))[0], together[client])
    assert not torch.equal(together, draw(keys_of(1, CLIENTS, 5)))
    assert not torch.equal(together, draw(keys_of(2, CLIENTS, 4)))


@pytest.mark.parametrize(("draw", "law"), [(Uniform((2000,)), stats.uniform), (Normal((2001,)), stats.norm)])
def test_laws(draw, law) -> None:
    drawn = draw(keys_of(0, CLIENTS, 0)).double()
    assert stats.kstest(drawn.flatten().numpy(), law.cdf).pvalue > 0.01
    most = math.sqrt(2.0) * 4  # deviations of a correlation of 2000 pairs are 1 / sqrt(2000)
    neighbours = torch.corrcoef(drawn)[0, 1:].abs().max() * math.sqrt(2000)
    within = torch.corrcoef(torch.stack([drawn[:, :-1].flatten(), drawn[:, 1:].flatten()]))[0, 1].abs()
    assert neighbours < most
    assert within * math.sqrt(drawn.numel()) < most


def test_normal_numbers_are_rotated_pairs_of_quantiles_of_sixteen_bits() -> None:
    levels = [NormalDist().inv_cdf((level + 0.5) / 2**16) for level in range(2**16)]
    length = math.sqrt(2 * math.fsum(level**2 for level in levels) / 2**16)  # mean square 1/2, so that a sum has 1
    words = [number >> 16 * part & 0xFFFF for number in splitmix(1234567, 4) for part in range(4)]
    first, second = ([levels[word] / length for word in half] for half in (words[:8], words[8:]))
    expected = [one + other for one, other in zip(first, second, strict=True)]
    expected += [one - other for one, other in zip(first, second, strict=True)]
    assert Normal((3, 5))(torch.tensor([1234567])).flatten().tolist() == pytest.approx(expected[:15], rel=1e-6)


def test_moments_and_tails_of_normal_numbers() -> None:
    drawn = Normal((40_000,))(keys_of(7, CLIENTS, 2)).double().flatten()
    for power, (moment, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs(drawn.pow(power).mean() - moment) < 4 * math.sqrt(variance / len(drawn)), power
    for bound in (2.0, 3.0, 4.0, 4.5):
        beyond = int((drawn.abs() > bound).sum())
        assert stats.binomtest(beyond, len(drawn), 2 * stats.norm.sf(bound)).pvalue > 0.001, bound


def test_normal_numbers_do_not_depend_on_those_beside_them() -> None:
    """Neither in their values nor in their sizes: of a pair, of neighbours, of clients and of steps."""
    drawn = torch.stack([Normal((4000,))(keys_of(3, CLIENTS, step)) for step in range(2)]).double()
    pairs = [
        (drawn[..., :2000], drawn[..., 2000:]),
        (drawn[..., 1:], drawn[..., :-1]),
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn[1], drawn[0]),
    ]
    for one, other in pairs:
        for of in (torch.clone, torch.square, lambda numbers: (numbers.abs() > 2).double()):
            together = torch.stack([of(one).flatten(), of(other).flatten()])
            assert abs(torch.corrcoef(together)[0, 1]) * math.sqrt(together.shape[1]) < 4


def test_normal_numbers_have_the_same_bits_on_any_number_of_threads() -> None:
    found = []
    for threads in (1, 2):
        with on_threads(threads):
            found.append(Normal((50, 512))(keys_of(1, CLIENTS, 0)))
    assert torch.equal(*found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("draw", [Uniform((3, 5)), Normal((50, 512)), Integers(7, (20,))])
def test_a_gpu_draws_the_same_bits(draw) -> None:
    assert torch.equal(draw(keys_of(1, CLIENTS.cuda(), 4)).cpu(), draw(keys_of(1, CLIENTS, 4)))


def test_uniform_numbers_leave_out_both_ends() -> None:
    drawn = Uniform((100_000,))(keys_of(0, CLIENTS[:5], 0))
    assert 0 < drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1


def test_whole_numbers_are_all_as_likely() -> None:
    counts = torch.bincount(Integers(6, (1000,))(keys_of(0, CLIENTS, 0)).flatten(), minlength=6)
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_permutations_hold_each_place_once_and_all_orders_are_as_likely() -> None:
    chosen = torch.tensor([True, False, True, True]).expand(6000, 4)
    order = permutations(3, torch.arange(6000), chosen, 0)
    assert (order[:, 3] == 1).all()  # what is not chosen comes last
    assert (order.sort(1).values == torch.arange(4)).all()
    _, counts = torch.unique(order, dim=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > 0.01
    assert not torch.equal(order, permutations(3, torch.arange(6000), chosen, 1))
