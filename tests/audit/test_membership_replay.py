"""Membership by replay: from which views it is made, and that it looks at everything that is seen there."""

from pathlib import Path

import pytest
from helpers.audited import evidence_of

from fedvl.audit.finding import CLIENT, SERVER, SHOWN, USER, Finding, Unmeasured
from fedvl.audit.membership_replay import NAMES, attack
from fedvl.audit.messages import LOSS, LOW_BITS, WEIGHT

LEAKS = Path(__file__).parents[1] / "helpers" / "leaks"


def by_view(evidence):
    return {(each.name, each.view): each for each in attack(evidence)}


@pytest.fixture(scope="module")
def linear():
    return by_view(evidence_of(images=8))


def test_the_server_finds_the_images_of_an_update(linear):
    found = linear["membership-replay", SERVER]
    assert isinstance(found, Finding)
    assert found.verdict == SHOWN
    assert found.value > 0.65
    assert isinstance(linear["membership-replay-at-1-percent", SERVER], Finding)


def test_it_examines_every_item_that_depends_on_images(linear):
    items = set(linear["membership-replay", SERVER].items)
    assert {"weight", "bias", LOSS} <= items
    assert any(name.startswith(LOW_BITS) for name in items)
    assert WEIGHT not in items  # the number of images does not depend on which they are


def test_of_trained_tensors_alone_another_client_is_the_other_attacks_matter(linear):
    found = linear["membership-replay", CLIENT]
    assert isinstance(found, Unmeasured)
    assert "sees trained tensors alone" in found.sentence


def test_a_user_sees_predictions_alone(linear):
    assert isinstance(linear["membership-replay", USER], Unmeasured)


def test_a_shared_tensor_that_no_gradient_moves_is_attacked_from_another_clients_view_too():
    found = by_view(evidence_of(LEAKS / "class_means.py", images=4, rounds=1))
    assert isinstance(found["membership-replay", CLIENT], Finding)
    assert "proto" in found["membership-replay", CLIENT].items
    assert found["membership-replay", SERVER].verdict == SHOWN


def test_names_are_those_of_limits(linear):
    assert {name for name, _ in linear} == set(NAMES)
