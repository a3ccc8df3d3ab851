"""The table of a comparison as CSV, LaTeX and HTML, and in a terminal."""

import csv
import io
from typing import Any

import pytest
from helpers.grids import outcome_of

from fedvl.comparisons.run import summarise
from fedvl.report.comparison_tables import csv_table, html_table, latex_table, leads, terminal_tables


@pytest.fixture
def summary() -> dict[str, Any]:
    figures = {("50% & <b>", "x_1"): [10.0, 20.0, 30.0], ("plain", "x_1"): [1.0, 2.0, 3.5]}
    return summarise(outcome_of(figures, title="T & t"), "fedvl compare --methods a")


def test_csv_has_every_digit(summary: dict[str, Any]) -> None:
    lines = csv_table(summary).splitlines()
    assert lines[0] == "row,column,measure,mean,deviation,n,p,against,paper"
    assert lines[1].startswith("50% & <b>,x_1,accuracy,20.0,10.0,3,0.0")
    assert lines[2].startswith("plain,x_1,accuracy,2.1666666666666665,")


def test_latex_is_escaped_booktabs(summary: dict[str, Any]) -> None:
    text = latex_table(summary)
    assert r"50\% \& <b> & \textbf{20.0 $\pm$ 10.0}" in text
    assert r"x\_1" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


def test_html_is_escaped_and_says_what_was_tested(summary: dict[str, Any]) -> None:
    page = html_table(summary)
    assert "50% &amp; &lt;b&gt;" in page
    assert "paired t-test" in page
    assert "n = 3 seeds" in page
    assert "http" not in page


def test_no_star_is_explained_where_none_can_be(summary: dict[str, Any]) -> None:
    few = summarise(outcome_of({("a", "x"): [1.0], ("b", "x"): [2.0]}), "c")
    assert "t-test" not in html_table(few)
    assert "n = 1 seed." in html_table(few)


def test_equal_rows_are_called_equal_and_not_a_lead_of_nothing() -> None:
    place = {"column": "x", "against": None, "lead": None}
    cells = [
        {"row": "a", **place, "against": "b", "lead": [0.0, 0.0], "best": False, "compared": [0, 1]},
        {"row": "b", **place},
        {"row": "a", **place, "column": "y", "against": "b", "lead": [1.0, 3.0]}
        | {"best": True, "ahead": 2.0, "significant": True, "compared": [0, 1]},
        {"row": "b", **place, "column": "y"},
    ]
    equal, ahead = leads({"cells": cells, "columns": ["x", "y"]})
    assert equal == "a and b (x) are equal."
    assert ahead.startswith("a leads b (y) by +2.0 points")


def test_a_wide_table_is_turned_and_then_cut_to_the_terminal() -> None:
    figures = {(f"method {i}", f"c{j}"): [1.0] for i in range(4) for j in range(9)}
    summary = summarise(outcome_of(figures), "c")
    (whole,) = terminal_tables(summary, width=80)
    assert (len(whole.columns), whole.row_count) == (1 + 4, 9)
    cut = terminal_tables(summary, width=25)  # names of 2, then 10 for each of "method 0" and its space
    assert [len(table.columns) - 1 for table in cut] == [2, 2]


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t"])
def test_no_name_is_a_formula_in_a_spreadsheet(sign: str, summary: dict[str, Any]) -> None:
    name = f"{sign}cmd|' /C calc'!A1"
    summary["rows"] = [name if row == summary["cells"][0]["row"] else row for row in summary["rows"]]
    summary["cells"][0] |= {"row": name, "mean": -1.5}
    read = list(csv.DictReader(io.StringIO(csv_table(summary), newline="")))
    assert (read[0]["row"], read[0]["mean"]) == (f"'{name}", "-1.5")
