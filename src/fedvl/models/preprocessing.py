"""Turn a PIL image into the input of an encoder, as each model's own image processor does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedvl.models import numbers
from fedvl.models.resampling import Window, columns_first

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# ViLT lets the longer side grow to 1333/800 of the shorter one before it shrinks the image.
VILT_LONGEST = 1333 / 800
# A strip longer than this many times its width is cropped before it is enlarged: 1 x 60000 would become gigapixels.
MAX_STRIP = 32


@dataclass(frozen=True)
class Preprocessing:
    """Bicubic resize of the shorter side to `shorter`, then a centre crop (CLIP).

    With `crop` 0 the aspect ratio is kept, and sides are multiples of `divisor` (ViLT).
    """

    shorter: int
    crop: int
    divisor: int = 32
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def from_config(cls, config: dict[str, Any], image_size: int, crop: bool) -> Preprocessing:
        """Read a Hugging Face preprocessor_config.json, old or new, with the model's defaults."""
        own = (CLIP_MEAN, CLIP_STD) if crop else ((0.5,) * 3, (0.5,) * 3)
        return cls(
            shorter=numbers.side(config, "size", image_size),
            crop=numbers.side(config, "crop_size", image_size) if crop else 0,
            divisor=numbers.side(config, "size_divisor", 32),
            mean=numbers.colour_numbers(config, "image_mean", own[0], positive=False),
            std=numbers.colour_numbers(config, "image_std", own[1], positive=True),
        )

    def __call__(self, image: Image.Image) -> Tensor:
        """Return the image as uint8, 3 x H x W."""
        image = _cut_strip(_rgb(image))
        if not self.crop:
            return _pixels(image.resize(self._whole_size(*image.size), Image.Resampling.BICUBIC))
        wide, high, left, top, side = self.window(*image.size)
        resized = image.resize((wide, high), Image.Resampling.BICUBIC)
        return _pixels(resized.crop((left, top, left + side, top + side)))

    def window(self, width: int, height: int) -> Window:
        """Return which part of a resized image is the input, where there is a crop."""
        longer = int(self.shorter * max(width, height) / min(width, height))
        wide, high = (self.shorter, longer) if width <= height else (longer, self.shorter)
        return Window(wide, high, (wide - self.crop) // 2, (high - self.crop) // 2, self.crop)

    def resampled(self, width: int, height: int) -> Window | None:
        """Return the window if :func:`resample` makes the input of such an image, or else None."""
        if not self.crop <= self.shorter or not self.crop or _limit(width, height) < max(width, height):
            return None
        window = self.window(width, height)
        return window if columns_first(width, height, window) else None

    def _whole_size(self, width: int, height: int) -> tuple[int, int]:
        scale = self.shorter / min(width, height)
        longest = int(VILT_LONGEST * self.shorter)
        new = [scale * width, scale * height]
        if max(new) > longest:
            new = [side * longest / max(new) for side in new]
        # At least one patch per side: a narrow strip would otherwise vanish.
        columns, rows = (max(1, int(side + 0.5) // self.divisor) * self.divisor for side in new)
        return columns, rows

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return the pixels as float32 with mean near 0 and deviation near 1.

        pixels: ... x 3 x H x W, uint8 in 0..255 or float in 0..1.
        """
        scaled = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
        mean, std = (by_channel(values, pixels.device) for values in (self.mean, self.std))
        return (scaled - mean) / std


@dataclass(frozen=True)
class Squashing(Preprocessing):
    """Resize of both sides to `shorter`, whatever the image's shape (SigLIP)."""

    resample: int = Image.Resampling.BICUBIC.value

    @classmethod
    def squashed(cls, config: dict[str, Any], image_size: int) -> Squashing:
        """Read the preprocessor_config.json of a SigLIP."""
        side = numbers.side(config, "size", image_size)
        resample = config.get("resample", Image.Resampling.BICUBIC.value)
        if resample not in list(Image.Resampling):
            raise numbers.refused_number("resample", resample, "one of Pillow's filters, 0 to 5")
        return cls(
            shorter=side,
            crop=side,
            mean=numbers.colour_numbers(config, "image_mean", (0.5,) * 3, positive=False),
            std=numbers.colour_numbers(config, "image_std", (0.5,) * 3, positive=True),
            resample=Image.Resampling(resample).value,
        )

    def __call__(self, image: Image.Image) -> Tensor:
        return _pixels(_rgb(image).resize((self.shorter, self.shorter), Image.Resampling(self.resample)))

    def window(self, width: int, height: int) -> Window:
        return Window(self.shorter, self.shorter, 0, 0, self.shorter)

    def resampled(self, width: int, height: int) -> Window | None:
        return super().resampled(width, height) if self.resample == Image.Resampling.BICUBIC else None


@lru_cache
def by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return 3 x 1 x 1 values, moved to a device once: in a step it would make a GPU wait."""
    with torch.inference_mode(False):
        return torch.tensor(values, device=device)[:, None, None]


def _rgb(image: Image.Image) -> Image.Image:
    return image if image.mode == "RGB" else image.convert("RGB")


def _pixels(image: Image.Image) -> Tensor:
    """Return the pixels as uint8, 3 x H x W.

    NumPy does the work: of PyTorch each thread that reads images would start a team of threads.
    """
    rows = np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3)
    return torch.from_numpy(rows.transpose(2, 0, 1).copy())


def _limit(width: int, height: int) -> int:
    """Return the longest side that is not cut."""
    return MAX_STRIP * min(width, height)


def _cut_strip(image: Image.Image) -> Image.Image:
    width, height = image.size
    limit = _limit(width, height)
    if max(width, height) <= limit:
        return image
    left, top = max(0, width - limit) // 2, max(0, height - limit) // 2
    return image.crop((left, top, width - left, height - top))
