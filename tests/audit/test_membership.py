"""Membership: found where a client's few images are its update, not in noise, and not by the class."""

import numpy as np
import pytest
import torch
from helpers.audited import evidence_of, silenced

from fedvl.audit.finding import CLIENT, SERVER, USER
from fedvl.audit.membership import attack, judged, matched, score_queries


def figures(evidence):
    return {(each.name, each.view): each for each in attack(evidence)}


@pytest.mark.parametrize("method", ["linear", "cachefl"])
def test_the_server_finds_the_images_of_an_update(method):
    found = figures(evidence_of(method, images=8))
    auc, hits = found["membership", SERVER], found["membership-at-1-percent", SERVER]
    assert auc.leaks
    assert auc.value > 0.65
    assert hits.leaks
    assert auc.value > found["membership", CLIENT].value
    assert "cases (guessing: 50)" in auc.sentence


def test_noise_is_guessing():
    found = figures(silenced(evidence_of()))
    for view in (SERVER, CLIENT):
        low, high = found["membership", view].interval
        assert low <= 0.5 <= high, view
    for view in (SERVER, CLIENT, USER):
        assert not found["membership", view].leaks
        assert "cannot tell" in found["membership", view].sentence


def test_a_user_finds_images_that_a_model_knows_by_heart():
    evidence = evidence_of(images=3, rounds=30, learning_rate=0.5, local_epochs=5)
    scored = score_queries(evidence)
    assert not isinstance(scored, str)
    found, _ = judged(evidence, USER, scored)
    assert found.leaks
    assert found.value > 0.6


def test_images_outside_weigh_as_much_as_the_classes_inside():
    labels, outside = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 2])
    scored = matched(torch.zeros(3), labels, torch.zeros(4), outside)
    assert scored.weights == pytest.approx(np.array([2.0, 0.5, 0.5, 0.0]))
