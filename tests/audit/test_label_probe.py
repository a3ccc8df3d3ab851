"""The label probe: one item that tells how many images of a class a client has, chosen on imitated clients alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.audited import evidence_of, silenced

from fedvl.audit.candidates import shadows_of
from fedvl.audit.evidence import class_shares
from fedvl.audit.finding import SERVER, SHOWN, Finding, Unmeasured
from fedvl.audit.imitation import Coordinates
from fedvl.audit.label_histogram import Probe
from fedvl.audit.label_probe import LEAST_CLIENTS, attack, best_probe, fixed
from fedvl.audit.messages import LOW_BITS
from fedvl.evaluation.statistics import correlation


@pytest.fixture(scope="module")
def leaking():
    return evidence_of(rounds=1, clients=10)


def test_one_item_of_an_update_tells_the_share_of_a_class(leaking):
    (found,) = attack(leaking)
    assert isinstance(found, Finding)
    assert found.view == SERVER
    assert found.verdict == SHOWN
    assert found.value > 0.7
    assert {"weight", "bias"} <= set(found.items)
    assert found.counted == "10 clients"


def test_the_value_is_the_correlation_with_the_true_shares(leaking):
    told, _ = best_probe(leaking)
    (found,) = attack(leaking)
    assert told is not None
    assert isinstance(found, Finding)
    seen = leaking.seen_by_server()
    guesses = [float(told.probe.shares(told.coordinates.of(each.items))[told.label]) for each in seen]
    truths = [leaking.histogram(each.client)[told.label] for each in seen]
    assert found.value == pytest.approx(np.corrcoef(guesses, truths)[0, 1])
    assert f"'class {told.label}' that is estimated from '{told.name}' alone" in found.sentence


def test_the_best_item_is_chosen_on_imitated_clients_other_than_those_it_was_fitted_on(leaking):
    told, examined = best_probe(leaking)
    assert told is not None
    labels = leaking.own.labels.cpu()
    known, trials = shadows_of(leaking, None, "known"), shadows_of(leaking, None)
    assert not set(torch.cat([shadow.rows for shadow in known]).tolist()) & set(
        torch.cat([shadow.rows for shadow in trials]).tolist()
    )
    items, best = leaking.seen_by_server()[0].items, -1.0
    for name in sorted(examined):
        coordinates = Coordinates([name], items)
        fitted, tried = (
            torch.stack([coordinates.of(shadow.seen[0].items) for shadow in part]).double() for part in (known, trials)
        )
        shares = [np.stack([class_shares(labels[s.rows], leaking.classes) for s in part]) for part in (known, trials)]
        guesses = np.stack([Probe.fit(fitted, shares[0]).shares(row) for row in tried])
        best = max(best, *(correlation(guesses[:, c], shares[1][:, c]) for c in range(leaking.classes)))
    assert told.success == pytest.approx(best)
    assert not any(name.startswith(LOW_BITS) for name in examined)


def test_noise_hardly_ever_tells_anything(leaking):
    """A correlation over ten clients is above chance in one of 40 draws of noise."""
    verdicts = [
        found.verdict for seed in range(8) for found in attack(silenced(leaking, seed)) if isinstance(found, Finding)
    ]
    assert len(verdicts) == 8
    assert verdicts.count(SHOWN) <= 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"secure_sum": True}, "clients cannot be told apart"),
        ({"clients": LEAST_CLIENTS - 1}, f"takes {LEAST_CLIENTS} audited clients"),
    ],
)
def test_where_it_does_not_apply_it_gives_no_value(settings, reason):
    (found,) = attack(evidence_of(rounds=1, **settings))
    assert isinstance(found, Unmeasured)
    assert reason in found.sentence


def test_without_true_labels_it_gives_no_value():
    evidence = evidence_of(rounds=1)
    evidence.training.true_labels.fill_(-1)
    (found,) = attack(evidence)
    assert isinstance(found, Unmeasured)
    assert "no true labels" in found.sentence


def test_an_item_is_a_probe_only_with_one_shape_in_all_messages():
    seen: Any = SimpleNamespace(items={"weight": torch.zeros(2, 3), "gist": torch.zeros(4)})

    def shadow(**shapes):
        return SimpleNamespace(
            seen=[SimpleNamespace(items={name: torch.zeros(shape) for name, shape in shapes.items()})]
        )

    same, other = shadow(weight=(2, 3), gist=(4,)), shadow(weight=(3, 2), gist=(4,))
    assert fixed("weight", 0, seen, [same, same])
    assert not fixed("weight", 0, seen, [same, other])
    assert fixed("gist", 0, seen, [same, other])
    assert not fixed("gist", 0, seen, [same, shadow(weight=(2, 3))])
