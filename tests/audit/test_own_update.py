"""A party's own figures: planted leaks are found, noise gives nothing away, and the attacker has none of its images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.runs import prepare

from fedvl.audit import own_update
from fedvl.audit.messages import Message
from fedvl.audit.own_update import (
    ALONE,
    MIN_ATTACK_IMAGES,
    OWN_ATTACKS,
    PLAIN,
    audit_own,
    beside_chance,
    histogram,
    member,
    split_own_images,
    train_on_rest,
    views,
)
from fedvl.methods.base import Update

CLIENT, SECRET = 5, 12345
SUM = "a sum with 2 imitated others"


def settings(**rest):
    return {
        "method": {"name": "linear"},
        "data": {"shots": 30, "clients": 10, "partition": "dirichlet:0.3", "minimum": 5},
        "federation": {"threads": 1},
        **rest,
    }


@pytest.fixture(scope="module")
def prepared():
    """Of a client with three dozen images, whose update is nearly the sum of their gradients."""
    return prepare(settings(training={"learning_rate": 0.1, "batch_size": 200}))


def evidence_of(prepared):
    shared_out = split_own_images(prepared, CLIENT)
    assert not isinstance(shared_out, str), shared_out
    return shared_out


def sent_by(prepared, evidence=None, secret=SECRET):
    return train_on_rest(evidence or evidence_of(prepared)[1], prepared, CLIENT, secret)


def attacked(prepared, message):
    """Evidence of one message."""
    ((part, evidence),) = views(evidence_of(prepared)[1], message, prepared.experiment.federation)
    assert part == PLAIN
    return evidence


def figures(found):
    return {each.name: each for each in found.findings}


def test_what_leaks_is_found_and_said(prepared):
    found = audit_own(prepared, CLIENT, sent_by(prepared), SECRET)
    by_name = figures(found)
    assert found.images == len(prepared.training.rows[CLIENT])
    assert not found.held_out
    assert by_name["label-histogram"].leaks
    assert by_name["membership"].leaks
    assert by_name["membership"].value > 0.6
    assert by_name["membership-at-1-percent"].value > 0.01
    assert "feature-linking" in by_name
    assert {each.view for each in found.findings} == {"the server"}
    assert [each.name for each in found.unmeasured] == ["class-names", "membership-leverage"]
    assert by_name["membership-replay"].leaks
    assert {each.of for each in found.findings} == {PLAIN}
    assert not any(name.startswith("one-image") for name in by_name)  # the party has more than one


def test_images_in_a_sum_of_features_are_found_by_who_knows_the_closed_form():
    prepared = prepare({**settings(), "method": {"name": "ridge"}})
    by_name = figures(audit_own(prepared, CLIENT, sent_by(prepared), SECRET))
    assert by_name["membership-leverage"].leaks
    assert by_name["membership-leverage"].value > 0.9


def test_what_the_party_would_send_is_drawn_from_its_secret():
    small = prepare(settings(training={"batch_size": 8}))  # in an order of batches
    one, again, other = (sent_by(small, secret=secret) for secret in (SECRET, SECRET, SECRET + 1))
    assert torch.equal(one.update.tensors["weight"], again.update.tensors["weight"])
    assert not torch.equal(one.update.tensors["weight"], other.update.tensors["weight"])
    assert one.update.weight == len(small.training.rows[CLIENT])


def test_noise_gives_nothing_away(prepared):
    sent = sent_by(prepared)
    generator = torch.Generator().manual_seed(3)
    noise = {name: t + torch.randn(t.shape, generator=generator) for name, t in sent.before.items()}
    evidence = attacked(prepared, Message(CLIENT, 0, sent.before, Update(CLIENT, noise, 1.0), 0.0, {}))
    (shares,) = histogram(evidence)
    found = member(evidence)[0]
    for each in (shares, found):
        assert each.interval[0] <= each.chance <= each.interval[1], each
        assert not each.leaks


def test_without_a_test_a_third_of_the_images_is_the_attackers(prepared):
    empty = torch.zeros(0, dtype=torch.long)
    alone = replace(prepared, test=replace(prepared.test, samples=prepared.test.samples.take(empty)))
    held_out, evidence = evidence_of(alone)
    rows = prepared.training.rows[CLIENT]
    assert held_out
    assert len(evidence.own) + len(evidence.outside) == len(rows) // 3
    trained = set(evidence.rows(CLIENT).tolist())
    attackers = set(evidence.own_rows.tolist()) | set(evidence.outside_rows.tolist())
    assert not trained & attackers
    assert trained | attackers == set(rows.tolist())
    features = prepared.training.samples.inputs["features"]
    assert torch.equal(evidence.own.inputs["features"], features[evidence.own_rows])
    assert torch.equal(evidence.own.labels, prepared.training.true_labels[evidence.own_rows])
    found = audit_own(alone, CLIENT, None, SECRET)
    assert found.held_out
    assert {"label-histogram", "membership", "feature-recovery"} <= figures(found).keys()
    few = {each.name: each.sentence for each in found.unmeasured}
    for name in ("membership-at-1-percent", "membership-replay-at-1-percent"):
        assert few[name].endswith(f"there are {len(evidence.outside)}.")


def test_too_few_labelled_images_and_too_little_time_are_said(prepared):
    empty = torch.zeros(0, dtype=torch.long)
    few = [rows[: MIN_ATTACK_IMAGES - 1] for rows in prepared.training.rows]
    alone = replace(
        prepared,
        test=replace(prepared.test, samples=prepared.test.samples.take(empty)),
        training=replace(prepared.training, rows=few),
    )
    found = audit_own(alone, CLIENT, None, SECRET)
    assert [each.name for each in found.unmeasured] == list(OWN_ATTACKS)
    assert all(f"takes {MIN_ATTACK_IMAGES} labelled images" in each.sentence for each in found.unmeasured)
    late = audit_own(prepared, CLIENT, sent_by(prepared), SECRET, seconds=0)
    assert not late.findings
    assert {each.sentence for each in late.unmeasured} == {"Not tried: 0 seconds were over."}


@pytest.fixture(scope="module")
def summed(prepared):
    """The same client under secure aggregation of three at least."""
    federation = prepared.experiment.federation.model_copy(update={"secure_sum": True, "least_clients": 3})
    experiment = prepared.experiment.model_copy(update={"federation": federation})
    return replace(prepared, experiment=experiment)


def test_under_secure_aggregation_the_update_alone_and_a_sum_are_attacked_and_never_zeros(prepared, summed):
    found = audit_own(summed, CLIENT, sent_by(prepared), SECRET)
    plain = figures(audit_own(prepared, CLIENT, sent_by(prepared), SECRET))
    parts = {part: {each.name: each for each in found.findings if each.of == part} for part in (ALONE, SUM)}
    assert {each.of for part in (found.findings, found.unmeasured) for each in part} == {ALONE, SUM}
    for name in ("label-histogram", "membership", "membership-replay"):
        # the worst case is what the server would learn without any mask
        assert parts[ALONE][name].value == pytest.approx(plain[name].value)
        assert parts[ALONE][name].leaks
        assert parts[SUM][name].value < parts[ALONE][name].value
    assert all(each.interval[0] < each.interval[1] for each in found.findings)


def test_a_sum_is_the_weighted_mean_with_imitated_others(prepared, summed):
    sent = sent_by(prepared)
    (_, alone), (part, in_sum) = views(evidence_of(summed)[1], sent, summed.experiment.federation)
    assert part == SUM
    (seen,), (own,) = in_sum.seen_by_server(), alone.seen_by_server()
    weight = sent.update.weight
    assert float(seen.items["weight in the mean"]) == 3 * weight  # two others of the same size
    assert float(seen.items["number of examples"]) == 3
    change, mine = seen.change["weight"].double(), own.change["weight"].double()
    assert change.any()
    likeness = float((change * mine).sum() / change.norm() / mine.norm())
    assert 0.2 < likeness < 0.99
    images = {tuple(row) for row in in_sum.own.inputs["features"].tolist()}
    assert len(in_sum.own) < len(alone.own)  # the others are of images that the attacker does not compare with
    assert images <= {tuple(row) for row in alone.own.inputs["features"].tolist()}


def test_a_client_without_images_sends_nothing_to_attack(prepared):
    _, evidence = evidence_of(prepared)
    nothing = replace(evidence.training, rows=[rows[:0] for rows in evidence.training.rows])
    evidence.prepared = replace(evidence.prepared, training=nothing)
    assert sent_by(prepared, evidence) is None
    found = audit_own(prepared, CLIENT, None, SECRET)
    assert {each.sentence for each in found.unmeasured} == {"The client sends no update in the first round."}


def test_reports_and_names_are_attacked_too():
    options = {"name": "fedpp", "visual_prompts": False, "context": 2}
    fedpp = prepare(settings(method=options, training={"local_epochs": 1}))
    evidence = attacked(fedpp, sent_by(fedpp))
    found = own_update.reported(evidence)
    assert found is not None
    counts, items = found
    assert items == ("report of counts",)
    truth = evidence.histogram(CLIENT)
    by_name = {each.name: each for each in histogram(evidence)}
    assert by_name["label-histogram-of-report"].value == pytest.approx(np.corrcoef(counts, truth)[0, 1])
    fed_mp = prepare(settings(method={"name": "fed-mp", "share": "classes"}, evaluation={"protocol": "closed"}))
    (names,) = own_update.called(attacked(fed_mp, sent_by(fed_mp)))
    assert names.leaks
    assert names.interval[0] <= names.value <= names.interval[1]


def test_shares_that_have_nothing_to_do_with_each_other_are_seldom_told():
    generator = np.random.default_rng(0)
    pairs = generator.dirichlet([0.2] * 10, size=(300, 2))  # a few large shares each, which often meet by chance
    low = [beside_chance(one, two, float(np.corrcoef(one, two)[0, 1]))[0] for one, two in pairs]
    assert np.mean(np.array(low) > 0) < 0.06
    shares = generator.dirichlet([1.0] * 10)
    assert beside_chance(shares, shares, 1.0)[0] > 0
