"""What a method is handed before the first round."""

import numpy as np
import torch
from helpers.runs import prepare
from PIL import Image

from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder


def test_patches_are_those_of_the_encoder_in_16_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    drawn = np.random.default_rng(0).integers(0, 256, (8, 40, 40, 3), dtype=np.uint8)
    for number, pixels in enumerate(drawn):
        folder = tmp_path / "images" / ("train", "test")[number // 4] / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    dataset = str(tmp_path / "images")
    prepared = prepare(
        {"method": {"name": "fedotp"}, "device": "cpu", "data": {"dataset": dataset, "clients": 2, "partition": "iid"}}
    )
    encoder = load_model("fedvl-tiny")
    assert isinstance(encoder, DualEncoder)
    order = [0, 2, 1, 3]  # class by class
    for samples, images in ((prepared.training.samples, drawn[:4]), (prepared.test.samples, drawn[4:])):
        pixels = torch.stack([encoder.preprocess(Image.fromarray(images[number])) for number in order])
        with torch.inference_mode():
            expected = encoder.encode_patches(encoder.normalise(pixels))[1]
        assert samples.labels.tolist() == [0, 0, 1, 1]
        found = samples.inputs["patches"]
        assert found.shape == (4, 64, encoder.dim)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-3)
