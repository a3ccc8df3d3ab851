"""zero-shot: the nearest text."""

import torch
from helpers.declarations import assert_declared
from helpers.small import small_method


def test_zero_shot_picks_the_nearest_text():
    method = small_method("zero-shot")
    assert method.start(torch.Generator()) == {}
    scores = method.predict({}, {"features": method.task.text_features})
    assert scores.argmax(1).tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(scores.diagonal(), 10 * torch.ones(4))  # the logit scale


def test_it_declares_what_the_table_says():
    assert_declared("zero-shot")
