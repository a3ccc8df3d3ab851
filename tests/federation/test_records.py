"""Records of rounds: what a line of metrics.jsonl and a manifest of the journal may hold."""

import math

import pytest

from fedvl.config import MAX_CLIENTS, MAX_ROUNDS
from fedvl.federation.records import Budget, Manifest, Record
from fedvl.files import fitting

BUDGET = {"unit": "client", "epsilon": 3.0, "delta": 1e-5, "sampling": "poisson"}


def test_a_record_needs_its_round_alone():
    record = Record(round=1)
    assert (record.accuracy, record.cohort, record.void, record.bytes_up) == (None, [], "", 0)


@pytest.mark.parametrize(
    "changed, good",
    [
        ({"round": 1}, True),
        ({"round": MAX_ROUNDS}, True),
        ({"round": 0}, False),
        ({"round": MAX_ROUNDS + 1}, False),
        ({"round": "1"}, False),
        ({"loss": math.nan}, True),
        ({"loss": "high"}, False),
        ({"cohort": [0, MAX_CLIENTS - 1]}, True),
        ({"cohort": [MAX_CLIENTS]}, False),
        ({"dropped": [-1]}, False),
        ({"refused": [{"client": 2, "reason": "late"}]}, True),
        ({"refused": [{"client": 2}]}, False),
        ({"bytes_up": -1}, False),
        ({"bytes_down": 2**63}, False),
        ({"of_a_later_version": {}}, True),
    ],
)
def test_fields_of_a_record_have_their_types_and_limits(changed, good):
    assert (fitting(Record, {"round": 1, **changed}) is not None) is good


@pytest.mark.parametrize(
    "changed, good",
    [
        ({}, True),
        ({"unit": "record", "of": "patient", "group": {"column": "patient", "largest": 3}}, True),
        ({"unit": "hospital"}, False),
        ({"epsilon": 0}, True),
        ({"epsilon": -0.1}, False),
        ({"epsilon": math.inf}, True),
        ({"delta": 0.0}, False),
        ({"delta": 1.0}, False),
        ({"rate": 0.0}, False),
        ({"rate": 1.0}, True),
        ({"rate": 1.1}, False),
        ({"sigma": -1.0}, False),
        ({"planned": 0}, False),
        ({"released": [{"name": "sizes", "keys": ["size.*"], "state": "covered", "why": "noise"}]}, True),
        ({"released": [{"name": "sizes", "keys": [], "state": "hidden", "why": "noise"}]}, False),
        ({"sums": ["a"] * 101}, False),
    ],
)
def test_fields_of_a_budget_have_their_types_and_limits(changed, good):
    assert (fitting(Budget, {**BUDGET, **changed}) is not None) is good
    assert (fitting(Record, {"round": 1, "privacy": {**BUDGET, **changed}}) is not None) is good


def test_a_manifest_has_a_hash_its_earlier_rounds_and_a_record():
    good: dict[str, object] = {"tensors_sha256": "0" * 64, "earlier": [1, MAX_ROUNDS], "record": {"round": 3}}
    assert fitting(Manifest, good)
    for name, value in (
        ("tensors_sha256", "0"),
        ("earlier", [0]),
        ("earlier", [MAX_ROUNDS + 1]),
        ("record", {}),
    ):
        assert fitting(Manifest, {**good, name: value}) is None


def test_an_entry_of_a_ledger_has_a_rate_and_a_noise_multiplier():
    spent = Budget(unit="record", epsilon=1.0, delta=1e-5, sampling="by chance", rate=0.5, sigma=2.0)
    assert spent.step == (0.5, 2.0)
    for part in ("rate", "sigma"):
        with pytest.raises(AssertionError):
            _ = spent.model_copy(update={part: None}).step
