"""Membership: found where a client's few images are its update, not in noise, and not by the class."""

import pytest
import torch
from helpers.audited import CLIENTS, evidence_of, silenced

from fedvl.audit import membership_replay
from fedvl.audit.finding import CLIENT, SERVER, SHOWN, USER, Finding, Unmeasured
from fedvl.audit.membership import NAMES, attack, membership_finding, score_queries, sum_without_client, weights_outside
from fedvl.audit.messages import LOSS, WEIGHT, subtract


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
    assert "of 100 cases (chance level 50; the other one: training images of other clients)" in auc.sentence


def test_in_noise_hardly_ever_anything_is_shown():
    """Each value is above chance in at most one of 30 draws of noise; of these 40 values 2 may be."""
    plain = evidence_of(rounds=1)
    shown = []
    for seed in range(5):
        noise = silenced(plain, seed)
        outcomes = [*attack(noise), *membership_replay.attack(noise)]
        shown += [each for each in outcomes if isinstance(each, Finding) and each.verdict == SHOWN]
        assert len([each for each in outcomes if isinstance(each, Finding)]) == 8
    assert len(shown) <= 2


def test_a_user_finds_images_that_a_model_knows_by_heart():
    evidence = evidence_of(images=3, rounds=30, learning_rate=0.5, local_epochs=5)
    scored = score_queries(evidence)
    assert not isinstance(scored, str)
    found, _ = membership_finding(evidence, NAMES, USER, scored)
    assert isinstance(found, Finding)
    assert found.leaks
    assert found.value > 0.6


def test_images_outside_weigh_as_much_as_the_classes_inside():
    labels, outside = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 2])
    inside = torch.tensor([True] * 3 + [False] * 4)
    weights = weights_outside(torch.cat([labels, outside]), inside, ~inside)
    assert weights.tolist() == pytest.approx([0, 0, 0, 2.0, 0.5, 0.5, 0.0])
    alone = weights_outside(
        torch.tensor([0, 1, 1]), torch.tensor([True, False, False]), torch.tensor([False, True, False])
    )
    assert alone.tolist() == [0.0, 1.0, 0.0]  # no other image of class 0: any that may be compared


def test_in_a_sum_the_chance_level_is_what_is_found_without_the_client():
    evidence = evidence_of(secure_sum=True)
    found = figures(evidence)["membership", SERVER]
    assert "test images, since no training images are unused" in found.sentence
    seen = evidence.seen_by_server()[0]
    message = evidence.messages[0]
    others = [subtract(m.update.tensors, m.before)["bias"] for m in evidence.messages if m.round_index == 0][1:]
    without = sum_without_client(evidence, seen)
    assert torch.allclose(without.change["bias"], torch.stack(others).mean(0), atol=1e-6)
    assert float(without.items[WEIGHT]) == 20.0 * (CLIENTS - 1)
    assert float(without.items[LOSS]) == pytest.approx(float(seen.items[LOSS]) - message.loss, abs=1e-6)


def test_a_message_of_zeros_gives_no_value():
    """A value of 0.50 by construction would read as an all-clear."""
    evidence = evidence_of(rounds=1)
    evidence.messages = [m._replace(update=m.update._replace(tensors=dict(m.before))) for m in evidence.messages]
    outcomes = [each for each in attack(evidence) if each.view == SERVER]
    assert [each.name for each in outcomes] == list(NAMES)
    assert all(isinstance(each, Unmeasured) and "gives no value" in each.sentence for each in outcomes)
