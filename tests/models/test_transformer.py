"""Weights that are cast once give what autocast gives, and OpenAI's activation folded into them is the same."""

import pytest
import torch

from fedvl.models.transformer import Mlp, StackShape


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_weights_that_are_cast_once_change_no_more_than_their_precision(activation):
    torch.manual_seed(0)
    mlp, x = Mlp(StackShape(16, 1, 2, 64, activation)).requires_grad_(False), torch.randn(9, 16)
    exact = mlp(x)
    for _ in range(2):  # the second time from what was kept
        with torch.autocast("cpu", torch.bfloat16):
            rounded = mlp(x)
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(mlp(x), exact, rtol=0, atol=0)  # float32 still has its own weights


def test_weights_that_were_cast_while_encoding_can_be_trained_through():
    mlp, x = Mlp(StackShape(8, 1, 2, 16)).requires_grad_(False), torch.randn(3, 8)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        mlp(x)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mlp(leaf := x.requires_grad_()).float().sum()
    [gradient] = torch.autograd.grad(loss, [leaf])
    assert gradient.abs().sum() > 0
