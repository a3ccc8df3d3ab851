"""Encoding in batches of one size: the bits of an image's row are those of the image alone."""

import numpy as np
import pytest
import torch

from fedvl.data import encoding
from fedvl.data.encoding import encode_images, encode_rows
from fedvl.data.sources import open_dataset
from fedvl.models.checkpoint import load_model
from fedvl.tensors import on_threads


@pytest.fixture(scope="module")
def tiny():
    return load_model("fedvl-tiny")


@pytest.fixture(scope="module")
def images(tiny):
    split = open_dataset("cifar10-mini").splits["test"]
    return [tiny.preprocess(split.read(index)) for index in range(20)]


@pytest.mark.parametrize("kind", ["features", "patches"])
def test_a_row_does_not_depend_on_what_is_beside_it_nor_on_threads(tiny, images, kind):
    whole = encode_images(tiny, kind, images)
    order = np.random.default_rng(0).permutation(20)
    with on_threads(3):
        assert torch.equal(encode_images(tiny, kind, [images[place] for place in order]), whole[order])
    for place in (0, 7, 19):
        assert torch.equal(encode_images(tiny, kind, images[place : place + 1])[0], whole[place])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["features", "patches"])
def test_a_row_of_a_gpu_does_not_depend_on_what_is_beside_it_and_is_near_that_of_a_processor(tiny, images, kind):
    encoder = load_model("fedvl-tiny", "cuda")
    whole = encode_images(encoder, kind, images)
    order = np.random.default_rng(0).permutation(20)
    assert torch.equal(encode_images(encoder, kind, [images[place] for place in order]), whole[order])
    for place in (0, 7, 19):
        assert torch.equal(encode_images(encoder, kind, images[place : place + 1])[0], whole[place])
    several = [
        images[place % 20] for place in range(encoding.BATCHES["cuda", "float32"] + 5)
    ]  # a batch and a part of one
    assert torch.equal(encode_images(encoder, kind, several), whole[torch.arange(len(several)) % 20])
    near = encode_images(tiny, kind, images).float()
    # convolutions in TF32 move some numbers of a patch by more than 2 %, and no row
    assert bool(((whole - near).norm(dim=-1) < 0.02 * near.norm(dim=-1)).all())


def test_every_batch_has_one_size_and_a_processor_computes_it_on_one_thread(tiny, images, monkeypatch):
    sizes, threads = [], []

    def listening(pixels):
        sizes.append(len(pixels))
        threads.append(torch.get_num_threads())
        return pixels.mean((2, 3))

    monkeypatch.setattr(tiny, "encode_image", listening)
    with on_threads(2):
        assert len(encode_images(tiny, "features", images[:11])) == 11
        assert torch.get_num_threads() == 2
    assert sizes == [encoding.BATCH] * 2
    assert threads == [1, 1]


def test_no_images_make_no_rows(tiny):
    assert len(encode_images(tiny, "features", [])) == 0
    assert list(encode_rows(open_dataset("cifar10-mini").splits["test"], [], tiny, "features")) == []
