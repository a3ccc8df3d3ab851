"""Entropic optimal transport by log-domain scaling (Cuturi, 2013; Benamou et al., 2015; FedOTP).

All plans minimise <T, cost> + epsilon <T, log T - 1> over the last two axes of ``cost`` (... x n x
m) and differ in their constraints. Iterations are fixed in number, as a stop that depends on data
cannot be batched over clients; in the log domain no epsilon gives NaN (for which the released
FedOTP drops the batch). By the envelope theorem a plan is a constant in the value's gradient.
"""

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
    log_rows, log_columns = rows.log(), columns.log()
    by_row = torch.zeros_like(kernel[..., 0])
    by_column = torch.zeros_like(kernel[..., 0, :])
    for _ in range(iterations):
        by_column = log_columns - torch.logsumexp(kernel + by_row[..., None], -2)
        if bounded:
            by_column = by_column.clamp(max=0)
        by_row = log_rows - torch.logsumexp(kernel + by_column[..., None, :], -1)
    return torch.exp(kernel + by_row[..., None] + by_column[..., None, :])
