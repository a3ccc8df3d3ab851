"""Operations of a step against PyTorch's own counter, and by hand."""

import subprocess
import sys

import pytest
import torch
from helpers.small import small_federation, small_method
from torch.utils.flop_counter import FlopCounterMode

from fedvl.federation import flops
from fedvl.methods import method_names


def test_a_product_takes_two_operations_for_each_of_its_terms():
    with flops.Operations() as counted:
        torch.ones(3, 4) @ torch.ones(4, 5)
        torch.nn.functional.linear(torch.ones(2, 4), torch.ones(5, 4), torch.ones(5))
    assert counted.total == 2 * 3 * 4 * 5 + 2 * 2 * 4 * 5


class Pytorchs(FlopCounterMode):
    def __init__(self):
        super().__init__(display=False)

    @property
    def total(self):
        return self.get_total_flops()


@pytest.mark.parametrize("name", sorted({*method_names()} - {"zero-shot"}))
def test_every_method_counts_as_with_pytorchs_counter(name, monkeypatch):
    federation = small_federation(small_method(name))
    handed = federation.method.hand_out(federation.shared, {}, 3)
    ours = federation.engine.local_flops(handed)
    monkeypatch.setattr(flops, "Operations", Pytorchs)
    assert ours == federation.engine.local_flops(handed)
    assert ours > 0 or name == "fedpp"  # whose clients have no labels before they are consulted


def test_counting_does_not_load_the_compiler():
    script = (
        "import sys, torch; from fedvl.federation.flops import Operations\n"
        "with Operations(): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
