"""The tiny ViLT: a single-stream image and text encoder started from the dual encoder's vision tower."""

import torch
from torch import nn
from transformers import CLIPModel, ViltConfig, ViltModel

from tools.pretrain.images import IMAGE_SIZE

POSITIONS = 40  # of text; the last 8 are never trained


def build_vilt(clip: CLIPModel, layers: int, vocabulary: int, end: int) -> ViltModel:
    """A ViLT of the vision tower's shape; one id more than the tokenizer has serves as the mask."""
    vision = clip.config.vision_config
    config = ViltConfig(
        vocab_size=vocabulary + 1,
        hidden_size=vision.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=vision.num_attention_heads,
        intermediate_size=vision.intermediate_size,
        image_size=IMAGE_SIZE,
        patch_size=vision.patch_size,
        max_position_embeddings=POSITIONS,
        max_image_length=-1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=end,
        modality_type_vocab_size=2,
    )
    return ViltModel(config)


@torch.no_grad()
def start_from_clip(model: ViltModel, clip: CLIPModel) -> None:
    """Copy patch projection, positions and the first encoder layers (the two have the same pre-norm block)."""
    source, embeddings = clip.vision_model, model.embeddings
    embeddings.patch_embeddings.projection.weight.copy_(source.embeddings.patch_embedding.weight)
    embeddings.patch_embeddings.projection.bias.zero_()
    embeddings.cls_token.copy_(source.embeddings.class_embedding.view(1, 1, -1))
    embeddings.position_embeddings.copy_(source.embeddings.position_embedding.weight[None])
    for to, of in zip(model.encoder.layer, source.encoder.layers, strict=False):
        pairs = (
            (to.layernorm_before, of.layer_norm1),
            (to.layernorm_after, of.layer_norm2),
            (to.attention.attention.query, of.self_attn.q_proj),
            (to.attention.attention.key, of.self_attn.k_proj),
            (to.attention.attention.value, of.self_attn.v_proj),
            (to.attention.output.dense, of.self_attn.out_proj),
            (to.intermediate.dense, of.mlp.fc1),
            (to.output.dense, of.mlp.fc2),
        )
        for copy, original in pairs:
            copy.load_state_dict(original.state_dict())


def text_mask(tokens: torch.Tensor, end: int) -> torch.Tensor:
    """1 up to and including the first end token."""
    return ((tokens == end).cumsum(1) <= 1).long()


def empty_text(tokens: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """What stands for a missing text: start and end token only."""
    empty = torch.full_like(tokens, end)
    empty[:, 0] = start
    return empty


def fuse(
    model: ViltModel, tokens: torch.Tensor, mask: torch.Tensor, pixels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (text, class token, patches) and pooled state.

    The same as ViltModel's own forward for full 64 x 64 images, without its loops over images, which cannot be
    compiled: the library draws the patches in random order, which makes no difference.
    """
    embeddings = model.embeddings
    kinds = embeddings.token_type_embeddings.weight
    text = embeddings.text_embeddings(input_ids=tokens) + kinds[0]
    patches = embeddings.patch_embeddings(pixels).flatten(2).transpose(1, 2)
    image = torch.cat([embeddings.cls_token.expand(len(patches), -1, -1), patches], 1)
    image = image + embeddings.position_embeddings + kinds[1]
    hidden = torch.cat([text, image.to(text.dtype)], 1)
    visible = torch.cat([mask, mask.new_ones(image.shape[:2])], 1)
    attention = (1.0 - visible[:, None, None, :].float()) * -1e4
    for layer in model.encoder.layer:
        answer = layer(hidden, attention)
        hidden = answer[0] if isinstance(answer, tuple) else answer
    hidden = model.layernorm(hidden)
    return hidden, model.pooler(hidden)


class Heads(nn.Module):
    """Parameters that are used in training only."""

    def __init__(self, width: int, joint_width: int, vocabulary: int) -> None:
        super().__init__()
        self.match = nn.Linear(width, 2)
        self.image, self.text = nn.Linear(width, joint_width), nn.Linear(width, joint_width)
        self.word = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.word_bias = nn.Parameter(torch.zeros(vocabulary))
