"""The page of the papers' claims: each kind of check by hand, and verdicts that follow the figures."""

import pytest

from tools.claims_page import (
    PAGE,
    Above,
    AverageAbove,
    Because,
    Bound,
    Change,
    Check,
    Claim,
    Level,
    Rounds,
    Within,
    page,
    read_claims,
    unexplained,
)
from tools.reproduced_page import Cell, Series, Table, read_tables


def table(figures: dict[tuple[str, str], float], **changes: object) -> Table:
    cells = [Cell(row=row, column=column, mean=mean) for (row, column), mean in figures.items()]
    fields = {
        "recipe": "r",
        "command": "",
        "commit": "",
        "version": "",
        "date": "",
        "seeds": 1,
        "settings_sha256": "",
        "rows": list(dict.fromkeys(row for row, _ in figures)),
        "columns": list(dict.fromkeys(column for _, column in figures)),
        "cells": cells,
    }
    return Table.model_validate(fields | changes)


TWO = {("a", "x"): 60.0, ("b", "x"): 50.0, ("a", "y"): 30.0, ("b", "y"): 40.0}


def verdict(check: Check, found: Table) -> str:
    return Claim(paper="", where="", says="", recipe="r", checks=[check]).judged({"r": found})[0]


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        (Above(higher="a", than=["b"]), [True, False]),
        (Above(higher="a", than=["b"], by=10.0), [True, False]),
        (Above(higher="a", than=["b"], by=10.1), [False, False]),
        (Above(higher="a", than=["b"], factor=1.2), [True, False]),
        (Above(higher="a", than=["b"], factor=1.21), [False, False]),
        (Above(higher="x", than=["y"]), [True, True]),
        (Within(row="a", within=10.0, of=["b"]), [True, True]),
        (Within(row="a", within=9.9, of=["b"]), [False, False]),
        (Level(level=["a", "b"], within=10.0), [False, True]),
        (Bound(cells=[("a", "x"), ("b", "x")], above=55.0), [True, False]),
        (Bound(cells=[("a", "x"), ("b", "x")], below=55.0), [False, True]),
        (Change(change="b", more_than=["a"], first="x", then="y"), [True]),  # -10 against -30
        (Change(change="a", more_than=["b"], first="x", then="y"), [False]),
        (AverageAbove(average="a", by=0.0, among=["x", "y"]), [True]),  # both 45
        (AverageAbove(average="a", by=0.1, among=["x", "y"]), [False]),
        (AverageAbove(average="a", by=10.0, among=["x"]), [True]),
    ],
)
def test_a_check_by_hand(check: Check, holds: list[bool]) -> None:
    assert list(check.found(table(TWO)).holds) == holds
    expected = "shown" if all(holds) else "shown in part" if any(holds) else "not shown"
    assert verdict(check, table(TWO)) == expected


def test_a_curve_is_near_its_best_by_a_round() -> None:
    found = table(TWO, series=[Series(row="a", column="x", values=[50.0, 58.0, 60.0])])
    for by_round, within, holds in ((1, 2.0, True), (1, 1.9, False), (2, 0.0, True)):
        assert Rounds(curve="a", column="x", by_round=by_round, within=within).found(found).holds == [holds]
    assert Rounds(curve="b", column="x", by_round=1, within=2.0).found(found).holds == []


def test_equal_figures_as_shown_are_not_above() -> None:
    assert verdict(Above(higher="a", than=["b"]), table({("a", "x"): 50.04, ("b", "x"): 49.96})) == "not shown"


@pytest.mark.parametrize(
    "check",
    [
        Above(higher="a", than=["b"]),
        Within(row="a", within=1.0, of=["b"]),
        Level(level=["a"], within=1.0),
        Bound(cells=[("a", "x")], above=0.0),
        Change(change="a", more_than=["b"], first="x", then="y"),
    ],
    ids=lambda check: type(check).__name__,
)
def test_places_near_chance_are_not_counted(check: Check) -> None:
    cells = [Cell(row=row, column=column, mean=mean, near_chance=True) for (row, column), mean in TWO.items()]
    assert verdict(check, table(TWO, cells=cells)) == "cannot be shown"


def test_a_claim_of_which_one_part_has_no_figure_cannot_be_shown() -> None:
    checks: list[Check] = [Bound(cells=[("a", "x")], above=0.0), Bound(cells=[("c", "x")], above=0.0)]
    claim = Claim(paper="", where="", says="", recipe="r", checks=checks)
    assert claim.judged({"r": table(TWO)})[0] == "cannot be shown"
    assert claim.judged({})[0] == "cannot be shown"


def test_the_sentence_has_the_leads_and_in_how_many_places_intervals_are_apart() -> None:
    cells = [
        Cell(row="a", column="x", mean=60.0, interval=(58.0, 62.0)),
        Cell(row="b", column="x", mean=50.0, interval=(48.0, 57.9)),
        Cell(row="a", column="y", mean=30.0, interval=(28.0, 32.0)),
        Cell(row="b", column="y", mean=29.0, interval=(27.0, 31.0)),
    ]
    found = Above(higher="a", than=["b"]).found(table(TWO, cells=cells))
    assert found.sentence == "a above: b in 2 of 2 (+1.0 to +10.0, intervals apart in 1)."


def test_a_changed_figure_changes_the_verdict_and_asks_for_its_reason() -> None:
    claim = Claim(
        paper="P",
        where="table 1",
        says="a is above b.",
        recipe="r",
        checks=[Above(higher="a", than=["b"])],
        because=Because(in_part="Few images."),
    )
    before, after = table(TWO), table({**TWO, ("a", "x"): 49.0})
    assert "| shown in part | a above: b in 1 of 2 (\u221210.0 to +10.0). Few images. |" in page([claim], {"r": before})
    assert unexplained([claim], {"r": before}) == []
    assert "| not shown | a above: b in 0 of 2 (\u221210.0 to \u22121.0). |" in page([claim], {"r": after})
    assert unexplained([claim], {"r": after}) == ["P: a is above b."]


def test_the_page_follows_from_the_stored_tables_and_every_verdict_has_its_reason() -> None:
    claims, tables = read_claims(), read_tables()
    assert unexplained(claims, tables) == []
    assert PAGE.read_text(encoding="utf-8") == page(claims, tables), "run python -m tools.claims_page"


@pytest.mark.parametrize("claim", [claim for claim in read_claims() if claim.checks], ids=lambda claim: claim.says[:40])
def test_every_claim_depends_on_the_figures_of_its_table(claim: Claim) -> None:
    """Figures that are all equal, or that rise or fall from row to row or column to column, change the verdict."""
    now = read_tables()[claim.recipe]
    verdicts = {claim.judged({claim.recipe: now})[0]}
    for by_row, by_column, start in (
        (0.0, 0.0, 0.0),
        (0, 0, 98.0),
        (50, 0, 1),
        (-50, 0, 999),
        (0, 50, 1),
        (0, -50, 999),
    ):
        figures = {
            (row, column): start + by_row * number + by_column * other
            for number, row in enumerate(now.rows)
            for other, column in enumerate(now.columns)
        }
        changed = table(figures, series=[one.model_copy(update={"values": [0.0, start, 50.0]}) for one in now.series])
        verdicts.add(claim.judged({claim.recipe: changed})[0])
    assert len(verdicts) > 1
