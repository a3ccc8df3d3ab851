"""Draw every random choice from (seed, purpose, round, client, ...): same bits everywhere."""

import hashlib
from typing import TYPE_CHECKING

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
