"""Entropic optimal transport by scaling in the log domain (Cuturi, 2013; Benamou et al., 2015; FedOTP).

All plans minimise <T, cost> + epsilon <T, log T - 1> over the last two axes of ``cost`` (... x n x m) and differ in what is asked
of their sums. The number of iterations is fixed, since a stop that depends on the data cannot be batched over clients; in the log
domain no epsilon makes a plan underflow to NaN (for which the released FedOTP drops the batch). A plan carries no gradient: by
the envelope theorem it is a constant in the gradient of the transport's value.
"""

import torch
from torch import Tensor


def balanced_plan(cost: Tensor, rows: Tensor, columns: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Row sums ``rows`` (n) and column sums ``columns`` (m), which must have the same total."""
    return _plan(cost, rows, columns, epsilon, iterations, bounded=False)


def partial_plan(cost: Tensor, rows: Tensor, bounds: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Row sums ``rows`` (n) and column sums of at most ``bounds`` (m), whose total must be no smaller than that of the rows.

    Dykstra's algorithm: a column over its bound is scaled down to it, any other keeps the factor 1 (FedOTP, algorithm 1).
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
