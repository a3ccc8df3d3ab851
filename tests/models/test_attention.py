"""Fused attention and products against their simple steps; clients in the batch against one after another."""

import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import linear

from fedvl.models.attention import Fused, Product, mix

CLIENTS, COUNT, HEADS, TOKENS, WIDTH = 3, 2, 4, 5, 8


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def mask(kind):
    seen = torch.rand(CLIENTS, COUNT, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.6
    seen |= torch.eye(TOKENS, dtype=torch.bool)
    return {"none": None, "of tokens": seen[0, 0, 0], "of images": seen[0], "of clients": seen}[kind]


@pytest.mark.parametrize("kind", ["none", "of tokens", "of images", "of clients"])
def test_fused_attention_of_stacked_clients_is_that_of_each(kind):
    query, key, value, weight = (draw(CLIENTS, COUNT, HEADS, TOKENS, WIDTH) for _ in range(4))
    query, key, value = (tensor * factor for tensor, factor in ((query, 1), (key.flip(0), 2), (value.flip(1), 3)))
    visible = mask(kind)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    together = vmap(Fused.apply, in_dims=(0, 0, 0, 0 if kind == "of clients" else None))(*leaves, visible)
    alone = torch.stack(
        [
            mix(query[client], key[client], value[client], visible[client] if kind == "of clients" else visible)
            for client in range(CLIENTS)
        ]
    )
    torch.testing.assert_close(together, alone)
    gradients = (torch.autograd.grad((each * weight).sum(), leaves) for each in (together, alone))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_inside_vmap_are_those_of_each_client():
    """As where each image's gradient is cut: the backward pass is batched too."""
    query, key, value = draw(CLIENTS, COUNT, HEADS, TOKENS, WIDTH), *(draw(COUNT, HEADS, TOKENS, WIDTH),) * 2

    def loss(attention):
        return lambda tensor: attention(tensor, key, value, None).square().sum()

    torch.testing.assert_close(vmap(grad(loss(Fused.apply)))(query), vmap(grad(loss(mix)))(query))


def test_a_product_is_the_linear_map_with_its_gradient():
    x, weight, bias = draw(CLIENTS, COUNT, TOKENS, WIDTH).requires_grad_(), draw(6, WIDTH), draw(6)
    ours, theirs = vmap(lambda each: Product.apply(each, weight, bias))(x), linear(x, weight, bias)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), [x]) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_a_product_inside_vmap_are_those_of_each_client():
    x, weight, bias = draw(CLIENTS, COUNT, TOKENS, WIDTH), draw(6, WIDTH), draw(6)

    def loss(multiply):
        return lambda each: multiply(each, weight, bias).square().sum()

    torch.testing.assert_close(vmap(grad(loss(Product.apply)))(x), vmap(grad(loss(linear)))(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_agrees_with_the_processor():
    query, key, value = (draw(COUNT, HEADS, TOKENS, WIDTH).float() * factor for factor in (1, 2, 3))
    on_gpu = Fused.apply(query.cuda(), key.cuda(), value.cuda(), mask("of images").cuda())
    torch.testing.assert_close(on_gpu.cpu(), mix(query, key, value, mask("of images")), rtol=1e-4, atol=1e-4)
