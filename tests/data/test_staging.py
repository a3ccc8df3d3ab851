"""Images on their way to a device: their pixels are Pillow's, whoever decodes and resizes them."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedvl.data import staging
from fedvl.data.encoding import encode_images, encode_rows
from fedvl.data.images import BadImage, decode
from fedvl.data.staging import stage_batches, start_decoders
from fedvl.models import resampling
from fedvl.models.checkpoint import load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return load_model("fedvl-tiny")


def picture(seed: int, width: int, height: int) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


class Images:
    """Files, contents of files, images that are not files, and a row that cannot be read."""

    def __init__(self, folder: Path) -> None:
        turned = Image.Exif()
        turned[0x0112] = 6
        clear = picture(1, 90, 70).convert("RGBA")
        clear.putalpha(128)
        content = io.BytesIO()
        picture(2, 80, 80).save(content, "WEBP")
        for name, image, options in (
            ("photo.jpg", picture(3, 500, 375), {"quality": 90}),
            ("same-size.jpg", picture(4, 500, 375), {"quality": 75}),
            ("clear.png", clear, {}),
            ("turned.jpg", picture(5, 120, 60), {"exif": turned}),
            ("grey.jpg", picture(6, 64, 64).convert("L"), {}),
            ("tall.png", picture(7, 60, 200), {}),
            ("strip.png", picture(8, 3, 200), {}),
            ("large.jpg", picture(9, 1300, 900), {}),
        ):
            image.save(folder / name, **options)
        (folder / "cut.jpg").write_bytes((folder / "photo.jpg").read_bytes()[:900])
        (folder / "no-image.jpg").write_text("no image")
        names = sorted(folder.iterdir())
        self.sources: list = [*names, folder / "missing.jpg", content.getvalue(), b"", None, BadImage("damaged part.")]

    def source(self, index):
        if isinstance(self.sources[index], BadImage):
            raise self.sources[index]
        return self.sources[index]

    def read(self, index):
        source = self.source(index)
        return picture(10, 40, 30) if source is None else decode(source)


def saved(folder, sizes):
    names = []
    for number, size in enumerate(sizes):
        picture(number, *size).save(name := folder / f"{number}.png")
        names.append(name)
    images = Images.__new__(Images)
    images.sources = names
    return images, names


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return Images(tmp_path_factory.mktemp("images"))


def expected_of(images, tiny):
    pixels, failed = {}, {}
    for index in range(len(images.sources)):
        try:
            pixels[index] = tiny.preprocess(images.read(index))
        except BadImage as error:
            failed[index] = error.reason
    return pixels, failed


@pytest.mark.parametrize(("processes", "often"), [(False, 0), (True, 0), (True, staging.OFTEN)])
def test_staged_images_have_the_bits_of_preprocessing_and_their_order(images, tiny, monkeypatch, processes, often):
    monkeypatch.setattr(staging, "OFTEN", often)
    monkeypatch.setattr(staging, "WORTH_PROCESSES", 1 if processes else 10**9)
    monkeypatch.setattr(staging, "DECODING_PROCESSES", 2)
    wanted = list(range(len(images.sources)))
    pixels, failed = expected_of(images, tiny)
    assert len(failed) == 5
    with start_decoders(images, len(wanted), 4) as some:
        assert (some is not None) == processes
        batches = list(stage_batches(images, wanted, tiny, CPU, 4, some))
    assert [index for batch in batches for index in batch.images] == sorted(pixels)
    assert dict(entry for batch in batches for entry in batch.failed) == failed
    for batch in batches:
        staged = batch.arrived()
        if staged is None:
            assert not batch.images
            continue
        assert staged.shape == (4, 3, 64, 64)
        assert torch.equal(staged[: len(batch.images)], torch.stack([pixels[index] for index in batch.images]))
        assert not staged[len(batch.images) :].any()


def test_features_do_not_depend_on_who_resizes(images, tiny, monkeypatch):
    """The path of a GPU, on a processor."""
    monkeypatch.setattr(staging, "OFTEN", 0)
    pixels, failed = expected_of(images, tiny)
    monkeypatch.setattr("fedvl.data.encoding.BATCHES", {("cpu", "float32"): 8})
    found = list(encode_rows(images, range(len(images.sources)), tiny, "features"))
    assert [index for batch in found for index in batch.images] == sorted(pixels)
    assert dict(entry for batch in found for entry in batch.failed) == failed
    assert torch.equal(
        torch.cat([batch.rows for batch in found]), encode_images(tiny, "features", list(pixels.values()))
    )


def test_many_images_of_one_size_are_resized_in_several_products(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(staging, "RESIZED_AT_ONCE", 3 * 80 * 60 * 2)
    monkeypatch.setattr(staging, "OFTEN", 0)
    images, names = saved(tmp_path, [(80, 60)] * 5)
    (batch,) = stage_batches(images, range(5), tiny, CPU, 8)
    assert batch.pixels is not None
    assert torch.equal(batch.pixels[:5], torch.stack([tiny.preprocess(Image.open(name)) for name in names]))


@pytest.mark.parametrize("processes", [False, True])
def test_matrices_are_made_for_few_sizes_and_only_for_common_ones(tiny, monkeypatch, tmp_path, processes):
    monkeypatch.setattr(staging, "WORTH_PROCESSES", 1 if processes else 10**9)
    monkeypatch.setattr(staging, "DECODING_PROCESSES", 2)
    monkeypatch.setattr(staging, "MAX_COMMON", 2)
    often = staging.OFTEN
    rare = [(70 + number, 101 + number) for number in range(20)]
    sizes = [
        *rare,
        *[(90, 60)] * often,
        *[(80, 65)] * (often + 1),
        *[(60, 91)] * (often + 2),
        *[(72, 99)] * (often + 3),
    ]
    images, names = saved(tmp_path, sizes)
    resampling._weights.cache_clear()
    with start_decoders(images, len(sizes), 16) as some:
        batches = list(stage_batches(images, range(len(sizes)), tiny, CPU, 16, some))
    assert resampling._weights.cache_info().misses == 4  # of (80, 65) and (60, 91), each in two directions
    found = torch.cat([batch.pixels[: len(batch.images)] for batch in batches if batch.pixels is not None])
    assert torch.equal(found, torch.stack([tiny.preprocess(Image.open(name)) for name in names]))


def test_matrices_of_all_common_sizes_are_kept():
    assert 2 * staging.MAX_COMMON <= resampling.KEPT
