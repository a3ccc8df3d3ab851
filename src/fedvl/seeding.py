"""Draw every random choice from (seed, purpose, round, client, ...): same bits everywhere."""

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy
    import torch


def derived_seed(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose; distinct purposes give unrelated streams."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def numpy_generator(seed: int, *purpose: str | int) -> "numpy.random.Generator":
    import numpy

    return numpy.random.Generator(numpy.random.PCG64(derived_seed(seed, *purpose)))


def torch_generator(seed: int, *purpose: str | int) -> "torch.Generator":
    """Return a CPU generator: a GPU run sees the same numbers, drawn on the CPU and moved."""
    import torch

    return torch.Generator().manual_seed(derived_seed(seed, *purpose))


GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as torch writes it, with a sign
FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
MAX_INT64 = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Uniform:
    """Numbers between 0 and 1, neither included."""

    shape: tuple[int, ...] = ()

    def __call__(self, keys: Tensor) -> Tensor:
        return to_uniform(hashes(keys, math.prod(self.shape))).view(len(keys), *self.shape)


@dataclass(frozen=True)
class Normal:
    """Standard normal numbers."""

    shape: tuple[int, ...] = ()

    def __call__(self, keys: Tensor) -> Tensor:
        """Look up four quantiles for each hash, one by 16 bits, and rotate pairs by 45 degrees.

        The sum and the difference of two independent normal numbers are again normal and
        independent. The rotation thus makes 2^32 values of a table of 2^16, up to 6 standard
        deviations from 0.
        """
        count = math.prod(self.shape)
        words = hashes(keys, -(-count // 4)).view(torch.int16).int().bitwise_and_(2**16 - 1)
        first, second = quantiles(keys.device).index_select(0, words.flatten()).view(len(keys), -1).chunk(2, dim=1)
        return torch.cat([first + second, first - second], dim=1)[:, :count].view(len(keys), *self.shape)


@functools.cache
def quantiles(device: torch.device) -> Tensor:
    """Return 2^16 equally likely normal numbers of mean 0 and variance 1/2, computed on the CPU."""
    levels = torch.special.ndtri((torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16)
    scaled: Tensor = levels / (2 * levels.square().mean()).sqrt()
    return scaled.float().to(device)


@dataclass(frozen=True)
class Integers:
    """Whole numbers from 0, all less than ``below``."""

    below: int
    shape: tuple[int, ...] = ()

    def __call__(self, keys: Tensor) -> Tensor:
        drawn = upper(hashes(keys, math.prod(self.shape)), 32)
        return (drawn * self.below >> 32).view(len(keys), *self.shape)


Draw = Uniform | Normal | Integers


def keys_of(seed: int, clients: Tensor, step: int) -> Tensor:
    """Return a key for each client's draws of one step; the seed has 63 bits."""
    return mixed(mixed((clients + 1) * GOLDEN_GAMMA + seed) + torch.full_like(clients[:1], step + 1) * GOLDEN_GAMMA)


def hashes(keys: Tensor, count: int) -> Tensor:
    """Return the first numbers of a stream of SplitMix64 for each key: keys x count, 64 bits."""
    return mixed(torch.arange(1, count + 1, device=keys.device) * GOLDEN_GAMMA + keys[:, None])


def mixed(state: Tensor) -> Tensor:
    """Mix the bits of 64-bit numbers, in place; products are those modulo 2^64."""
    for bits, factor in zip((34, 37), FACTORS, strict=True):
        state.bitwise_xor_(upper(state, bits)).mul_(factor)
    return state.bitwise_xor_(upper(state, 33))


def upper(numbers: Tensor, bits: int) -> Tensor:
    """Return the upper bits of 64-bit numbers, without regard to their sign."""
    return (numbers >> (64 - bits)).bitwise_and_((1 << bits) - 1)


def to_uniform(numbers: Tensor) -> Tensor:
    """Make numbers between 0 and 1 of the upper 23 bits: exact in 32-bit floats, never 0 or 1."""
    return upper(numbers, 23).float().add_(0.5).mul_(2.0**-23)


def permutations(seed: int, clients: Tensor, chosen: Tensor, epoch: int) -> Tensor:
    """Shuffle the places where ``chosen`` (clients x places) is true; the others follow."""
    order = hashes(keys_of(seed, clients, epoch), chosen.shape[1]).masked_fill_(~chosen, MAX_INT64)
    return order.argsort(dim=1, stable=True)
