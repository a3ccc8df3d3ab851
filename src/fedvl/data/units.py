"""Whose each image is: all images of one patient may be one record of differential privacy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvl.data.assemble import UNIT_COLUMNS
from fedvl.data.stores import Split
from fedvl.errors import FedVLError

Integers = NDArray[np.int64]


class Units(NamedTuple):
    """The unit of each training image, by a column of its source."""

    column: str
    numbers: Integers

    def most(self, clients: Sequence[Integers]) -> int:
        """Return the most images that one unit has at a client."""
        return max((int(np.bincount(self.numbers[rows]).max()) for rows in clients if len(rows)), default=0)

    def together(self, clients: Sequence[Integers]) -> list[Integers]:
        """Give all images of a unit to the client that has most of them, of equals to the first."""
        held = np.zeros((int(self.numbers.max(initial=-1)) + 1, len(clients)), np.int64)
        for client, rows in enumerate(clients):
            np.add.at(held[:, client], self.numbers[rows], 1)
        owner = held.argmax(1)
        everything = np.sort(np.concatenate([np.array([], np.int64), *clients]))
        return [everything[owner[self.numbers[everything]] == client] for client in range(len(clients))]


def units_of(split: Split, kept: Integers, wanted: str | None) -> Units | None:
    """Return the units by the wanted column, or by one that the source has; None without any."""
    column = wanted or next((name for name in UNIT_COLUMNS if name in split.units), None)
    if column is None:
        return None
    if column not in split.units:
        raise FedVLError(
            f"The training images have no column '{column}' that says whose they are; add it to the manifest or table, as one "
            f"of {', '.join(UNIT_COLUMNS)}, or leave --unit out."
        )
    values = [split.units[column][row] for row in kept]
    if wanted and (missing := values.count("")):
        raise FedVLError(
            f"{missing} training images have no {column}, so that what one {column} adds is not bounded; fill in the "
            "column, or leave the images out."
        )
    names = [value or f"\0{place}" for place, value in enumerate(values)]  # an image of nobody is by itself
    return Units(column, np.unique(names, return_inverse=True)[1].astype(np.int64))
