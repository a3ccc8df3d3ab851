"""Weights of other formats: renamed, so that small models compute what their own libraries compute, and read for their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.lazy import lazily
from helpers.models import add_tokenizer, draw, random_model, unit

from fedvl.errors import FedVLError
from fedvl.models.biomedclip import PlainShape
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import ViTShape
from fedvl.models.convert import (
    bert_clip_from_open_clip,
    bert_clip_shape,
    clip_from_hugging_face,
    clip_from_open_clip,
    clip_shape,
    clip_to_hugging_face,
    siglip_from_hugging_face,
    siglip_shape,
    vilt_from_hugging_face,
    vilt_shape,
)
from fedvl.models.resnet import ResNetShape
from fedvl.models.siglip import PooledShape
from fedvl.models.transformer import StackShape

transformers = lazily("transformers")

TEXT = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_hidden_layers": 3}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
VISION |= {"patch_size": 8, "image_size": 24}
WORDS = {"vocab_size": 8200, "max_position_embeddings": 20}


@pytest.fixture(scope="module")
def clip() -> Any:
    config = transformers.CLIPConfig(
        text_config={**TEXT, **WORDS, "eos_token_id": 2}, vision_config=VISION, projection_dim=12
    )
    return random_model(transformers.CLIPModel, config)


def test_a_small_clip_computes_what_transformers_does(clip: Any, tmp_path: Any) -> None:
    clip.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    ours: Any = load_model(str(tmp_path))
    pixels, tokens = draw(2, 3, 24, 24), ours.tokenise(["a dog", "two cars"])
    with torch.no_grad():
        image = clip.get_image_features(pixel_values=pixels).pooler_output
        text = clip.get_text_features(input_ids=tokens).pooler_output
        torch.testing.assert_close(unit(ours.encode_image(pixels)), unit(image), rtol=0, atol=1e-5)
        torch.testing.assert_close(unit(ours.encode_text(tokens)), unit(text), rtol=0, atol=1e-5)
    assert (unit(text)[0] - unit(text)[1]).abs().max() > 1e-3


def test_our_names_become_those_of_transformers_again(clip: Any) -> None:
    source = clip.state_dict()
    there = clip_to_hugging_face(clip_from_hugging_face(source))
    assert set(source) - set(there) <= {name for name in source if name.endswith("position_ids")}
    assert all(torch.equal(there[name], source[name]) for name in there)
    assert all(tensor.is_contiguous() for tensor in there.values())


def test_sizes_of_a_clip_are_read_from_its_tensors(clip: Any) -> None:
    tensors = clip_from_hugging_face(clip.state_dict())
    shape = clip_shape(tensors, VISION, {**TEXT, "hidden_act": "gelu", "layer_norm_eps": 1e-6})
    assert shape.vision == ViTShape(StackShape(32, 2, 2, 48, "quick_gelu", 1e-5), 8, 3)
    assert shape.text == StackShape(24, 3, 3, 40, "gelu", 1e-6)
    assert (shape.dim, shape.vocabulary, shape.context_length) == (12, 8200, 20)


@pytest.mark.parametrize("width, heads", [(768, 12), (1280, 16), (1408, 16), (1664, 16)])
def test_heads_of_open_clips_image_towers_follow_from_the_width(width: int, heads: int) -> None:
    """ViT-H, ViT-g and ViT-bigG have heads of 80, 88 and 104, all others of 64."""
    shape = clip_shape(towers(width), {}, {})
    assert isinstance(shape.vision, ViTShape)
    assert shape.vision.stack.heads == heads


def towers(width: int, text: int = 64) -> dict[str, torch.Tensor]:
    """The tensors of a CLIP from which sizes are read: 16 patches, one layer each."""
    return {
        "token_embedding.weight": torch.zeros(10, text),
        "positional_embedding": torch.zeros(7, text),
        "text_projection": torch.zeros(text, 5),
        "visual.class_embedding": torch.zeros(width),
        "visual.conv1.weight": torch.zeros(width, 3, 2, 2),
        "visual.positional_embedding": torch.zeros(17, width),
        "visual.transformer.resblocks.0.mlp.c_fc.weight": torch.zeros(3, width),
        "transformer.resblocks.0.mlp.c_fc.weight": torch.zeros(6, text),
    }


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(FedVLError, match="uses the activation relu, which FedVL does not support"):
        clip_shape(towers(64), {"hidden_act": "relu"}, {})


def test_a_resnet_has_the_blocks_of_its_four_stages() -> None:
    tensors = {name: tensor for name, tensor in towers(64).items() if not name.startswith("visual.")}
    for stage, blocks in enumerate((1, 2, 4, 3), 1):
        tensors |= {f"visual.layer{stage}.{block}.conv1.weight": torch.zeros(16, 1) for block in range(blocks)}
    tensors["visual.attnpool.positional_embedding"] = torch.zeros(50, 8)
    assert clip_shape(tensors, {}, {}).vision == ResNetShape(width=16, blocks=(1, 2, 4, 3), grid=7)


def test_open_clips_files_have_our_names_but_for_what_is_no_weight() -> None:
    source = {
        "logit_scale": torch.tensor([4.0]),
        "visual.conv1.weight": torch.ones(1),
        "visual.bn1.num_batches_tracked": torch.ones(1),
        "text.token_embedding.weight": torch.full((1,), 2.0),
        "text.attn_mask": torch.ones(1),
        "context_length": torch.ones(1),
    }
    found = clip_from_open_clip(source)
    assert {name: tensor.item() for name, tensor in found.items()} == {
        "visual.conv1.weight": 1.0,
        "token_embedding.weight": 2.0,
        "log_scale": 4.0,
    }
    assert found["log_scale"].shape == ()
    with pytest.raises(FedVLError, match="has a timm image tower"):
        clip_from_open_clip({"visual.trunk.norm.weight": torch.ones(1)})


@pytest.fixture(scope="module")
def siglip() -> Any:
    config = transformers.SiglipConfig(text_config={**TEXT, **WORDS, "projection_size": 32}, vision_config=VISION)
    return random_model(transformers.SiglipModel, config)


def test_the_tensors_of_a_siglip_and_its_sizes(siglip: Any) -> None:
    source = siglip.state_dict()
    found = siglip_from_hugging_face(source)
    assert torch.equal(found["visual.head.probe"], source["vision_model.head.probe"][0, 0])
    assert found["log_scale"].shape == found["logit_bias"].shape == ()
    assert found["logit_bias"] == source["logit_bias"]
    assert torch.equal(found["visual.head.attn.in_proj_weight"], source["vision_model.head.attention.in_proj_weight"])
    second = "text_model.encoder.layers.1.self_attn."
    joined = torch.cat([source[f"{second}{each}_proj.bias"] for each in "qkv"])
    assert torch.equal(found["transformer.resblocks.1.attn.in_proj_bias"], joined)
    shape = siglip_shape(found, VISION, TEXT)
    assert shape.vision == PooledShape(StackShape(32, 2, 2, 48, "gelu_pytorch_tanh", 1e-6), 8, 3)
    assert shape.text == StackShape(24, 3, 3, 40, "gelu_pytorch_tanh", 1e-6)
    assert (shape.dim, shape.vocabulary, shape.context_length) == (32, 8200, 20)
    unstated = siglip_shape(found, {"num_attention_heads": 4}, {})
    assert isinstance(unstated.vision, PooledShape)
    assert (unstated.vision.stack.heads, unstated.text.heads) == (4, 12)


def test_a_vilt_or_a_task_model_around_it() -> None:
    config = transformers.ViltConfig(**{**VISION, "vocab_size": 30, "max_position_embeddings": 9})
    source = random_model(transformers.ViltModel, config).state_dict()
    found = vilt_from_hugging_face(source)
    around = {f"vilt.{name}": tensor for name, tensor in source.items()} | {"classifier.weight": torch.zeros(1)}
    again = vilt_from_hugging_face(around)
    assert found.keys() == again.keys()
    assert all(torch.equal(found[name], again[name]) for name in found)
    types = source["embeddings.text_embeddings.token_type_embeddings.weight"]
    assert torch.equal(found["text_type"], types[0])
    assert torch.equal(found["modalities"], source["embeddings.token_type_embeddings.weight"][:2])
    assert torch.equal(found["class_embedding"], source["embeddings.cls_token"][0, 0])
    first = "encoder.layer.0.attention.attention."
    joined = torch.cat([source[f"{first}{each}.weight"] for each in ("query", "key", "value")])
    assert torch.equal(found["transformer.resblocks.0.attn.in_proj_weight"], joined)
    shape = vilt_shape(found, VISION)
    assert shape.stack == StackShape(32, 2, 2, 48, "gelu", 1e-12)
    assert (shape.patch, shape.grid, shape.vocabulary, shape.context_length) == (8, 3, 30, 9)


def biomedclip(layers: int = 1) -> dict[str, torch.Tensor]:
    """Every tensor of a BiomedCLIP of width 4 and 6, with values of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        "logit_scale": (1,),
        "text.transformer.embeddings.word_embeddings.weight": (11, 4),
        "text.transformer.embeddings.position_embeddings.weight": (9, 4),
        "text.transformer.embeddings.token_type_embeddings.weight": (2, 4),
        "text.proj.0.weight": (5, 4),
        "text.proj.2.weight": (3, 5),
        "visual.trunk.cls_token": (1, 1, 6),
        "visual.trunk.pos_embed": (1, 17, 6),
        "visual.head.proj.weight": (3, 6),
        "visual.trunk.patch_embed.proj.weight": (6, 3, 2, 2),
        "visual.trunk.patch_embed.proj.bias": (6,),
    }
    norms = {"text.transformer.embeddings.LayerNorm": 4, "visual.trunk.norm": 6}
    linears: dict[str, tuple[int, int]] = {}
    for layer in range(layers):
        bert, vit = f"text.transformer.encoder.layer.{layer}.", f"visual.trunk.blocks.{layer}."
        norms |= {f"{bert}attention.output.LayerNorm": 4, f"{bert}output.LayerNorm": 4}
        norms |= {f"{vit}norm1": 6, f"{vit}norm2": 6}
        linears |= {f"{bert}attention.self.{each}": (4, 4) for each in ("query", "key", "value")}
        linears |= {f"{bert}attention.output.dense": (4, 4), f"{bert}intermediate.dense": (8, 4)}
        linears |= {f"{bert}output.dense": (4, 8), f"{vit}attn.qkv": (18, 6), f"{vit}attn.proj": (6, 6)}
        linears |= {f"{vit}mlp.fc1": (7, 6), f"{vit}mlp.fc2": (6, 7)}
    shapes |= {f"{name}.{kind}": (size,) for name, size in norms.items() for kind in ("weight", "bias")}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    return {name: draw(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def test_the_tensors_of_a_biomedclip_and_its_sizes() -> None:
    source = biomedclip(2)
    found = bert_clip_from_open_clip(source, 7)
    text = "text.transformer.embeddings."
    assert found["log_scale"] == source["logit_scale"][0]
    positions = source[f"{text}position_embeddings.weight"][:7] + source[f"{text}token_type_embeddings.weight"][0]
    assert torch.equal(found["positional_embedding"], positions)
    assert torch.equal(found["text_hidden"], source["text.proj.0.weight"].T)
    assert torch.equal(found["text_projection"], source["text.proj.2.weight"].T)
    assert torch.equal(found["visual.proj"], source["visual.head.proj.weight"].T)
    assert torch.equal(found["visual.positional_embedding"], source["visual.trunk.pos_embed"][0])
    for part, theirs in {
        "transformer.resblocks.1.ln_1.weight": "text.transformer.encoder.layer.1.attention.output.LayerNorm.weight",
        "transformer.resblocks.1.mlp.c_proj.bias": "text.transformer.encoder.layer.1.output.dense.bias",
        "visual.transformer.resblocks.1.attn.in_proj_weight": "visual.trunk.blocks.1.attn.qkv.weight",
        "visual.transformer.resblocks.0.ln_2.bias": "visual.trunk.blocks.0.norm2.bias",
        "visual.ln_post.weight": "visual.trunk.norm.weight",
        "ln_embedded.bias": f"{text}LayerNorm.bias",
    }.items():
        assert torch.equal(found[part], source[theirs]), part
    first = "text.transformer.encoder.layer.0.attention.self."
    joined = torch.cat([source[f"{first}{each}.weight"] for each in ("query", "key", "value")])
    assert torch.equal(found["transformer.resblocks.0.attn.in_proj_weight"], joined)
    shape = bert_clip_shape(found)
    assert shape.vision == PlainShape(StackShape(6, 2, 1, 7, "gelu", 1e-6), 2, 4)
    assert shape.text == StackShape(4, 2, 1, 8, "gelu", 1e-12)
    assert (shape.dim, shape.vocabulary, shape.context_length, shape.hidden) == (3, 11, 7, 5)


@pytest.mark.parametrize("name", ["visual.trunk.blocks.0.ls1.gamma", "visual.trunk.fc_norm.weight"])
def test_an_image_tower_with_more_than_a_plain_vit_is_refused(name: str) -> None:
    with pytest.raises(FedVLError, match="not a plain ViT"):
        bert_clip_from_open_clip({**biomedclip(), name: torch.ones(6)}, 7)
