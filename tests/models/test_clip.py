"""The dual encoder: against transformers, on random weights with the real configurations, through our loader.

Prompts are arguments: gradients reach them, clients can be batched over them, and they mean what words mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lazy import lazily
from helpers.models import (
    TEXTS,
    add_tokenizer,
    assert_batched_equals_loop,
    draw,
    full_copy,
    random_model,
    unit,
)
from safetensors.torch import save_file
from torch.func import vmap

from fedvl.errors import FedVLError
from fedvl.models.checkpoint import EMBEDDED_FOLDER, load_model
from fedvl.models.clip import Clip, ClipShape, DualEncoder, ViTShape
from fedvl.models.convert import clip_from_hugging_face
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.resnet import ResNetShape
from fedvl.models.tokenizer import load_tokenizer
from fedvl.models.transformer import StackShape

transformers = lazily("transformers")

LARGE_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
LARGE_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,  # of 24: a quarter of the time, and every kind of weight
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 336,
}


def assert_same_clip(reference: Any, folder: Path, images: int) -> None:
    ours = load_model(str(folder))
    assert isinstance(ours, DualEncoder)
    size = ours.image_size
    pixels = torch.randn(images, 3, size, size, generator=torch.Generator().manual_seed(1))
    tokens = ours.tokenise(TEXTS)
    with torch.no_grad():
        seen = reference.get_image_features(pixel_values=pixels)
        image = unit(seen.pooler_output)
        text = unit(reference.get_text_features(input_ids=tokens).pooler_output)
        torch.testing.assert_close(unit(ours.encode_image(pixels)), image, rtol=0, atol=1e-5)
        torch.testing.assert_close(unit(ours.encode_text(tokens)), text, rtol=0, atol=1e-5)
        patches = reference.vision_model.post_layernorm(seen.last_hidden_state[:, 1:])
        expected = reference.visual_projection(patches)
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
    config = transformers.CLIPConfig(
        text_config={**text, "eos_token_id": 2}, vision_config=vision, projection_dim=projection
    )
    reference = random_model(transformers.CLIPModel, config)
    reference.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    assert_same_clip(reference, tmp_path, images=1)


# open_clip's largest ViTs, with two layers of each tower: vision and text of its model_configs, and their hidden widths.
LARGEST: dict[str, Any] = {
    "ViT-H-14": ({"width": 1280, "head_width": 80}, 5120, {"width": 1024, "heads": 16}, 4096),
    "ViT-bigG-14": ({"width": 1664, "head_width": 104, "mlp_ratio": 4.9231}, 8192, {"width": 1280, "heads": 20}, 5120),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_open_clip_models_equal_transformers(tmp_path: Path, name: str) -> None:
    image, image_hidden, words, hidden = LARGEST[name]
    two = {"num_hidden_layers": 2, "hidden_act": "gelu"}
    config = transformers.CLIPConfig(
        text_config={
            **two,
            "hidden_size": words["width"],
            "intermediate_size": hidden,
            "num_attention_heads": words["heads"],
            "vocab_size": 8200,
            "eos_token_id": 2,
        },
        vision_config={
            **two,
            "hidden_size": image["width"],
            "intermediate_size": image_hidden,
            "num_attention_heads": 16,
            "patch_size": 14,
            "image_size": 224,
        },
        projection_dim=words["width"],
    )
    reference = random_model(transformers.CLIPModel, config)
    tensors = clip_from_hugging_face(reference.state_dict())  # which has OpenAI's names, as open_clip's files
    tensors["logit_scale"] = tensors.pop("log_scale")
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    towers = {"vision_cfg": {"layers": 2, "patch_size": 14, **image}, "text_cfg": {"layers": 2, **words}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": {"embed_dim": words["width"], **towers}}))
    add_tokenizer(tmp_path)
    assert_same_clip(reference, tmp_path, images=1)


def test_fedvl_tiny_equals_transformers(tmp_path: Path) -> None:
    folder = full_copy("fedvl-tiny", tmp_path)
    reference = transformers.CLIPModel.from_pretrained(folder, local_files_only=True).eval()
    assert_same_clip(reference, folder, images=3)
    embedded, full = load_model("fedvl-tiny"), load_model(str(folder))
    assert embedded.fingerprint == full.fingerprint


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
        model = Clip("x", ClipShape(dim, vision, text, 49408, 77), Preprocessing(224, 224), tokenizer)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


CLIENTS = 3


@pytest.fixture(scope="module")
def clip() -> DualEncoder:
    model = load_model("fedvl-tiny")
    assert isinstance(model, DualEncoder)
    return model


def test_gradients_reach_every_visual_prompt_and_clients_batch(clip: DualEncoder) -> None:
    pixels, target = draw(2, 3, 64, 64), draw(2, clip.dim, seed=1)
    prompts = 0.02 * draw(CLIENTS, clip.vision_layers, 2, clip.vision_width, seed=2)
    gradients = assert_batched_equals_loop(lambda p: (unit(clip.encode_image(pixels, p)) * target).sum(), prompts)
    assert (gradients.abs().amax(-1) > 0).all()
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in clip.parameters())


def test_clients_batch_over_images_too(clip: DualEncoder) -> None:
    pixels, prompts = draw(CLIENTS, 2, 3, 64, 64), 0.02 * draw(CLIENTS, 3, 2, clip.vision_width, seed=2)
    batched = vmap(clip.encode_image)(pixels, prompts)
    looped = torch.stack([clip.encode_image(x, p) for x, p in zip(pixels, prompts, strict=True)])
    torch.testing.assert_close(batched, looped, rtol=0, atol=1e-5)


def test_gradients_reach_the_text_context_and_clients_batch(clip: DualEncoder) -> None:
    tokens, target = clip.tokenise(["a dog", "a red car on the road"]), draw(2, clip.dim, seed=1)
    for shape in ((CLIENTS, 4, clip.text_width), (CLIENTS, 2, 4, clip.text_width)):
        context = 0.02 * draw(*shape)
        gradients = assert_batched_equals_loop(lambda c: (unit(clip.encode_text(tokens, c)) * target).sum(), context)
        assert (gradients.abs().amax(-1) > 0).all()


def test_visual_prompts_are_the_tokens_a_layer_sees_and_no_more(clip: DualEncoder) -> None:
    """Written out with the blocks themselves: P tokens behind the patches of the first two layers, then none."""
    pixels, prompts = draw(2, 3, 64, 64), draw(2, 5, clip.vision_width, seed=1)
    visual: Any = clip.visual
    x = visual.conv1(pixels).flatten(2).transpose(1, 2)
    x = torch.cat([visual.class_embedding.expand(2, 1, -1), x], 1) + visual.positional_embedding
    x = visual.ln_pre(x)
    for layer, block in enumerate(visual.transformer.resblocks):
        behind = [prompts[layer].expand(2, -1, -1)] if layer < 2 else []
        x = block(torch.cat([x, *behind], 1))[:, :65]
    expected = visual.ln_post(x) @ visual.proj
    pooled, spatial = clip.encode_patches(pixels, prompts)
    torch.testing.assert_close(torch.cat([pooled[:, None], spatial], 1), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(clip.encode_image(pixels, prompts), pooled, rtol=0, atol=1e-5)
    assert (clip.encode_image(pixels) - pooled).abs().max() > 1e-3


def test_a_context_of_words_equals_the_words(clip: DualEncoder) -> None:
    names = ["dog", "red car"]
    words = clip.tokenise(["a photo of a"])[0, 1:-1]
    context = clip.embed_tokens(words)
    features = clip.encode_text(clip.tokenise(names), context)
    plain = clip.encode_text(clip.tokenise([f"a photo of a {name}" for name in names]))
    torch.testing.assert_close(features, plain, rtol=0, atol=1e-5)


def test_inference_mode_gives_the_same_features(clip: DualEncoder) -> None:
    """There the fused attention kernel is used; with a causal mask and without one."""
    tokens, pixels = clip.tokenise(["a dog", "a red car on the road"]), draw(2, 3, 64, 64)
    for encode in (lambda: clip.encode_image(pixels), lambda: clip.encode_text(tokens)):
        with torch.inference_mode():
            fused = encode()
        torch.testing.assert_close(unit(fused), unit(encode()), rtol=0, atol=1e-5)


def test_text_cut_to_the_longest_equals_text_padded_to_the_end(clip: DualEncoder) -> None:
    tokens = clip.tokenise(["a dog", "a red car on the road"])
    assert tokens.shape[1] < clip.context_length
    padded = torch.nn.functional.pad(tokens, (0, clip.context_length - tokens.shape[1]), value=int(tokens[0, -1]))
    torch.testing.assert_close(clip.encode_text(tokens), clip.encode_text(padded), rtol=0, atol=1e-5)


def test_too_long_a_context_and_too_many_layers_are_named(clip: DualEncoder) -> None:
    with pytest.raises(FedVLError, match="32 positions"):
        clip.encode_text(clip.tokenise(["dog"]), torch.zeros(30, clip.text_width))
    with pytest.raises(FedVLError, match="9 layers at most"):
        clip.encode_image(torch.zeros(1, 3, 64, 64), torch.zeros(10, 1, clip.vision_width))
