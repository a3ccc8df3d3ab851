"""Rename other formats' parameters to OpenAI's, and read a model's sizes from its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch

from fedvl.errors import FedVLError
from fedvl.models import numbers
from fedvl.models.biomedclip import BertClipShape, PlainShape
from fedvl.models.clip import ClipShape, ViTShape
from fedvl.models.resnet import ResNetShape
from fedvl.models.siglip import PooledShape
from fedvl.models.transformer import StackShape
from fedvl.models.vilt import ViltShape
from fedvl.tensors import Tensors

Config = Mapping[str, Any]

# Parts of a block, our name: Hugging Face's for CLIP and ViLT; the q, k and v projections become one matrix.
CLIP_BLOCK = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
CLIP_STACKS = {"visual.transformer.": "vision_model.encoder.layers.", "transformer.": "text_model.encoder.layers."}
CLIP_WHOLE = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
}
CLIP_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
CLIP_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
CLIP_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
VILT_BLOCK = {
    "ln_1": "layernorm_before",
    "attn.out_proj": "attention.output.dense",
    "ln_2": "layernorm_after",
    "mlp.c_fc": "intermediate.dense",
    "mlp.c_proj": "output.dense",
}
VILT_QKV = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
SIGLIP_WHOLE = {
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "visual.head.attn.in_proj_weight": "vision_model.head.attention.in_proj_weight",
    "visual.head.attn.in_proj_bias": "vision_model.head.attention.in_proj_bias",
}
SIGLIP_LAYERS = {
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.head.attn.out_proj": "vision_model.head.attention.out_proj",
    "visual.head.ln": "vision_model.head.layernorm",
    "visual.head.mlp.c_fc": "vision_model.head.mlp.fc1",
    "visual.head.mlp.c_proj": "vision_model.head.mlp.fc2",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_model.head",
}
TIMM_BLOCK = {
    "ln_1": "norm1",
    "attn.out_proj": "attn.proj",
    "ln_2": "norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
BERT_BLOCK = {
    "ln_1": "attention.output.LayerNorm",
    "attn.out_proj": "attention.output.dense",
    "ln_2": "output.LayerNorm",
    "mlp.c_fc": "intermediate.dense",
    "mlp.c_proj": "output.dense",
}
BERT_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
# open_clip's head width where it is not 64 (ViT-H, ViT-g, ViT-bigG); it cannot be read from shapes.
HEAD_WIDTH = {1280: 80, 1408: 88, 1664: 104}


def clip_from_hugging_face(source: Tensors) -> Tensors:
    """Rename CLIPModel's tensors to ours."""
    tensors = {ours: source[theirs] for ours, theirs in CLIP_WHOLE.items()}
    tensors |= {ours: source[theirs].T.contiguous() for ours, theirs in CLIP_TRANSPOSED.items()}
    tensors["log_scale"] = source["logit_scale"].reshape(())
    _rename(tensors, source, CLIP_NORMS)
    for ours, theirs in CLIP_STACKS.items():
        _blocks(tensors, source, ours, theirs, CLIP_BLOCK, CLIP_QKV)
    return tensors


def clip_to_hugging_face(tensors: Tensors) -> Tensors:
    """Rename our tensors (of a CLIP with a ViT) to CLIPModel's."""
    target = {theirs: tensors[ours] for ours, theirs in CLIP_WHOLE.items()}
    target |= {theirs: tensors[ours].T.contiguous() for ours, theirs in CLIP_TRANSPOSED.items()}
    target["logit_scale"] = tensors["log_scale"]
    _rename(target, tensors, {theirs: ours for ours, theirs in CLIP_NORMS.items()})
    for ours, theirs in CLIP_STACKS.items():
        for layer in range(_count(tensors, f"{ours}resblocks.")):
            out_of, into = f"{ours}resblocks.{layer}.", f"{theirs}{layer}."
            _rename(target, tensors, {into + name: out_of + part for part, name in CLIP_BLOCK.items()})
            for kind in ("weight", "bias"):
                parts = tensors[f"{out_of}attn.in_proj_{kind}"].chunk(len(CLIP_QKV))
                target |= {f"{into}{name}.{kind}": part.clone() for name, part in zip(CLIP_QKV, parts, strict=True)}
    return target


def siglip_from_hugging_face(source: Tensors) -> Tensors:
    """Rename SiglipModel's tensors to ours."""
    tensors = {ours: source[theirs] for ours, theirs in SIGLIP_WHOLE.items()}
    tensors["visual.head.probe"] = source["vision_model.head.probe"].flatten()
    tensors["log_scale"], tensors["logit_bias"] = (source[name].reshape(()) for name in ("logit_scale", "logit_bias"))
    _rename(tensors, source, SIGLIP_LAYERS)
    for ours, theirs in CLIP_STACKS.items():
        _blocks(tensors, source, ours, theirs, CLIP_BLOCK, CLIP_QKV)
    return tensors


def clip_from_open_clip(source: Tensors) -> Tensors:
    """Rename open_clip's tensors to ours.

    The names are OpenAI's, sometimes with the text tower under `text.`; entries that are not
    weights are dropped.
    """
    if any(name.startswith("visual.trunk.") for name in source):
        raise FedVLError(
            "This open_clip file has a timm image tower, which FedVL cannot run: use a ViT or ResNet CLIP, or import its "
            "vectors with `fedvl features import`."
        )
    left_out = re.compile(r"(input_resolution|context_length|vocab_size|attn_mask|.*num_batches_tracked)")
    names = {name: name.removeprefix("text.") for name in source}
    tensors = {ours: source[name] for name, ours in names.items() if not left_out.fullmatch(ours)}
    tensors["log_scale"] = tensors.pop("logit_scale").reshape(())
    return tensors


def bert_clip_from_open_clip(source: Tensors, context_length: int) -> Tensors:
    """Rename BiomedCLIP's tensors to ours: timm's of the image tower, transformers' of the BERT.

    All tokens of a text are of one type, whose embedding is added to the positions.
    """
    text, image = "text.transformer.embeddings.", "visual.trunk."
    types = source[f"{text}token_type_embeddings.weight"][0]
    tensors = {
        "log_scale": source["logit_scale"].reshape(()),
        "token_embedding.weight": source[f"{text}word_embeddings.weight"],
        "positional_embedding": source[f"{text}position_embeddings.weight"][:context_length] + types,
        "text_hidden": source["text.proj.0.weight"].T,
        "text_projection": source["text.proj.2.weight"].T,
        "visual.class_embedding": source[f"{image}cls_token"].flatten(),
        "visual.positional_embedding": source[f"{image}pos_embed"][0],
        "visual.proj": source["visual.head.proj.weight"].T,
    }
    layers = {"ln_embedded": f"{text}LayerNorm", "visual.conv1": f"{image}patch_embed.proj"}
    _rename(tensors, source, {**layers, "visual.ln_post": f"{image}norm"})
    _blocks(tensors, source, "transformer.", "text.transformer.encoder.layer.", BERT_BLOCK, BERT_QKV)
    _blocks(tensors, source, "visual.transformer.", f"{image}blocks.", TIMM_BLOCK, ("attn.qkv",))
    if sum(name.startswith("visual.") for name in tensors) < sum(name.startswith("visual.") for name in source):
        raise FedVLError(
            "This open_clip file has an image tower of timm's that is not a plain ViT, which FedVL cannot run: use another "
            "model, or import its vectors with `fedvl features import`."
        )
    return tensors


def vilt_from_hugging_face(source: Tensors) -> Tensors:
    """Rename ViltModel's tensors to ours.

    A task model around it also works: the prefix `vilt.` is removed and the head is dropped.
    """
    source = {name.removeprefix("vilt."): tensor for name, tensor in source.items()}
    text = "embeddings.text_embeddings."
    tensors = {
        "token_embedding.weight": source[f"{text}word_embeddings.weight"],
        "text_positions": source[f"{text}position_embeddings.weight"],
        "text_type": source[f"{text}token_type_embeddings.weight"][0].clone(),
        "class_embedding": source["embeddings.cls_token"].flatten(),
        "image_positions": source["embeddings.position_embeddings"][0],
        "modalities": source["embeddings.token_type_embeddings.weight"][:2].clone(),
    }
    parts = {
        "text_norm": f"{text}LayerNorm",
        "patches": "embeddings.patch_embeddings.projection",
        "ln_final": "layernorm",
        "pooler": "pooler.dense",
    }
    _rename(tensors, source, parts)
    _blocks(tensors, source, "transformer.", "encoder.layer.", VILT_BLOCK, VILT_QKV)
    return tensors


def _rename(tensors: Tensors, source: Tensors, names: Mapping[str, str]) -> None:
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            tensors[f"{ours}.{kind}"] = source[f"{theirs}.{kind}"]


def _blocks(
    tensors: Tensors, source: Tensors, ours: str, theirs: str, parts: Mapping[str, str], qkv: tuple[str, ...]
) -> None:
    for layer in range(_count(source, theirs)):
        into, out_of = f"{ours}resblocks.{layer}.", f"{theirs}{layer}."
        _rename(tensors, source, {into + part: out_of + name for part, name in parts.items()})
        for kind in ("weight", "bias"):
            joined = torch.cat([source[f"{out_of}{name}.{kind}"] for name in qkv])
            tensors[f"{into}attn.in_proj_{kind}"] = joined


def _count(tensors: Tensors, prefix: str) -> int:
    """Count the numbered layers under a prefix."""
    return len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})


def _stack(tensors: Tensors, prefix: str, config: Config) -> StackShape:
    first = tensors[f"{prefix}resblocks.0.mlp.c_fc.weight"]
    hidden, width = first.shape
    activation = str(config.get("hidden_act", "quick_gelu"))
    if activation not in ("gelu", "quick_gelu", "gelu_pytorch_tanh"):
        raise FedVLError(
            f"The model uses the activation {activation}, which FedVL does not support: choose another model."
        )
    return StackShape(
        width=width,
        layers=_count(tensors, f"{prefix}resblocks."),
        heads=numbers.heads(config, width),
        hidden=hidden,
        activation=activation,
        epsilon=numbers.real(config.get("layer_norm_eps", 1e-5), "layer_norm_eps", 0.0, 1.0),
    )


def clip_shape(tensors: Tensors, vision: Config, text: Config) -> ClipShape:
    """Return the sizes of a model.

    Heads, activation and epsilon cannot be read from the tensors and come from the configuration.
    """
    vocabulary = tensors["token_embedding.weight"].shape[0]
    context_length, _ = tensors["positional_embedding"].shape
    image: ViTShape | ResNetShape
    if "visual.class_embedding" in tensors:
        conv = tensors["visual.conv1.weight"]
        grid = isqrt(tensors["visual.positional_embedding"].shape[0] - 1)
        if "num_attention_heads" not in vision:
            width = conv.shape[0]
            vision = {**vision, "num_attention_heads": width // HEAD_WIDTH.get(width, 64)}
        image = ViTShape(_stack(tensors, "visual.transformer.", vision), conv.shape[-1], grid)
    else:
        first, second, third, fourth = (_count(tensors, f"visual.layer{stage}.") for stage in range(1, 5))
        image = ResNetShape(
            width=tensors["visual.layer1.0.conv1.weight"].shape[0],
            blocks=(first, second, third, fourth),
            grid=isqrt(tensors["visual.attnpool.positional_embedding"].shape[0] - 1),
        )
    dim = tensors["text_projection"].shape[1]
    return ClipShape(dim, image, _stack(tensors, "transformer.", text), vocabulary, context_length)


def bert_clip_shape(tensors: Tensors) -> BertClipShape:
    """Return the sizes of a BiomedCLIP; epsilons are those of timm's ViTs and of BERT."""
    conv = tensors["visual.conv1.weight"]
    image = {"hidden_act": "gelu", "layer_norm_eps": 1e-6}
    text = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
    grid = isqrt(tensors["visual.positional_embedding"].shape[0] - 1)
    hidden, dim = tensors["text_projection"].shape
    return BertClipShape(
        dim=dim,
        vision=PlainShape(_stack(tensors, "visual.transformer.", image), conv.shape[-1], grid),
        text=_stack(tensors, "transformer.", text),
        vocabulary=tensors["token_embedding.weight"].shape[0],
        context_length=tensors["positional_embedding"].shape[0],
        hidden=hidden,
    )


def siglip_shape(tensors: Tensors, vision: Config, text: Config) -> ClipShape:
    defaults = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_attention_heads": 12}
    conv = tensors["visual.conv1.weight"]
    grid = isqrt(tensors["visual.positional_embedding"].shape[0])
    return ClipShape(
        dim=tensors["text_projection.weight"].shape[0],
        vision=PooledShape(_stack(tensors, "visual.transformer.", {**defaults, **vision}), conv.shape[-1], grid),
        text=_stack(tensors, "transformer.", {**defaults, **text}),
        vocabulary=tensors["token_embedding.weight"].shape[0],
        context_length=tensors["positional_embedding"].shape[0],
    )


def vilt_shape(tensors: Tensors, config: Config) -> ViltShape:
    return ViltShape(
        stack=_stack(tensors, "transformer.", {"hidden_act": "gelu", "layer_norm_eps": 1e-12, **config}),
        patch=tensors["patches.weight"].shape[-1],
        grid=isqrt(tensors["image_positions"].shape[0] - 1),
        vocabulary=tensors["token_embedding.weight"].shape[0],
        context_length=tensors["text_positions"].shape[0],
    )
