"""Label noise: give a share of each client's training samples a wrong label."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvl.errors import FedVLError
from fedvl.seeding import numpy_generator

Integers = NDArray[np.int64]


class Noise(NamedTuple):
    kind: str  # symmetric: any other class; pair: the next class
    share: float

    @classmethod
    def parse(cls, text: str) -> "Noise":
        kind, _, share = text.partition(":")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if kind not in ("symmetric", "pair") or not 0 <= value <= 1:
            raise FedVLError(
                f"Label noise '{text[:100]}' is not known; use symmetric:SHARE or pair:SHARE, such as symmetric:0.4."
            )
        return cls(kind, value)


def with_wrong_labels(labels: Integers, clients: list[Integers], classes: int, noise: Noise, seed: int) -> Integers:
    """Return the labels with as many wrong ones at each client; unknown ones (-1) stay."""
    noisy = labels.copy()
    for client, rows in enumerate(clients):
        generator = numpy_generator(seed, "label-noise", client)
        known = rows[labels[rows] >= 0]
        wrong = generator.permutation(known)[: round(noise.share * len(known))]
        steps = generator.integers(1, classes, len(wrong)) if noise.kind == "symmetric" else 1
        noisy[wrong] = (labels[wrong] + steps) % classes
    return noisy
