"""Candidates, what each does to a message, and imitated clients."""

import torch
from helpers.audited import CLASSES, OWN, evidence_of

from fedvl.audit.candidates import candidates_of, shadows_of, signatures_of, sum_of, together
from fedvl.audit.messages import LOSS, WEIGHT


def test_candidates_are_the_attackers_outsiders_and_the_clients_own():
    evidence = evidence_of(rounds=1)
    found = candidates_of(evidence)
    features = found.samples.inputs["features"]
    own = evidence.own.inputs["features"]
    assert torch.equal(torch.cat([features[found.trial], features[found.known]]), own)
    assert torch.equal(features[found.outside], evidence.outside.inputs["features"])
    assert torch.equal(features[found.held], evidence.training.samples.inputs["features"][found.rows])
    assert len(torch.unique(found.rows)) == len(found.rows) == 120


def test_beside_others_a_signature_is_what_the_candidate_adds():
    evidence = evidence_of("fst-cbdg", rounds=1)
    found = signatures_of(evidence, None, 0)
    beside = found["weight", "beside"]
    assert not torch.equal(beside.raw, beside.delta)
    assert beside.delta.flatten(1).any(1).all()  # the company is without any candidate
    company = beside.raw[0] - beside.delta[0]
    assert torch.allclose(beside.raw - beside.delta, company.expand_as(beside.raw), atol=1e-6)


def test_imitated_clients_are_of_half_of_the_attackers_images_and_of_the_clients_sizes():
    evidence = evidence_of(rounds=1)
    trial, known = shadows_of(evidence, None), shadows_of(evidence, None, "known")
    assert {len(shadow.rows) for shadow in trial} == {20}
    assert max(int(shadow.rows.max()) for shadow in trial) < OWN // 2 <= min(int(shadow.rows.min()) for shadow in known)
    labels = evidence.own.labels

    def largest(shadows):
        """The mean share of the commonest class."""
        counts = [torch.bincount(labels[shadow.rows], minlength=CLASSES) for shadow in shadows]
        return sum(int(count.max()) for count in counts) / (20 * len(counts))

    assert largest(trial[1::2]) > largest(trial[::2]) + 0.15  # every second one has unequal classes
    assert shadows_of(evidence, None) is trial


def test_a_sum_of_imitated_clients_is_as_a_secure_sum():
    evidence = evidence_of(rounds=1)
    one, two = shadows_of(evidence, None)[:2]
    heavy = one.seen[0]._replace(beside={**one.seen[0].beside, WEIGHT: torch.tensor(60.0, dtype=torch.float64)})
    (seen,) = sum_of([one._replace(seen=[heavy]), two]).seen
    wanted = (3 * one.seen[0].change["bias"] + two.seen[0].change["bias"]) / 4
    assert torch.allclose(seen.change["bias"].float(), wanted, atol=1e-7)
    assert float(seen.items[WEIGHT]) == 80.0
    assert float(seen.items[LOSS]) == float(heavy.items[LOSS]) + float(two.seen[0].items[LOSS])
    assert not any(name.startswith("low bits") for name in seen.items)


def test_sums_are_of_as_many_clients_as_images_allow():
    evidence = evidence_of(rounds=1, secure_sum=True)
    groups = together(evidence, shadows_of(evidence, None))
    assert len(groups[0].rows) <= 2 * 20  # a quarter of the attacker's 200 images: two clients of 20
    assert {float(group.seen[0].items[WEIGHT]) for group in groups} == {40.0}
