"""Inputs of several datasets or splits as one."""

import torch
from helpers.small import small_fused_encoder

from fedvl.data.inputs import stacked_rows


def test_texts_of_different_lengths_are_stacked_and_read_as_before():
    encoder = small_fused_encoder()
    short, long = encoder.tokenise(["a cat"]), encoder.tokenise(["a drawing of a small red car", "a cat"])
    assert short.shape[1] < long.shape[1]
    both = stacked_rows([short, long], "tokens")
    assert both.shape == (3, long.shape[1])
    assert torch.equal(both[1:], long)
    assert encoder.text_mask(both).sum(1).tolist() == [
        *encoder.text_mask(short).sum(1).tolist(),
        *encoder.text_mask(long).sum(1).tolist(),
    ]
    assert torch.equal(both[0, : short.shape[1]], short[0])


def test_other_inputs_are_put_below_one_another():
    parts = [torch.ones(1, 2), torch.zeros(2, 2)]
    assert torch.equal(stacked_rows(parts, "features"), torch.cat(parts))
