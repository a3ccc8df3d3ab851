"""Gate and bottleneck by hand."""

import math

import torch

from fedvl.methods.parts.adapters import bottleneck, gate_start, gated


def test_gate_by_hand():
    """Two features: hidden = tanh(z), gate = softmax([log 3, 0]) = [3/4, 1/4] through the second bias alone."""
    tensors = {
        "gate.0.weight": torch.eye(2),
        "gate.0.bias": torch.zeros(2),
        "gate.1.weight": torch.zeros(2, 2),
        "gate.1.bias": torch.tensor([math.log(3), 0.0]),
    }
    torch.testing.assert_close(gated(tensors, torch.tensor([[4.0, -8.0]])), torch.tensor([[3.0, -2.0]]))
    tensors["gate.1.weight"] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    a, b = 3 * math.exp(math.tanh(4)), math.exp(math.tanh(-8))
    expected = torch.tensor([[4 * a / (a + b), -8 * b / (a + b)]])
    torch.testing.assert_close(gated(tensors, torch.tensor([[4.0, -8.0]])), expected)


def test_gate_has_the_size_of_table_0_2():
    assert sum(t.numel() for t in gate_start(512, torch.Generator()).values()) == 525_312


def test_bottleneck_by_hand():
    """hidden = relu(3 - 4, 3 + 4) = (0, 7); out = relu(7, -7, 14)."""
    tensors = {
        "down.weight": torch.tensor([[1.0, -1.0], [1.0, 1.0]]),
        "up.weight": torch.tensor([[5.0, 1.0], [5.0, -1.0], [5.0, 2.0]]),
    }
    torch.testing.assert_close(bottleneck(tensors, torch.tensor([[3.0, 4.0]])), torch.tensor([[7.0, 0.0, 14.0]]))
