"""CLIP in PyTorch's own layers with our encoder's weights, the baseline of ``prompts.py``."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from fedvl.models.clip import DualEncoder, VisionTransformer
from fedvl.models.transformer import Block, Transformer


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class PlainClip:
    """CLIP without our optimisations.

    Class texts are padded to all positions; nothing is shared between classes, clients or steps.
    """

    def __init__(self, encoder: DualEncoder, class_names: Sequence[str]) -> None:
        assert isinstance(encoder.visual, VisionTransformer)
        self.encoder, self.visual, self.scale = encoder, encoder.visual, encoder.logit_scale
        self.text_layers = [plain_layer(block) for block in blocks(encoder.transformer)]
        self.image_layers = [plain_layer(block) for block in blocks(encoder.visual.transformer)]
        device = encoder.log_scale.device
        tokens = encoder.tokenise([f"{name}." for name in class_names]).to(device)
        end = int(encoder.tokenise([""])[0, -1])
        self.ends = (tokens == end).int().argmax(-1)
        length = encoder.context_length
        padding = tokens.new_full((len(tokens), length - tokens.shape[1]), end)
        self.words = encoder.embed_tokens(torch.cat([tokens, padding], 1)).detach()
        self.causal = nn.Transformer.generate_square_subsequent_mask(length, device=device)

    def texts(self, context: Tensor) -> Tensor:
        """Return classes x d text features, from sequences of all the model's positions."""
        before = context.expand(len(self.words), -1, -1)
        x = torch.cat([self.words[:, :1], before, self.words[:, 1 : len(self.causal) - len(context)]], 1)
        x = x + self.encoder.positional_embedding
        for layer in self.text_layers:
            x = layer(x, src_mask=self.causal, is_causal=True)
        x = self.encoder.ln_final(x)
        x = x[torch.arange(len(x), device=x.device), self.ends + len(context)]
        projected: Tensor = x @ self.encoder.text_projection
        return projected

    def image(self, pixels: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Return n x (1 + M) x d features: the pooled one, then the patches.

        prompts: layers x P x width, as in FedPP.
        """
        visual = self.visual
        x = visual.conv1(pixels).flatten(2).transpose(1, 2)
        first = visual.class_embedding.expand(len(x), 1, -1)
        x = visual.ln_pre(torch.cat([first, x], 1) + visual.positional_embedding)
        length = x.shape[1]
        for index, layer in enumerate(self.image_layers):
            if prompts is not None and index < len(prompts):
                x = torch.cat([x, prompts[index].expand(len(x), -1, -1)], 1)
            x = layer(x)[:, :length]
        projected: Tensor = visual.ln_post(x) @ visual.proj
        return projected


def blocks(stack: Transformer) -> list[Block]:
    return [block for block in stack.resblocks if isinstance(block, Block)]


def plain_layer(block: Block) -> nn.TransformerEncoderLayer:
    """Return PyTorch's layer with a block's weights."""
    width, hidden = block.mlp.c_fc.in_features, block.mlp.c_fc.out_features
    activation = quick_gelu if block.mlp.quick else gelu
    layer = nn.TransformerEncoderLayer(
        width, block.attn.heads, hidden, 0.0, activation, block.ln_1.eps, batch_first=True, norm_first=True
    )
    names = {
        "attn.": "self_attn.",
        "ln_1.": "norm1.",
        "ln_2.": "norm2.",
        "mlp.c_fc.": "linear1.",
        "mlp.c_proj.": "linear2.",
    }
    state = {}
    for name, tensor in block.state_dict().items():
        ours = next(prefix for prefix in names if name.startswith(prefix))
        state[names[ours] + name.removeprefix(ours)] = tensor
    layer.load_state_dict(state)
    return layer.to(block.ln_1.weight.device).requires_grad_(False)
