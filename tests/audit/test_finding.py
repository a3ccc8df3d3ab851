"""The measures of attacks, against values by hand."""

import pytest
from pydantic import TypeAdapter

from fedvl.audit.finding import BELOW, OPEN, SERVER, SHOWN, Finding, of_100


@pytest.mark.parametrize(
    ("interval", "verdict", "says"),
    [
        ((0.51, 0.9), SHOWN, "Shown: the interval lies above the chance level."),
        ((0.51, 0.54), SHOWN, "Shown: the interval lies above the chance level."),
        # detectable: 0.5 + (0.63 - 0.37) / (2 x 1.96) x (1.96 + 0.84)
        (
            (0.37, 0.63),
            OPEN,
            "Not shown, could be up to 0.63: with 3 clients, this attack shows a leak of 0.69 in 8 of 10",
        ),
        ((0.5, 0.55), OPEN, "Not shown, could be up to 0.55"),
        ((0.46, 0.549), BELOW, "Shown to be below 0.55 for this attack."),
        ((0.1, 0.4), BELOW, "Shown to be below 0.55 for this attack."),
    ],
)
def test_there_are_three_verdicts(interval, verdict, says):
    found = Finding("membership", SERVER, "", 0.5, interval, 0.5, "", counted="3 clients")
    assert found.verdict == verdict
    assert found.leaks is (verdict == SHOWN)
    assert found.conclusion.startswith(says)
    assert TypeAdapter(Finding).dump_python(found)["verdict"] == verdict


def test_the_goal_is_a_margin_above_the_chance_level_by_kind_of_measure():
    for unit, goal in (("", 0.55), ("r", 0.6), (" dB", 1.5)):
        assert Finding("membership", SERVER, "", 0.5, (0.4, 0.6), 0.5, "", unit).goal == pytest.approx(goal)


def test_a_share_of_100_is_rounded_as_its_value_is():
    assert f"{0.975:.2f}" == "0.97"  # as a binary fraction it is below
    assert [of_100(share) for share in (0.975, 0.0, 1.0, 0.126)] == ["97", "0", "100", "13"]
