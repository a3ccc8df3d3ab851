"""Our images against those of transformers' own CLIP and ViLT processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.lazy import lazily
from PIL import Image

from fedvl.models.preprocessing import Preprocessing

clip = lazily("transformers.models.clip.image_processing_pil_clip")
vilt = lazily("transformers.models.vilt.image_processing_pil_vilt")

SIZES = [(64, 64), (500, 375), (375, 501), (31, 47), (640, 97), (224, 225), (3, 2)]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width * 1000 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [64, 224])
def test_clip_images_equal_transformers(size: tuple[int, int], side: int) -> None:
    ours = Preprocessing(side, side)
    oracle = clip.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    image = picture(*size)
    expected = oracle(image, return_tensors="pt")["pixel_values"]
    pixels = ours(image)
    assert pixels.dtype == torch.uint8
    torch.testing.assert_close(ours.normalise(pixels[None]), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_other_kinds_of_image_equal_transformers(mode: str) -> None:
    image = picture(90, 70, "L" if mode == "LA" else "RGB").convert(mode)
    expected = clip.CLIPImageProcessorPil()(image, return_tensors="pt")["pixel_values"][0]
    ours = Preprocessing(224, 224)
    torch.testing.assert_close(ours.normalise(ours(image)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_vilt_images_equal_transformers(size: tuple[int, int]) -> None:
    ours = Preprocessing.from_config({}, 384, crop=False)
    image = picture(*size)
    expected = vilt.ViltImageProcessorPil()(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(ours.normalise(ours(image)), expected, rtol=0, atol=1e-6)


def test_both_generations_of_configuration_are_read() -> None:
    old = Preprocessing.from_config({"size": 70, "crop_size": 64, "image_mean": [0.1, 0.2, 0.3]}, 32, crop=True)
    new = Preprocessing.from_config(
        {"size": {"shortest_edge": 70}, "crop_size": {"height": 64, "width": 64}}, 32, crop=True
    )
    assert (old.shorter, old.crop, old.mean) == (70, 64, (0.1, 0.2, 0.3))
    assert (new.shorter, new.crop) == (70, 64)
    assert Preprocessing.from_config({}, 32, crop=True) == Preprocessing(32, 32)


def test_float_pixels_are_taken_as_zero_to_one() -> None:
    ours = Preprocessing(64, 64)
    pixels = ours(picture(64, 64))
    torch.testing.assert_close(ours.normalise(pixels.float() / 255), ours.normalise(pixels))


def test_a_long_strip_is_cut_to_its_middle_before_it_is_enlarged() -> None:
    values = np.zeros((1, 20_001, 3), dtype=np.uint8)
    values[0, 10_000] = 255
    image = Image.fromarray(values)
    for tall in (False, True):
        pixels = Preprocessing(64, 64)(image.rotate(90, expand=True) if tall else image)
        assert pixels.shape == (3, 64, 64)
        assert pixels.max() == 255
    assert Preprocessing(384, 0)(image).shape == (3, 32, 608)
