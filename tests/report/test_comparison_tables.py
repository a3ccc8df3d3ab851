"""The table of a comparison as CSV, LaTeX and HTML, and in a terminal."""

import csv
import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.grids import outcome_of

from fedvl.comparisons.contents import Averaged, Comparison, GridCell
from fedvl.comparisons.run import summarise
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import Interval
from fedvl.report.comparison_tables import (
    AverageCell,
    cell_text,
    csv_table,
    footnote,
    html_table,
    latex_table,
    leads,
    terminal_tables,
    with_averages,
)


@pytest.fixture
def summary() -> Comparison:
    figures = {("50% & <b>", "x_1"): [10.0, 20.0, 30.0], ("plain", "x_1"): [1.0, 2.0, 3.5]}
    return summarise(outcome_of(figures, title="T & t"), "fedvl compare --methods a")


def test_csv_has_every_digit(summary: Comparison) -> None:
    lines = csv_table(summary).splitlines()
    assert lines[0] == "row,column,measure,mean,deviation,n,p,against,paper"
    assert lines[1].startswith("50% & <b>,x_1,accuracy,20.0,10.0,3,0.0")
    assert lines[2].startswith("plain,x_1,accuracy,2.1666666666666665,")


def test_latex_is_escaped_booktabs(summary: Comparison) -> None:
    text = latex_table(summary)
    assert r"50\% \& $<$b$>$ & \textbf{20.0 $\pm$ 10.0}" in text
    assert r"plain & \underline{2.2 $\pm$ 1.3}" in text
    assert r"x\_1" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert r"\caption{T \& t}" in text
    assert r"\label{tab:t-t}" in text
    assert "Mean and standard deviation over 3 seeds" in text


def test_latex_has_intervals_in_place_of_deviations_if_these_are_asked_for(summary: Comparison) -> None:
    (first, *rest) = summary.cells
    cells = [first.model_copy(update={"interval": Interval(15.0, 25.0), "images": 1000}), *rest]
    text = latex_table(summary.model_copy(update={"cells": cells, "style": "interval"}))
    assert r"\textbf{20.0 (15.0 to 25.0)}" in text
    assert r"interval of 95 \% over 3 seeds on 1,000 test images." in text


AGAINST = {
    ("a", "x"): [10.0, 20.0, 30.0],
    ("b", "x"): [11.0, 22.0, 33.0],
    ("c", "x"): [20.0, 30.5, 40.0],
    ("d", "x"): [11.0, 21.0, 31.0],
}


def against_a() -> Comparison:
    outcome = outcome_of(AGAINST)
    outcome.grid = outcome.grid.compared_with("a")
    return summarise(outcome, "c", outcome.grid)


def test_rows_are_compared_with_one_row_on_common_seeds_with_holms_correction() -> None:
    found = {one.row: one for one in against_a().against}
    assert found["b"].difference == pytest.approx(2.0)
    t = 2.0 / (1.0 / 3**0.5)  # differences 1, 2, 3: mean 2, deviation 1
    assert found["b"].p == pytest.approx(
        1 - t / (2 + t**2) ** 0.5
    )  # two-sided, of Student's t with 2 degrees of freedom
    assert found["b"].holm == found["b"].p  # the larger of two
    assert found["c"].holm == pytest.approx(2 * (found["c"].p or 0))
    assert (found["d"].p, found["d"].holm) == (None, None)  # all differences are alike
    assert found["b"].seeds == [0, 1, 2]
    with pytest.raises(FedVLError, match="There is no row 'z' to compare with; rows are a, b, c, d"):
        outcome_of(AGAINST).grid.compared_with("z")


def test_the_tables_have_the_p_values_of_each_column() -> None:
    summary = against_a()
    sentence = "Against a (paired t-test over seeds, Holm's correction over rows): b +2.0, p = 0.074; c +10.2, p < 0.001; d +1.0"
    assert sentence in footnote(summary)
    text = latex_table(summary)
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert "b & 0.074 " in text
    assert "d & -- " in text
    lines = list(csv.DictReader(io.StringIO(csv_table(summary))))
    assert [line["reference"] for line in lines] == ["", "a", "a", "a"]
    assert float(lines[1]["p_holm"]) == pytest.approx(0.0742, abs=1e-4)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="TeX is not installed")
def test_tables_compile(tmp_path: Path, summary: Comparison) -> None:
    body = latex_table(summary) + latex_table(against_a())
    page = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}" + body + "\\end{document}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout


def test_html_is_escaped_and_says_what_was_tested(summary: Comparison) -> None:
    page = html_table(summary)
    assert "50% &amp; &lt;b&gt;" in page
    assert "paired t-test" in page
    assert "n = 3 seeds" in page
    assert "http" not in page


def test_no_star_is_explained_where_none_can_be(summary: Comparison) -> None:
    few = summarise(outcome_of({("a", "x"): [1.0], ("b", "x"): [2.0]}), "c")
    assert "t-test" not in html_table(few)
    assert "n = 1 seed." in html_table(few)


def test_equal_rows_are_called_equal_and_not_a_lead_of_nothing() -> None:
    lead = {"against": "b", "compared": [0, 1]}
    cells = [
        cell("a", "x", [1.0, 2.0], **lead, lead=[0.0, 0.0]),
        cell("b", "x", [1.0, 2.0]),
        cell("a", "y", [3.0, 4.0], **lead, lead=[1.0, 3.0], best=True, ahead=2.0, significant=True),
        cell("b", "y", [1.0, 2.0]),
    ]
    equal, ahead = leads(Comparison(kind="table", rows=["a", "b"], columns=["x", "y"], cells=cells))
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
def test_no_name_is_a_formula_in_a_spreadsheet(sign: str, summary: Comparison) -> None:
    name = f"{sign}cmd|' /C calc'!A1"
    cells = [summary.cells[0].model_copy(update={"row": name, "mean": -1.5}), *summary.cells[1:]]
    summary = summary.model_copy(update={"cells": cells})
    read = list(csv.DictReader(io.StringIO(csv_table(summary), newline="")))
    assert (read[0]["row"], read[0]["mean"]) == (f"'{name}", "-1.5")


def cell(row: str, column: str, values: list[float], **more: Any) -> GridCell:
    found = {"row": row, "column": column, "measure": "accuracy", "mean": sum(values) / len(values), "deviation": None}
    found |= {"n": len(values), "values": values, "seeds": [0, 1], "best": False, "significant": False}
    return GridCell.model_validate(found | more)


AVERAGED = Averaged(name="average", columns=["pets", "food", "cars"])


def averaged_table(*more: GridCell) -> Comparison:
    cells = [
        cell("a", "pets", [50.0, 52.0], paper=60.0),
        cell("a", "food", [70.0, 74.0], paper=70.0),
        cell("a", "cars", [30.0, 30.0], paper=40.5),
        cell("b", "pets", [90.0, 92.0]),
        cell("b", "food", [80.0, 80.0]),
        *more,
    ]
    columns = AVERAGED.columns
    return Comparison(kind="table", rows=["a", "b", "c"], columns=columns, cells=cells, averages=[AVERAGED])


def test_columns_of_datasets_have_their_average_and_say_what_is_missing() -> None:
    """a: 51, 72 and 30, in seed 0 50 on average, in seed 1 52; b has two of three, whose mean is not the best."""
    wide = with_averages(averaged_table())
    assert wide.columns == ["pets", "food", "cars", "average"]
    ours, theirs = (found for found in wide.cells if isinstance(found, AverageCell))
    assert [ours.mean, ours.deviation] == pytest.approx([51.0, 2**0.5])
    assert [ours.paper, ours.missing, ours.best] == pytest.approx([170.5 / 3, 0, False])
    assert (theirs.mean, theirs.paper, theirs.missing, theirs.best) == (85.5, None, 1, False)
    assert cell_text(theirs) == "85.5 ± 0.7 (of 2 of 3 datasets)"
    for page in (html_table(averaged_table()), latex_table(averaged_table())):
        assert "average" in page
        assert "51.0" in page
        assert "(of 2 of 3 datasets)" in page
    (table,) = terminal_tables(averaged_table(), width=200)
    texts = {str(column.header): [str(text) for text in column.cells] for column in table.columns}
    assert "average" in texts or "average" in texts[""]


def test_the_highest_average_is_the_best_among_whole_ones() -> None:
    summary = averaged_table(cell("b", "cars", [20.0, 20.0]), cell("c", "pets", [99.0, 99.0]))
    found = {one.row: one for one in with_averages(summary).cells if one.column == "average"}
    assert {row: one.best for row, one in found.items()} == {"a": False, "b": True}


def test_without_datasets_to_average_a_table_stays_as_it_is() -> None:
    summary = averaged_table().model_copy(update={"averages": []})
    assert with_averages(summary) is summary
