"""The scaling of optimal transport as a GPU kernel: each program solves one plan in registers."""

import triton
import triton.language as tl
from torch import Tensor


def scale_plan(
    kernel: Tensor, log_rows: Tensor, log_columns: Tensor, iterations: int, bounded: bool
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the factors of rows and of columns."""
    kernel = kernel.contiguous()
    *plans, rows, columns = kernel.shape
    by_row, by_column = kernel.new_empty(*plans, rows), kernel.new_empty(*plans, columns)
    height, width = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
    _scale[(by_row.numel() // rows,)](
        kernel,
        log_rows.contiguous(),
        log_columns.contiguous(),
        by_row,
        by_column,
        rows,
        columns,
        iterations,
        height,
        width,
        bounded,
        num_warps=1 if height * width <= 1024 else 4,
    )
    return by_row, by_column


@triton.jit
def _scale(
    kernel,
    log_rows,
    log_columns,
    by_row,
    by_column,
    rows,
    columns,
    iterations,
    height: tl.constexpr,
    width: tl.constexpr,
    bounded: tl.constexpr,
):
    plan = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, height), tl.arange(0, width)
    in_row, in_column = row < rows, column < columns
    place = plan * rows * columns + row[:, None] * columns + column[None, :]
    # padding is nowhere: its logarithm is finite, so that no difference of two is NaN
    cells = tl.load(kernel + place, mask=in_row[:, None] & in_column[None, :], other=-1e30)
    wanted_rows = tl.load(log_rows + row, mask=in_row, other=-1e30)
    wanted_columns = tl.load(log_columns + column, mask=in_column, other=-1e30)
    of_row = tl.zeros((height,), tl.float32)
    of_column = tl.zeros((width,), tl.float32)
    for _ in range(iterations):
        x = cells + of_row[:, None]
        top = tl.max(x, 0)
        of_column = wanted_columns - top - tl.log(tl.sum(tl.exp(x - top[None, :]), 0))
        if bounded:
            of_column = tl.minimum(of_column, 0.0)
        y = cells + of_column[None, :]
        top = tl.max(y, 1)
        of_row = wanted_rows - top - tl.log(tl.sum(tl.exp(y - top[:, None]), 1))
    tl.store(by_row + plan * rows + row, of_row, mask=in_row)
    tl.store(by_column + plan * columns + column, of_column, mask=in_column)
