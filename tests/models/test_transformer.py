"""Weights that are cast once, OpenAI's activation folded into them, and adapters beside blocks."""

from typing import Any

import pytest
import torch

from fedvl.models.transformer import Change, Mlp, StackShape, Transformer


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


def test_an_adapter_beside_a_block_reads_its_normalised_input_and_adds_to_its_output():
    torch.manual_seed(0)
    shape = StackShape(8, 3, 2, 16)
    stack, x = Transformer(shape).requires_grad_(False), torch.randn(2, 5, 8)
    for tensor in stack.state_dict().values():
        tensor.normal_(std=0.3)
    weight = torch.randn(8, 8)
    blocks: Any = stack.resblocks
    first, second, third = blocks
    middle = second(first(x)) + second.ln_1(first(x)) @ weight
    expected = third(middle) + third.ln_1(middle) @ weight

    def adapter(normal):
        return normal @ weight

    torch.testing.assert_close(stack(x, changes=[Change(), Change(beside=adapter), Change(beside=adapter)]), expected)
    rows = torch.tensor([4, 1])  # of the last block, of which the rest is not computed
    chosen = stack(x, rows=rows, changes=[Change(), Change(beside=adapter), Change(beside=adapter)])
    torch.testing.assert_close(chosen[:, 0], expected[torch.arange(2), rows])
