"""fedprox-nn: the pull on the weights of a network."""

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import batch_of, small_method, small_samples


def test_proximal_term_counts_weights_alone():
    plain, proximal = small_method("fedavg-nn"), small_method("fedprox-nn", mu=0.4)
    start = plain.start(torch.Generator().manual_seed(0))
    shifted = {"fc.bias": 3.0, "bn1.bias": -1.0, "bn1.running_var": 100.0}  # 4 numbers each; a statistic is not pulled
    moved = {name: tensor + shifted.get(name, 0.0) for name, tensor in start.items()}
    batch = batch_of(small_samples(plain, 5), start)
    extra = proximal.objective(moved, batch)[0] - plain.objective(moved, batch)[0]
    assert float(extra) == pytest.approx(0.4 / 2 * (4 * 9.0 + 4 * 1.0))


def test_it_declares_what_the_table_says():
    assert_declared("fedprox-nn")
