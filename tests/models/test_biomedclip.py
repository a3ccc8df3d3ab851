"""BiomedCLIP: its text tower against transformers' BertModel, its image tower against ViTModel, from open_clip's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.lazy import lazily
from helpers.models import TEXTS, assert_batched_equals_loop, draw, random_model, unit
from safetensors.torch import save_file
from torch.nn.functional import gelu

from fedvl.errors import FedVLError
from fedvl.methods.parts.prompts import ClassTexts
from fedvl.models.biomedclip import BertClip
from fedvl.models.checkpoint import load_model

transformers = lazily("transformers")

# The real configuration (open_clip_config.json of microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224).
CONFIG = {
    "model_cfg": {
        "embed_dim": 512,
        "vision_cfg": {"timm_model_name": "vit_base_patch16_224", "timm_pool": "", "timm_proj": "linear"},
        "text_cfg": {
            "hf_model_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract",
            "hf_proj_type": "mlp",
            "hf_pooler_type": "cls_last_hidden_state_pooler",
            "context_length": 256,
        },
    },
    "preprocess_cfg": {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]},
}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a photo of dog two red cars , parked in front the house deer ."


def timm_names(tower: Any) -> dict[str, torch.Tensor]:
    """The weights of a ViTModel under timm's names."""
    theirs = tower.state_dict()
    names = {
        "embeddings.cls_token": "cls_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
        "layernorm.": "norm.",
        "layers.": "blocks.",
        "attention.o_proj": "attn.proj",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
    }
    weights = {}
    for name, tensor in theirs.items():
        if "q_proj" in name:
            parts = [theirs[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            weights[name.replace("layers.", "blocks.").replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name and not name.startswith("pooler"):
            for old, new in names.items():
                name = name.replace(old, new)
            weights[name] = tensor
    return weights


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, dict[str, torch.Tensor], Path]:
    """All twelve layers of the BERT, two of the ViT, in one file as open_clip writes it."""
    folder = tmp_path_factory.mktemp("biomedclip")
    bert = random_model(transformers.BertModel, transformers.BertConfig(vocab_size=len(WORDS.split())))
    vit = random_model(transformers.ViTModel, transformers.ViTConfig(num_hidden_layers=2, layer_norm_eps=1e-6))
    weights = {f"visual.trunk.{name}": tensor for name, tensor in timm_names(vit).items()}
    weights |= {f"text.transformer.{name}": tensor for name, tensor in bert.state_dict().items()}
    heads = {"visual.head.proj": (512, 768), "text.proj.0": (640, 768), "text.proj.2": (512, 640)}
    weights |= {f"{name}.weight": 0.05 * draw(*shape, seed=len(name)) for name, shape in heads.items()}
    weights["logit_scale"] = torch.tensor(4.4)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
    return bert, vit, weights, folder


@pytest.fixture(scope="module")
def model(towers: Any) -> BertClip:
    found = load_model(str(towers[3]))
    assert isinstance(found, BertClip)
    return found


def projected(weights: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return unit(gelu(hidden @ weights["text.proj.0.weight"].T) @ weights["text.proj.2.weight"].T)


def test_texts_equal_bert(towers: Any, model: BertClip) -> None:
    bert, _, weights, _ = towers
    tokens, context = model.tokenise(TEXTS), 0.1 * draw(5, 768)
    mask = (tokens != 0).long()
    assert not mask.all()  # some texts are padded
    with torch.no_grad():
        hidden = bert(input_ids=tokens, attention_mask=mask).last_hidden_state[:, 0]
        text = unit(model.encode_text(tokens))
        torch.testing.assert_close(text, projected(weights, hidden), rtol=0, atol=1e-5)
        assert (text[0] - text[1]).abs().max() > 1e-3  # or agreement would mean nothing
        words = bert.embeddings.word_embeddings(tokens)
        embedded = torch.cat([words[:, :1], context.expand(len(TEXTS), -1, -1), words[:, 1:]], 1)
        seen = torch.cat([torch.ones(len(TEXTS), len(context), dtype=torch.long), mask], 1)
        hidden = bert(inputs_embeds=embedded, attention_mask=seen).last_hidden_state[:, 0]
        with_context = unit(model.encode_text(tokens, context))
        torch.testing.assert_close(with_context, projected(weights, hidden), rtol=0, atol=1e-5)
        names = ["dog", "two red cars"]
        expected = unit(model.encode_text(model.tokenise([f"{name}." for name in names]), context))
        torch.testing.assert_close(ClassTexts(model, names, 5).features(context), expected, rtol=0, atol=1e-5)
    assert (model.context_length, model.dim) == (256, 512)
    assert model.logit_scale == pytest.approx(torch.tensor(4.4).exp().item())


def test_images_equal_vit(towers: Any, model: BertClip) -> None:
    _, vit, weights, _ = towers
    pixels = draw(1, 3, 224, 224)
    with torch.no_grad():
        hidden = vit(pixel_values=pixels).last_hidden_state
        expected = unit(hidden @ weights["visual.head.proj.weight"].T)
        pooled, spatial = model.encode_patches(pixels)
    torch.testing.assert_close(unit(pooled), expected[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(unit(spatial), expected[:, 1:], rtol=0, atol=1e-5)


def test_gradients_reach_contexts_and_clients_batch(model: BertClip) -> None:
    texts, target = ClassTexts(model, ["dog", "two red cars"], 4), draw(2, model.dim, seed=1)
    gradients = assert_batched_equals_loop(lambda c: (texts.features(c) * target).sum(), 0.02 * draw(2, 4, 768))
    assert (gradients.abs().amax(-1) > 0).all()


def test_other_towers_are_refused(towers: Any, tmp_path: Path) -> None:
    *_, weights, folder = towers
    (tmp_path / "vocab.txt").write_bytes((folder / "vocab.txt").read_bytes())
    (tmp_path / "open_clip_config.json").write_text(json.dumps(CONFIG))
    scaled = {**weights, "visual.trunk.blocks.0.ls1.gamma": torch.ones(768)}
    save_file({name: tensor.contiguous() for name, tensor in scaled.items()}, tmp_path / "open_clip_model.safetensors")
    with pytest.raises(FedVLError, match="not a plain ViT"):
        load_model(str(tmp_path))
    config = json.loads(json.dumps(CONFIG))
    config["model_cfg"]["text_cfg"]["hf_pooler_type"] = "mean_pooler"
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(FedVLError, match="text tower that FedVL does not support"):
        load_model(str(tmp_path))
