"""The kernel of a GPU against the steps of a processor; only a GPU can run it."""

import pytest
import torch

from fedvl.methods.parts.transport import balanced_plan, partial_plan


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("solve, mass", [(partial_plan, 0.8), (balanced_plan, 1.0)])
def test_the_kernel_of_a_gpu_agrees_with_the_steps(solve, mass):
    cost = torch.rand(3, 4, 2, 37, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.full((2,), mass / 2), torch.full((37,), 1 / 37)
    on_gpu = torch.func.vmap(lambda each: solve(each, rows.cuda(), columns.cuda(), 0.1, 100))(cost.cuda())
    torch.testing.assert_close(on_gpu.cpu(), solve(cost, rows, columns, 0.1, 100), rtol=1e-4, atol=1e-7)
