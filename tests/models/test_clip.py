"""Our encoders against transformers, on random weights with the real configurations, through our loader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.model_folders import add_tokenizer, full_copy, random_weights, unit
from PIL import Image
from transformers import CLIPConfig, CLIPModel, ViltConfig, ViltModel
from transformers.models.vilt.image_processing_pil_vilt import ViltImageProcessorPil

from fedvl.models.checkpoint import EMBEDDED_FOLDER, load_model
from fedvl.models.clip import ClipShape, DualEncoder, ViTShape
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.resnet import ResNetShape
from fedvl.models.tokenizer import load_tokenizer
from fedvl.models.transformer import StackShape
from fedvl.models.vilt import FusedEncoder

TEXTS = ["a photo of a dog", "two red cars, parked in front of the house", "deer"]
LARGE_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
LARGE_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 336,
}
VILT_VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] a photo of dog two red car ##s , parked in front the house deer"


def random_model(kind: type, config: object) -> torch.nn.Module:
    with torch.device("meta"):
        model = kind(config)
    model.to_empty(device="cpu")
    model.load_state_dict(random_weights(model, spread=0.02))
    for name, buffer in model.named_buffers():
        if name.endswith("_ids"):  # position numbers, which are not saved
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer) if "position" in name else 0)
    return model.eval()


def assert_same_clip(reference: torch.nn.Module, folder: Path, images: int) -> None:
    ours = load_model(str(folder))
    assert isinstance(ours, DualEncoder)
    size = ours.image_size
    pixels = torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(1))
    tokens = ours.tokenise(TEXTS)
    with torch.no_grad():
        image = unit(reference.get_image_features(pixel_values=pixels).pooler_output)
        text = unit(reference.get_text_features(input_ids=tokens).pooler_output)
        torch.testing.assert_close(unit(ours.encode_image(pixels)), image, rtol=0, atol=1e-5)
        torch.testing.assert_close(unit(ours.encode_text(tokens)), text, rtol=0, atol=1e-5)
        patches = reference.vision_model(pixel_values=pixels).last_hidden_state[:, 1:]
        expected = reference.visual_projection(reference.vision_model.post_layernorm(patches))
        pooled, spatial = ours.encode_patches(pixels)
        torch.testing.assert_close(unit(pooled), image, rtol=0, atol=1e-5)
        torch.testing.assert_close(unit(spatial), unit(expected), rtol=0, atol=1e-5)
    assert ours.logit_scale == pytest.approx(reference.logit_scale.detach().exp().item())
    # One text must differ from another, or agreement would mean nothing.
    assert (text[0] - text[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "text, vision, projection",
    [
        pytest.param({}, {"patch_size": 32}, 512, id="ViT-B/32"),
        pytest.param({}, {"patch_size": 16}, 512, id="ViT-B/16"),
        pytest.param(LARGE_TEXT, LARGE_VISION, 768, id="ViT-L/14@336", marks=pytest.mark.slow),
    ],
)
def test_clip_equals_transformers(tmp_path: Path, text: dict, vision: dict, projection: int) -> None:
    # OpenAI's configurations say eos_token_id 2, which stands for "the largest number in the text".
    config = CLIPConfig(text_config={**text, "eos_token_id": 2}, vision_config=vision, projection_dim=projection)
    reference = random_model(CLIPModel, config)
    reference.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    assert_same_clip(reference, tmp_path, images=1)


def test_fedvl_tiny_equals_transformers(tmp_path: Path) -> None:
    folder = full_copy("fedvl-tiny", tmp_path)
    reference = CLIPModel.from_pretrained(folder, local_files_only=True).eval()
    assert_same_clip(reference, folder, images=3)
    embedded, full = load_model("fedvl-tiny"), load_model(str(folder))
    assert embedded.fingerprint == full.fingerprint


def vilt_states(reference: torch.nn.Module, ours: FusedEncoder, pixels: torch.Tensor, **extra: torch.Tensor) -> None:
    """Compare the pooled and the text's hidden states: transformers shuffles the patches, which changes neither."""
    tokens = ours.tokenise(TEXTS[: len(pixels)])
    with torch.no_grad():
        mask = ours.text_mask(tokens).long()
        theirs = reference(
            input_ids=tokens, attention_mask=mask, pixel_values=pixels, pixel_mask=extra.get("pixel_mask")
        )
        hidden, pooled = ours.encode(tokens, pixels, sizes=extra.get("sizes"))
    torch.testing.assert_close(unit(pooled), unit(theirs.pooler_output), rtol=0, atol=1e-5)
    length = tokens.shape[1]
    seen = mask.bool()
    expected = theirs.last_hidden_state[:, :length][seen]
    torch.testing.assert_close(unit(hidden[:, :length][seen]), unit(expected), rtol=0, atol=1e-5)
    assert (pooled[0] - pooled[1]).abs().max() > 1e-4


def test_vilt_equals_transformers_with_images_of_several_shapes(tmp_path: Path) -> None:
    reference = random_model(ViltModel, ViltConfig())
    reference.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text(VILT_VOCABULARY.replace(" ", "\n"))
    ViltImageProcessorPil().save_pretrained(tmp_path)
    ours = load_model(str(tmp_path))
    assert isinstance(ours, FusedEncoder)
    assert (ours.width, ours.layers, ours.image_size) == (768, 12, 384)
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((90, 60), (70, 100))]
    pixels, sizes = ours.collate([ours.preprocess(image) for image in images])
    processed = ViltImageProcessorPil()(images, return_tensors="pt")
    torch.testing.assert_close(pixels, processed["pixel_values"], rtol=0, atol=1e-6)
    vilt_states(reference, ours, pixels, sizes=sizes, pixel_mask=processed["pixel_mask"])


def test_fedvl_tiny_vilt_equals_transformers(tmp_path: Path) -> None:
    folder = full_copy("fedvl-tiny-vilt", tmp_path)
    reference = ViltModel.from_pretrained(folder, local_files_only=True).eval()
    ours = load_model("fedvl-tiny-vilt")
    assert isinstance(ours, FusedEncoder)
    vilt_states(reference, ours, torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0)))


TEXT = StackShape(512, 12, 8, 2048)
BASE = StackShape(768, 12, 12, 3072)
LARGE = StackShape(1024, 24, 16, 4096)


@pytest.mark.parametrize(
    "dim, vision, text, parameters",
    [
        pytest.param(1024, ResNetShape(64, (3, 4, 6, 3), 7), TEXT, 102_007_137, id="RN50"),
        pytest.param(512, ViTShape(BASE, 32, 7), TEXT, 151_277_313, id="ViT-B/32"),
        pytest.param(512, ViTShape(BASE, 16, 14), TEXT, 149_620_737, id="ViT-B/16"),
        pytest.param(768, ViTShape(LARGE, 14, 24), StackShape(768, 12, 12, 3072), 427_944_193, id="ViT-L/14@336"),
    ],
)
def test_parameter_counts_are_those_of_the_papers(
    dim: int, vision: ViTShape, text: StackShape, parameters: int
) -> None:
    tokenizer = load_tokenizer(EMBEDDED_FOLDER, 32)
    with torch.device("meta"):
        model = DualEncoder("x", ClipShape(dim, vision, text, 49408, 77), Preprocessing(224, 224), tokenizer)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
