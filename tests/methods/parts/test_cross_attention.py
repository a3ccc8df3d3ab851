"""The block of cross-attention against torch's own layers; FedTPG's test has the whole block."""

import pytest
import torch
from torch.nn.functional import multi_head_attention_forward

from fedvl.methods.parts.cross_attention import attention, block, block_start


def randomised(width=8, joint=6):
    """Every tensor random, so that no bias or norm is left out of a comparison."""
    generator = torch.Generator().manual_seed(0)
    start = block_start(width, joint, generator)
    return {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}


@pytest.mark.parametrize("present", [None, [True, False, True, True, False]])
def test_attention_is_torchs(present):
    """Queries of width 8, keys and values of width 6."""
    tensors = randomised()
    generator = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(n, w, generator=generator) for n, w in ((4, 8), (5, 6), (5, 6)))
    mask = None if present is None else torch.tensor(present)
    expected, _ = multi_head_attention_forward(
        queries[:, None],
        keys[:, None],
        values[:, None],
        embed_dim_to_check=8,
        num_heads=4,
        in_proj_weight=None,
        in_proj_bias=torch.cat([tensors[f"{name}.bias"] for name in ("query", "key", "value")]),
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=tensors["mixed.weight"],
        out_proj_bias=tensors["mixed.bias"],
        training=False,
        key_padding_mask=None if mask is None else ~mask[None],
        use_separate_proj_weight=True,
        q_proj_weight=tensors["query.weight"],
        k_proj_weight=tensors["key.weight"],
        v_proj_weight=tensors["value.weight"],
    )
    torch.testing.assert_close(attention(tensors, queries, keys, values, mask), expected[:, 0])


def test_many_queries_at_once_are_each_alone():
    tensors = randomised(joint=8)
    generator = torch.Generator().manual_seed(2)
    queries, texts = torch.randn(3, 4, 8, generator=generator), torch.randn(5, 8, generator=generator)
    together = block(tensors, queries, texts, texts)
    torch.testing.assert_close(together, torch.stack([block(tensors, each, texts, texts) for each in queries]))
