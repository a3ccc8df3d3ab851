"""Noise on clients' counts: the discrete Gaussian, drawn exactly and in whole numbers.

The sampler is that of Canonne, Kamath and Steinke (2020), algorithms 1 to 3. It uses integers
alone, so that no rounding of floating point numbers shows what was drawn. Noise of variance s^2 on
whole numbers, of which a client changes a vector of norm D, is D^2 / (2 s^2)-concentrated private,
as Gaussian noise is, so that the RDP accountant counts it as such. In a secure sum each client adds
a share. The sum of n shares of variance s^2 / n is not quite a discrete Gaussian; Kairouz, Liu and
Steinke (2021) bound the difference (:func:`slack`).
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvl.errors import FedVLError
from fedvl.federation.accounting import Step
from fedvl.federation.fixed_point import count_numbers, unflat_statistics
from fedvl.methods.base import Method
from fedvl.tensors import Tensors

SHARE_FOR_COUNTS = 0.25  # of what the rounds' updates spend, beside it, on counts
FRACTION = 2**16  # a variance is a whole number of parts of this size
BYTES_AT_ONCE = 1024  # bytes that are drawn together


class Bits:
    """A stream of random whole numbers, as secret as its seed: SHAKE-256 in blocks."""

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self.name = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
        self.blocks = self.used = 0
        self.block = b""

    def take(self, count: int) -> bytes:
        if self.used + count > len(self.block):
            self.block = hashlib.shake_256(f"{self.name}\x1f{self.blocks}".encode()).digest(max(BYTES_AT_ONCE, count))
            self.blocks, self.used = self.blocks + 1, 0
        self.used += count
        return self.block[self.used - count : self.used]

    def below(self, limit: int) -> int:
        """Draw one of 0 to ``limit`` - 1, each as likely."""
        bits = (limit - 1).bit_length()
        while True:
            drawn = int.from_bytes(self.take(-(-bits // 8))) >> -bits % 8 if bits else 0
            if drawn < limit:
                return drawn


def bernoulli_exp(numerator: int, denominator: int, bits: Bits) -> bool:
    """Return True with probability exp(-numerator / denominator), algorithm 1."""
    while numerator > denominator:
        if not bernoulli_exp(1, 1, bits):
            return False
        numerator -= denominator
    count = 1
    while bits.below(denominator * count) < numerator:
        count += 1
    return count % 2 == 1


def discrete_laplace(scale: int, bits: Bits) -> int:
    """Draw a whole number x with probability in proportion to exp(-|x| / scale), algorithm 2."""
    while True:
        low = bits.below(scale)
        if not bernoulli_exp(low, scale, bits):
            continue
        high = 0
        while bernoulli_exp(1, 1, bits):
            high += 1
        size, negative = low + scale * high, bool(bits.below(2))
        if size or not negative:
            return -size if negative else size


def discrete_gaussian(variance: float, bits: Bits) -> int:
    """Draw x with probability in proportion to exp(-x^2 / (2 variance)), algorithm 3.

    The variance is rounded up to a multiple of 2^-16.
    """
    top, bottom = math.ceil(variance * FRACTION), FRACTION
    if top <= 0:
        return 0
    scale = math.isqrt(top // bottom) + 1
    while True:
        drawn = discrete_laplace(scale, bits)
        beyond = abs(drawn) * scale * bottom - top
        if bernoulli_exp(beyond * beyond, 2 * top * bottom * scale * scale, bits):
            return drawn


def slack(variance: float, shares: int) -> float:
    """Return tau, how far a sum of such shares is from a discrete Gaussian, for one number."""
    return 10 * sum(math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, shares))


@dataclass(frozen=True)
class CountNoise:
    """The noise on all reports of a run: whole numbers that clients send before some rounds."""

    sensitivity: float  # norm of a client's report, at most
    numbers: int  # of a report
    due: tuple[int, ...]  # rounds before which clients report
    alone: bool  # whether clients send nothing else
    shares: int = 1  # clients that add the noise together; 1: the server adds it

    def multiplier(self, sigma: float, rounds: int) -> float:
        """Return the noise multiplier of a report where each update has ``sigma``."""
        return sigma if self.alone else sigma * math.sqrt(len(self.due) / (SHARE_FOR_COUNTS * rounds))

    def variance(self, sigma: float) -> float:
        """Return the variance of a share of the noise on each number."""
        return (sigma * self.sensitivity) ** 2 / self.shares

    def step(self, sigma: float) -> Step:
        """Return what a report spends: every client reports, and a sum of shares has a slack."""
        beyond = slack(self.variance(sigma), self.shares) * math.sqrt(self.numbers)
        return Step(1.0, 1 / (1 / sigma + beyond) if sigma else 0.0)

    def added(self, total: Tensors, sigma: float, seed: int, *purpose: str | int) -> Tensors:
        """Add the noise of a server to a sum of reports."""
        noise = unflat_statistics(
            self.draw(self.numbers, sigma, seed, *purpose), {n: tuple(t.shape) for n, t in total.items()}
        )
        return {name: tensor + noise[name].to(tensor) for name, tensor in total.items()}

    def denoised(self, total: Tensor, sigma: float) -> Tensor:
        """Shrink a noisy sum to its mean by as much of its spread as noise explains.

        It uses what was released and the known amount of noise alone, so it spends nothing.
        """
        spread = total - total.mean()
        noise = (total.numel() - 1) * (sigma * self.sensitivity) ** 2
        share = 1 - noise / max(float(spread.square().sum()), 1e-12)
        return (total.mean() + spread * max(share, 0.0)).clamp(min=0)

    def draw(self, numbers: int, sigma: float, seed: int, *purpose: str | int) -> Tensor:
        """Draw a share of the noise on a report."""
        bits, variance = Bits(seed, "counts", *purpose), self.variance(sigma)
        return torch.tensor([discrete_gaussian(variance, bits) for _ in range(numbers)], dtype=torch.long)


def count_noise(method: Method, start: Tensors, rounds: int, shares: int = 1) -> CountNoise | None:
    """Return the noise that the reports of a method's clients need, if they report anything."""
    consultation = method.consultation()
    if consultation is None or not consultation.report_shapes:
        return None
    due = tuple(index for index in range(rounds) if consultation.due(index))
    sensitivity, numbers = consultation.sensitivity, count_numbers(consultation.report_shapes)
    assert sensitivity is not None, "requirements.py asks for it"
    return CountNoise(sensitivity, numbers, due, not start, shares)


def check_report(report: Tensors, sensitivity: int) -> None:
    """Refuse a report that noise does not cover: it would be the method's mistake."""
    values = [tensor.double() for tensor in report.values()]
    whole = all(bool((tensor == tensor.round()).all()) for tensor in values)
    if not whole or sum(float(tensor.square().sum()) for tensor in values) > sensitivity**2:
        raise FedVLError(
            f"A report has to be whole numbers of a norm of at most {sensitivity} under --privacy; this one is not."
        )
