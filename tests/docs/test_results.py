"""Tables of results: generated from result files of one commit, current, and not beside figures typed by hand."""

import re
from pathlib import Path

import pytest

from fedvl.comparisons.grid import read_grid
from tools.results_page import (
    BLOCK,
    CHOICES,
    GRIDS,
    PAGES,
    TIMED,
    Choice,
    choices,
    filled,
    read_results,
    settings_sha256,
)

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = read_results()
AGAIN = "run python -m tools.results_page and commit what it writes"
asked = {match[2] for page in PAGES for match in BLOCK.finditer(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_has_the_figures_of_the_result_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, RESULTS) == text, AGAIN


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_of_the_grid_that_is_there(name: str) -> None:
    result = RESULTS[name]
    assert result.name == name
    if result.kind == "benchmark":
        assert name in TIMED
        return
    grid = read_grid(GRIDS / f"{name}.toml")
    assert result.settings_sha256 == settings_sha256(GRIDS / f"{name}.toml"), (
        f"run python -m tools.measure_results --only {name}"
    )
    assert (result.rows, result.columns, result.seeds) == (list(grid.rows), list(grid.columns), grid.seeds)
    assert {(cell.row, cell.column) for cell in result.cells} == {(r, c) for r in grid.rows for c in grid.columns}
    assert {cell.n for cell in result.cells} == {grid.seeds}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_where_it_comes_from(name: str) -> None:
    result = RESULTS[name]
    assert re.fullmatch(r"[0-9a-f]{40}", result.commit)
    assert re.search(r"\d+ cores .*torch \d", result.machine)
    assert result.seconds > 0
    assert name in result.command or result.kind == "benchmark"


def test_all_results_are_of_one_commit() -> None:
    assert len({result.commit for result in RESULTS.values()}) == 1


def test_every_grid_benchmark_and_result_is_on_a_page() -> None:
    assert {*RESULTS, *TIMED, *(path.stem for path in GRIDS.glob("*.toml"))} <= asked


@pytest.mark.parametrize("name", ["results.md", "performance.md"])
def test_a_page_of_results_is_short_and_has_no_figure_typed_by_hand(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    written = BLOCK.sub("", text)
    assert re.findall(r"\d+\.\d+|\d+(?:\.\d+)? ?(?:%|ms|µs)(?! conf| inter)", written) == []


def test_a_choice_shows_the_figures_of_its_table() -> None:
    shown = choices(RESULTS)
    unlabelled = RESULTS["unlabelled"].figure("FST-CBDG", "dirichlet:0.1")
    assert f"FST-CBDG {unlabelled.mean:.1f} ± {unlabelled.deviation:.1f}" in shown
    damaged = RESULTS | {"unlabelled": RESULTS["unlabelled"].model_copy(update={"cells": RESULTS["labels"].cells})}
    with pytest.raises(StopIteration):
        choices(damaged)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.situation)
def test_the_method_that_is_advised_has_the_best_figure_of_its_row(choice: Choice) -> None:
    if choice.result not in RESULTS:
        pytest.skip(f"{choice.result} was not measured")
    figures = [RESULTS[choice.result].figure(row, choice.column).mean for row in choice.rows]
    assert figures[0] == (min if choice.column.startswith("bytes") else max)(figures)
