"""Planted leaks: a method that gives nothing away, and the same method with a leak of every kind.

``pytest -s tests/audit/test_leaks.py`` prints what showed each leak.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.audited import evidence_of

from fedvl.audit import (
    feature_recovery,
    label_histogram,
    label_probe,
    membership,
    membership_replay,
    perform,
)
from fedvl.audit.finding import SERVER, Finding, Unmeasured
from fedvl.audit.membership import compared
from fedvl.audit.membership_scores import score_candidates
from fedvl.audit.perform import leaves, make_attacks, unexamined
from fedvl.display import Silent

FOLDER = Path(__file__).parents[1] / "helpers" / "leaks"
LEAKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
FEATURES = (label_histogram, label_probe, membership, membership_replay, feature_recovery)  # the rest needs a dataset


def audited(path, monkeypatch):
    monkeypatch.setattr(perform, "ATTACKS", FEATURES)
    evidence = evidence_of(path)
    found = make_attacks(evidence, Silent())
    rows = leaves(evidence, [each for each in found if isinstance(each, Finding)])
    return evidence, found, rows


def test_there_are_ten_kinds_and_more():
    assert len(LEAKS) >= 10


def test_a_method_that_gives_nothing_away_gets_no_value_at_all(tmp_path, monkeypatch):
    """No 0.50 by construction: what does not apply is not a number."""
    path = tmp_path / "quiet.py"
    path.write_text("from helpers.quiet import Quiet\n\n\nclass Silence(Quiet):\n    pass\n")
    _, found, rows = audited(path, monkeypatch)
    assert [each for each in found if isinstance(each, Finding) and each.view == SERVER and each.leaks] == []
    measured = {each.name for each in found if isinstance(each, Finding) and each.view == SERVER}
    assert measured <= {"feature-recovery", "feature-linking", "one-image-recovery", "one-image-linking"}
    assert {row.note for row in rows if row.name != "weight"} == {"the same for all clients"}
    assert unexamined(rows) == []


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_shown(leak, monkeypatch):
    _, found, rows = audited(FOLDER / f"{leak}.py", monkeypatch)
    shown = [each for each in found if isinstance(each, Finding) and each.leaks and each.view == SERVER]
    told = ", ".join(f"{each.name} {each.value:.2f}" for each in shown)
    print(f"| {leak} | {told} | {', '.join(unexamined(rows)) or '-'} |")
    assert shown
    assert unexamined(rows) == []


def test_leverage_finds_every_image_of_every_client_in_a_gram_matrix():
    evidence = evidence_of(FOLDER / "gram_matrix.py", rounds=1, clients=10)
    scored = score_candidates(evidence, evidence.seen_by_server())
    tried = compared(evidence, scored, of_sum=False)
    for scores, inside, weights in zip(tried.scores, tried.inside, tried.weights, strict=True):
        assert scores[inside].min() > scores[weights > 0].max()
    assert len(scored) == 10
    value = membership_replay.attack(evidence)[0]
    assert isinstance(value, Finding)
    assert value.value == 1.0
    assert value.interval[0] < 1.0  # exact, and not as wide as nothing
    assert "gram" in value.items


def test_what_cannot_be_imitated_is_said_and_flagged(monkeypatch):
    evidence = evidence_of(FOLDER / "raw_features.py", rounds=1)

    def broken(name, tensors, received, samples):
        raise RuntimeError("not for strangers")

    monkeypatch.setattr(perform, "ATTACKS", FEATURES)
    sent = evidence.method.role.sent
    monkeypatch.setitem(sent, "gist", replace(sent["gist"], make=broken))
    found = make_attacks(evidence, Silent())
    assert not [each for each in found if isinstance(each, Finding) and each.name.startswith("membership-replay")]
    said = [each for each in found if isinstance(each, Unmeasured) and "not for strangers" in each.sentence]
    assert {each.name for each in said} >= {"membership-replay", "label-probe"}
    rows = leaves(evidence, [each for each in found if isinstance(each, Finding)])
    assert "gist" in unexamined(rows)


def test_a_client_of_one_image_that_fails_does_not_stop_the_other_attacks(monkeypatch):
    _, found, _ = audited(FOLDER / "fragile.py", monkeypatch)
    by_name = {each.name: each for each in found if each.view == SERVER}
    assert isinstance(by_name["one-image-recovery"], Unmeasured)
    assert "fails for an imitated client of 1 images: too few images" in by_name["one-image-recovery"].sentence
    replayed = by_name["membership-replay"]
    assert isinstance(replayed, Finding)
    assert replayed.value == 1.0
