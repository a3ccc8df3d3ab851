"""Entropic optimal transport by log-domain scaling (Cuturi, 2013; Benamou et al., 2015; FedOTP).

All plans minimise <T, cost> + epsilon <T, log T - 1> over the last two axes of ``cost`` (... x n x
m) and differ in their constraints. Iterations are fixed in number, as a stop that depends on data
cannot be batched over clients; in the log domain no epsilon gives NaN (for which the released
FedOTP drops the batch). By the envelope theorem a plan is a constant in the value's gradient.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def balanced_plan(cost: Tensor, rows: Tensor, columns: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Return the plan with row sums ``rows`` (n) and column sums ``columns`` (m); equal totals."""
    return _plan(cost, rows, columns, epsilon, iterations, bounded=False)


def partial_plan(cost: Tensor, rows: Tensor, bounds: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Return the plan with row sums ``rows`` (n) and column sums of at most ``bounds`` (m).

    The bounds must not total less than the rows. Dykstra's algorithm: a column over its bound is
    scaled down to it, any other keeps the factor 1 (FedOTP, algorithm 1).
    """
    return _plan(cost, rows, bounds, epsilon, iterations, bounded=True)


def _plan(cost: Tensor, rows: Tensor, columns: Tensor, epsilon: float, iterations: int, bounded: bool) -> Tensor:
    kernel = -cost.detach() / epsilon
    scale = scale_in_one_kernel if kernel.is_cuda and find_spec("triton") else scale_step_by_step
    by_row, by_column = scale(kernel, rows.log(), columns.log(), iterations, bounded)
    return torch.exp(kernel + by_row[..., None] + by_column[..., None, :])


def scale_step_by_step(
    kernel: Tensor, log_rows: Tensor, log_columns: Tensor, iterations: int, bounded: bool
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the factors of rows and of columns."""
    by_row = torch.zeros_like(kernel[..., 0])
    by_column = torch.zeros_like(kernel[..., 0, :])
    for _ in range(iterations):
        by_column = log_columns - torch.logsumexp(kernel + by_row[..., None], -2)
        if bounded:
            by_column = by_column.clamp(max=0)
        by_row = log_rows - torch.logsumexp(kernel + by_column[..., None, :], -1)
    return by_row, by_column


def scale_in_one_kernel(
    kernel: Tensor, log_rows: Tensor, log_columns: Tensor, iterations: int, bounded: bool
) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`scale_step_by_step`, with each plan's cost read once."""
    factors: tuple[Tensor, Tensor] = InOneKernel.apply(kernel, log_rows, log_columns, iterations, bounded)  # type: ignore[no-untyped-call]
    return factors


class InOneKernel(torch.autograd.Function):
    """All iterations in one GPU kernel, for all clients: a plan does not care whose it is."""

    @staticmethod
    def forward(
        kernel: Tensor, log_rows: Tensor, log_columns: Tensor, iterations: int, bounded: bool
    ) -> tuple[Tensor, Tensor]:
        from fedvl.methods.parts.transport_kernel import scale_plan

        return scale_plan(kernel, log_rows, log_columns, iterations, bounded)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return None, None, None, None, None  # a plan is a constant

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], kernel: Tensor, *rest: Any
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        assert in_dims[0] is not None, "what is batched is the cost"
        return InOneKernel.apply(kernel.movedim(in_dims[0], 0), *rest), (0, 0)  # type: ignore[no-untyped-call]
