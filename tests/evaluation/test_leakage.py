"""Gradient inversion: what a curious server reads off a client's gradient."""

import base64
import io

import numpy as np
import pytest
import torch
from helpers.small import small_method
from PIL import Image

from fedvl.evaluation import leakage
from fedvl.evaluation.leakage import IMAGE_SIDE, as_png, attack, features, features_from_keys, gradient, keys_loss, psnr
from fedvl.methods.base import Task
from fedvl.methods.cachefl import CacheFL, CacheOptions
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.seeding import torch_generator


def picture(seed: int = 0) -> torch.Tensor:
    """Smooth, as photographs are."""
    coarse = torch.rand(1, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(IMAGE_SIDE, IMAGE_SIDE), mode="bilinear")[0]


def test_the_attack_on_a_network_finds_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "STEPS", 60)
    found = attack(small_method("linear"), {}, picture(), 2)
    assert found["psnr"][-1] > found["psnr"][0] + 8
    assert found["label_found"]
    assert len(found["panels"]) == len(found["steps"]) + 1 == 5


@pytest.fixture(scope="module")
def cache() -> CacheFL:
    encoder = load_model("fedvl-tiny")
    assert isinstance(encoder, DualEncoder)
    names = ("cat", "ship", "tree", "cup")
    texts = encoder.encode_text(encoder.tokenise([f"a photo of a {name}" for name in names]))
    return CacheFL(CacheOptions(), Task(names, texts.detach(), encoder, 1))


@pytest.mark.parametrize("label", range(4))
def test_a_feature_and_its_class_are_read_off_the_keys(label: int, cache: CacheFL) -> None:
    """Every key's gradient is alpha beta exp(...) (p - y) f: a multiple of f, of another sign in the image's own class."""
    keys = cache.start(torch_generator(0, "start"))
    truth = torch.nn.functional.one_hot(torch.tensor([label]), 4).float()
    (sent,) = gradient(keys_loss(cache), keys, picture()[None], truth)
    feature = features(cache, picture()[None])[0]
    cosines = torch.cosine_similarity(sent[sent.norm(dim=1) > 1e-12], feature[None])
    torch.testing.assert_close(cosines.abs(), torch.ones_like(cosines), atol=1e-4, rtol=0)
    found = features_from_keys(cache, sent, picture(), label)
    assert found["feature_cosine"] == pytest.approx(1, abs=1e-5)
    assert found["label_from_keys"]


def test_likeness_in_decibels() -> None:
    grey = torch.full((3, 2, 2), 0.5)
    assert psnr(grey + 0.1, grey) == pytest.approx(20)  # mean square error 0.01
    assert psnr(grey + 100, grey) == pytest.approx(-10 * np.log10(0.25))  # cut off at white
    assert psnr(grey, grey) == pytest.approx(100)


def test_panels_are_pictures() -> None:
    uri = as_png(picture())
    with Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))) as image:
        assert image.size == (IMAGE_SIDE, IMAGE_SIDE)
        found = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    torch.testing.assert_close(found, picture(), atol=1 / 255, rtol=0)
