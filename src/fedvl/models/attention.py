"""Attention and products with frozen weights, each in one kernel on a GPU.

PyTorch's fused attention has no batching rule that holds: on the CPU vmap falls back to a loop over
clients, on a GPU gradients go wrong; and vmap adds a bias in a pass of its own. But weights are not
batched, so clients are no different from images or texts: here they become part of the batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention


def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x weight^T + bias for frozen weights."""
    if not x.is_cuda:
        return linear(x, weight, bias)
    product: Tensor = Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> Tensor:
    """Mix values (n x heads x T x width) by the likeness of queries and keys.

    visible: boolean, broadcast to n x heads x queries x keys; None if all keys are.
    """
    if query.is_cuda:
        mixed: Tensor = Fused.apply(query, key, value, visible)  # type: ignore[no-untyped-call]
        return mixed
    if torch.is_inference_mode_enabled():
        return scaled_dot_product_attention(query, key, value, visible)
    return mix(query, key, value, visible)


def mix(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None) -> Tensor:
    """Return the same as :func:`attend` in simple steps, which are faster for a few tokens."""
    scores: Tensor = (query * query.shape[-1] ** -0.5) @ key.mT
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ value


class Product(torch.autograd.Function):
    """A product whose bias is added on the way."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x.flatten(0, -2), weight, bias).reshape(*x.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] @ ctx.saved_tensors[0], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, int]:
        assert in_dims[0] is not None, "weights are frozen"
        return Product.apply(x.movedim(in_dims[0], 0), weight, bias), 0  # type: ignore[no-untyped-call]


class Fused(torch.autograd.Function):
    """Fused attention with clients in its batch."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        return scaled_dot_product_attention(query, key, value, visible)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *FusedBackward.apply(gradients[0], *ctx.saved_tensors), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None) -> tuple[Tensor, int]:
        flat = clients_into_batch(info.batch_size, in_dims, tensors)
        return clients_out_of_batch(info.batch_size, Fused.apply(*flat)), 0  # type: ignore[no-untyped-call]


class FusedBackward(torch.autograd.Function):
    """The gradients of queries, keys and values."""

    @staticmethod
    def forward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
    ) -> tuple[Tensor, ...]:
        query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.enable_grad():
            mixed = scaled_dot_product_attention(query, key, value, visible)
        return torch.autograd.grad(mixed, leaves, gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError("No method needs second derivatives of attention.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor | None) -> tuple[tuple[Tensor, ...], Any]:
        flat = clients_into_batch(info.batch_size, in_dims, tensors)
        found = FusedBackward.apply(*flat)  # type: ignore[no-untyped-call]
        return tuple(clients_out_of_batch(info.batch_size, each) for each in found), (0, 0, 0)


def clients_into_batch(
    clients: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Make clients part of the batch of all tensors; the last is the mask, which may have none."""
    *mixed, visible = [
        tensor if tensor is None or dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
    flat = [
        (tensor.expand(clients, *tensor.shape) if dim is None else tensor).flatten(0, 1)
        for tensor, dim in zip(mixed, in_dims, strict=False)
        if tensor is not None
    ]
    if visible is None or (in_dims[-1] is None and (visible.dim() < 4 or len(visible) == 1)):
        return [*flat, visible]
    count = len(flat[0]) // clients
    each = visible if in_dims[-1] is not None else visible.expand(clients, *visible.shape)
    each = each.reshape(clients, *(1 for _ in range(5 - each.dim())), *each.shape[1:])
    return [*flat, each.expand(clients, count, *each.shape[2:]).flatten(0, 1)]


def clients_out_of_batch(clients: int, tensor: Tensor) -> Tensor:
    return tensor.reshape(clients, -1, *tensor.shape[1:])
