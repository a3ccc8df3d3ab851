"""Updates that come twice, late, from elsewhere or under another's name are refused, and counted once."""

import pytest
import torch
from helpers.small import RAGGED, run_quietly, small_federation, small_method

from fedvl.federation.checks import Report, sort_out, sound_reports, sum_of_reports
from fedvl.methods.base import Update
from fedvl.methods.roles import Shapes
from fedvl.tensors import digest

COHORT = (0, 2, 3)


@pytest.fixture(scope="module")
def federation():
    return run_quietly(small_federation(small_method("linear"), rounds=1))


@pytest.fixture(scope="module")
def updates(federation):
    """This round's updates, the last round's, and those of a run of another method."""
    other = small_federation(small_method("fed-mp"), rounds=1)
    return {
        "now": [r.update for r in federation.engine.train(1, range(5), federation.shared)],
        "before": [r.update for r in federation.engine.train(0, range(5), federation.shared)],
        "elsewhere": [r.update for r in other.engine.train(0, range(5), other.shared)],
    }


def of(client, updates):
    return next(update for update in updates if update.client == client)


# What comes beside this round's updates, and why it is refused.
INTRUDERS = {
    "the same once more": (lambda u: [of(2, u["now"])], "answered twice"),
    "the same twice more": (lambda u: [of(2, u["now"])] * 2, "answered twice"),
    "a second one that says otherwise": (lambda u: [Update(2, of(3, u["now"]).tensors, 9.0)], "answered twice"),
    "a second one of great weight": (lambda u: [of(2, u["now"])._replace(weight=1e8)], "answered twice"),
    "last round's, replayed": (lambda u: [of(3, u["before"])], "answered twice"),
    "last round's, of one not asked now": (lambda u: [of(4, u["before"])], "was not asked this round"),
    "this round's, of one not asked": (lambda u: [of(4, u["now"])], "was not asked this round"),
    "of a client that does not exist": (lambda u: [of(0, u["now"])._replace(client=99)], "was not asked this round"),
    "of client -1": (lambda u: [of(0, u["now"])._replace(client=-1)], "was not asked this round"),
    "another run's": (lambda u: [of(4, u["elsewhere"])], "was not asked this round"),
}


@pytest.mark.parametrize("what", INTRUDERS)
def test_an_intruder_is_refused_and_changes_nothing(federation, updates, what):
    wanted = [of(client, updates["now"]) for client in COHORT]
    asked = dict.fromkeys(COHORT, max(RAGGED))
    intruders, reason = INTRUDERS[what][0](updates), INTRUDERS[what][1]
    good, refusals = sort_out(
        [*wanted, *intruders], asked, dict.fromkeys(asked, federation.shared), federation.method, federation.config
    )
    assert [(refusal.client, refusal.reason) for refusal in refusals] == [(u.client, reason) for u in intruders]
    merged = federation.method.merge(federation.shared, good)
    assert digest(merged) == digest(federation.method.merge(federation.shared, wanted))


def test_another_runs_update_is_refused_even_if_it_comes_first(federation, updates):
    intruder = of(2, updates["elsewhere"])
    asked = dict.fromkeys(range(5), max(RAGGED))
    good, refusals = sort_out(
        [intruder, *updates["now"]],
        asked,
        dict.fromkeys(asked, federation.shared),
        federation.method,
        federation.config,
    )
    assert [update.client for update in good] == [0, 2, 3, 4]
    assert refusals[0].client == 2
    assert "missing or not asked for" in refusals[0].reason


def test_a_client_reports_once_and_the_order_of_reports_cannot_be_seen():
    generator = torch.Generator().manual_seed(0)
    reports = [Report(client, {"counts": torch.rand(5, generator=generator)}) for client in range(7)]
    shapes: Shapes = {"counts": (5,)}
    good, refusals = sound_reports([*reversed(reports), Report(3, {"counts": torch.full((5,), 9.0)})], shapes)
    assert good == reports
    assert refusals == [(3, "in its report answered twice")]
    total = sum_of_reports(reports).tensors["counts"]
    assert torch.equal(total, sum_of_reports(reports[::-1]).tensors["counts"])
    torch.testing.assert_close(total.double(), sum(report.tensors["counts"].double() for report in reports))
