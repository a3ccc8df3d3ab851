"""Pillow's bicubic resizing with the same bits, as two matrix products on any device.

Pillow multiplies by weights of 22 binary places in integers, and rounds after each direction. In
float64 these sums are exact, so neither their order nor the batch changes a bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvl.tensors import FloatArray

REACH = 2.0  # of the cubic filter, in pixels of the coarser image
UNIT = 2**22  # a weight of 1
KEPT = 64  # matrices, of 1 MB for 500 columns and an input of 224


class Window(NamedTuple):
    """A square of a resized image."""

    width: int  # of the whole image
    height: int
    left: int
    top: int
    side: int


def columns_first(width: int, height: int, window: Window) -> bool:
    """Whether every version of Pillow shortens rows before columns.

    From version 13 on it shortens columns first in tall images.
    """
    lost = height - window.height
    return lost <= 0 or lost <= 2 * (width - window.width)


def resample(pixels: Tensor, window: Window) -> Tensor:
    """Return the window of resized images, n x 3 x side x side, of uint8 n x H x W x 3.

    Columns are combined first: see :func:`columns_first`.
    """
    height, width = pixels.shape[1:3]
    columns = _weights(width, window.width, window.left, window.side, pixels.device)
    rows = _weights(height, window.height, window.top, window.side, pixels.device)
    narrow = _rounded(pixels.permute(0, 3, 1, 2).double() @ columns)
    return _rounded(narrow.mT @ rows).mT.to(torch.uint8)


def _rounded(sums: Tensor) -> Tensor:
    return sums.mul_(1 / UNIT).add_(0.5).floor_().clamp_(0, 255)


@lru_cache(KEPT)
def _weights(size: int, resized: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return size x count weights of pixels in `count` resized ones from the first on."""
    found = np.zeros((size, count))
    scale = size / resized
    shrinking = max(scale, 1.0)
    for place in range(count):
        centre = (first + place + 0.5) * scale
        low = max(0, int(centre - REACH * shrinking + 0.5))
        high = min(size, int(centre + REACH * shrinking + 0.5))
        weights = _cubic((np.arange(low, high, dtype=np.float64) - centre + 0.5) * (1 / shrinking))
        weights /= np.cumsum(weights)[-1]  # summed one by one, as Pillow does
        found[low:high, place] = np.trunc(weights * UNIT + np.copysign(0.5, weights))
    with torch.inference_mode(False):
        return torch.from_numpy(found).to(device)


def _cubic(x: FloatArray) -> FloatArray:
    """Return Keys' filter with a = -1/2."""
    x = np.abs(x)
    return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * -0.5, 0.0))
