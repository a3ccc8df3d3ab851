import math

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
