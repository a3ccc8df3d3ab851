"""Resizing in PyTorch against Pillow's own, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from fedvl.models.preprocessing import Preprocessing, Squashing
from fedvl.models.resampling import Window, columns_first, resample

sides = st.integers(1, 300)


def pixels_of(width, height, seed, harsh):
    """Return noise; black and white make sums leave 0..255 on both sides."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(noise > 127, 255, 0).astype(np.uint8) if harsh else noise


@settings(max_examples=60, deadline=None)
@given(sides, sides, sides, sides, st.integers(0, 9), st.booleans())
def test_any_resize_has_the_bits_of_pillow(width, height, new_width, new_height, seed, harsh):
    image = pixels_of(width, height, seed, harsh)
    side = min(new_width, new_height)
    window = Window(new_width, new_height, (new_width - side) // 2, (new_height - side) // 3, side)
    if not columns_first(width, height, window):
        return
    resized = Image.fromarray(image).resize((new_width, new_height), Image.Resampling.BICUBIC)
    expected = np.asarray(resized)[window.top : window.top + side, window.left : window.left + side]
    assert np.array_equal(resample(torch.from_numpy(image)[None], window)[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (333, 500), (640, 97), (32, 32), (130, 150), (3, 2), (1, 1)])
@pytest.mark.parametrize("ours", [Preprocessing(224, 224), Preprocessing(70, 64), Squashing(96, 96)])
def test_inputs_of_encoders_have_the_bits_of_their_preprocessing(size, ours):
    images = np.stack([pixels_of(size[0], size[1], seed, harsh) for seed, harsh in ((0, False), (1, True))])
    window = ours.resampled(*size)
    assert window is not None
    assert torch.equal(
        resample(torch.from_numpy(images), window), torch.stack([ours(Image.fromarray(each)) for each in images])
    )


def test_an_image_does_not_depend_on_the_batch_it_is_in():
    images = torch.from_numpy(np.stack([pixels_of(90, 70, seed, False) for seed in range(5)]))
    window = Preprocessing(64, 64).resampled(90, 70)
    assert window is not None
    whole = resample(images, window)
    assert torch.equal(resample(images[3:4], window)[0], whole[3])


def test_what_pillow_alone_makes_has_no_window():
    ours = Preprocessing(224, 224)
    assert ours.resampled(100, 3300) is None  # a strip is cut first
    assert ours.resampled(300, 700) is None  # 700 - 522 > 2 (300 - 224): Pillow 13 shortens columns first
    assert ours.resampled(700, 300) is not None
    assert Preprocessing(384, 0).resampled(500, 375) is None  # no crop: inputs of several shapes
    assert Preprocessing(60, 64).resampled(500, 375) is None  # the crop is larger than the image
    assert Squashing(96, 96, resample=Image.Resampling.BILINEAR.value).resampled(500, 375) is None


def test_rows_are_first_only_for_images_that_lose_twice_as_much_height():
    square = Window(50, 50, 0, 0, 50)
    assert columns_first(100, 150, square)  # loses 50 and 100
    assert not columns_first(100, 151, square)
    assert columns_first(20, 40, square)
    assert not columns_first(40, 51, square)


def test_resizing_shows_what_it_should():
    image = Image.new("RGB", (200, 100), "white")
    ImageDraw.Draw(image).rectangle((100, 0, 199, 99), fill=(255, 0, 0))
    made = resample(torch.from_numpy(np.asarray(image).copy())[None], Window(20, 10, 5, 0, 10))[0]
    assert made.shape == (3, 10, 10)
    assert made[:, 5, 0].tolist() == [255, 255, 255]
    assert made[:, 5, 9].tolist() == [255, 0, 0]
