"""Tables of the documentation from result files: what is shown, what is kept of a run, and what makes a file stale."""

import argparse
from pathlib import Path

import pytest

from fedvl.comparisons.grid import read_grid
from tools import measure_results, results_page
from tools.results_page import BLOCK, CHOICES, GRIDS, Cell, Result, anchor, filled, number, section, settings_sha256

GRID = """
title = "Two heads"
note = "A note."
seeds = 2
[base]
data = { dataset = "cifar10-mini", shots = 2, test_shots = 5, clients = 2, minimum = 0 }
federation = { rounds = 1 }
[rows]
"zero-shot" = { method.name = "zero-shot" }
"linear" = { method.name = "linear" }
[columns]
"iid" = { data.partition = "iid" }
[[claims]]
higher = "linear"
than = ["zero-shot"]
"""


def result(**changes: object) -> Result:
    cells = [
        Cell(row="zero-shot", column="iid", mean=50.04, deviation=0.0, interval=(40.0, 60.0), n=2),
        Cell(row="linear", column="iid", mean=50.06, deviation=1.25, interval=(41.26, 58.0), n=2),
    ]
    fields = {
        "name": "heads",
        "kind": "grid",
        "command": "fedvl compare benchmarks/results/heads.toml",
        "commit": "0123456789" * 4,
        "version": "0.1.0",
        "date": "2026-11-18T20:00:00+00:00",
        "machine": "2 cores (x86_64), torch 2.13.0",
        "load": 0.4,
        "seconds": 12.4,
        "seeds": 2,
        "dataset": "cifar10-mini",
        "model": "fedvl-tiny",
        "rows": ["zero-shot", "linear"],
        "columns": ["iid"],
        "cells": cells,
    }
    return Result.model_validate(fields | changes)


@pytest.fixture
def grids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "heads.toml").write_text(GRID, encoding="utf-8")
    for module in (results_page, measure_results):
        monkeypatch.setattr(module, "GRIDS", tmp_path)
    monkeypatch.setattr(measure_results, "ROOT", tmp_path)
    return tmp_path


def test_a_table_has_its_command_figures_sentences_and_source(grids: Path) -> None:
    assert section(result()) == (
        "| | iid |\n|---|---|\n"
        "| zero-shot | 50.0 ± 0.0 (40.0\u00a0to\u00a060.0) |\n"
        "| linear | 50.1 ± 1.2 (41.3\u00a0to\u00a058.0) |\n\n"
        "A note. linear is higher than zero-shot in 1 of 1 columns.\n\n"
        "`fedvl compare benchmarks/results/heads.toml` *(cifar10-mini, fedvl-tiny, 2 seeds; commit `012345678`; "
        "2 cores (x86_64), torch 2.13.0; 2026-11-18; 12 s)*\n"
    )


def test_a_cell_near_chance_is_marked_and_not_counted(grids: Path) -> None:
    cells = [Cell(row=row, column="iid", mean=11.0, near_chance=True) for row in ("zero-shot", "linear")]
    shown = section(result(cells=cells))
    assert "| linear | 11.0† |" in shown
    assert "in 1 of 1" not in shown
    assert "in 0 of 1" not in shown


def test_a_busy_machine_is_named(grids: Path) -> None:
    assert section(result(load=3.6)).endswith("; 12 s (load 4 before))*\n")


def test_figures_that_look_alike_are_equal_in_sentences(grids: Path) -> None:
    cells = [Cell(row="zero-shot", column="iid", mean=50.01), Cell(row="linear", column="iid", mean=50.04)]
    assert "in 0 of 1 (1 equal) columns" in section(result(cells=cells))


def test_only_what_is_between_markers_is_replaced(grids: Path) -> None:
    page = "before 1.0\n<!-- results: heads -->\nold\n<!-- end of results -->\nafter 2.0\n"
    new = filled(page, {"heads": result()})
    assert new.startswith("before 1.0\n<!-- results: heads -->\n| | iid |")
    assert new.endswith("<!-- end of results -->\nafter 2.0\n")
    assert "old" not in new
    assert filled(new, {"heads": result()}) == new


def test_a_result_that_is_absent_is_named_and_one_that_cannot_be_is_an_error(grids: Path) -> None:
    page = "<!-- results: heads -->\n1.0\n<!-- end of results -->\n"
    new = filled(page, {})
    assert "1.0" not in new
    assert "Not measured for this version: `python -m tools.measure_results --only heads`." in new
    with pytest.raises(SystemExit, match="results 'haeds', which is neither"):
        filled(page.replace("heads", "haeds"), {})
    assert set(measure_results.BENCHMARKS) == set(results_page.TIMED)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.0"),
        (0.01234, "0.0123"),
        (53.86, "53.9"),
        (999.94, "999.9"),
        (10280, "10,280"),
        (1_234_567, "1.23 M"),
        (7.48e10, "74.8 G"),
        (2.4e12, "2.4 T"),
    ],
)
def test_a_number_has_a_prefix_from_a_million(value: float, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ('"Two heads"', '"Other"', False),
        ('"A note."', '""', False),
        ('than = ["zero-shot"]', "than = []", False),
        ("rounds = 1", "rounds = 2", True),
        ("seeds = 2", "seeds = 3", True),
        ('method.name = "linear"', 'method.name = "fedprox"', True),
        ('partition = "iid"', 'partition = "disjoint"', True),
        ("seeds = 2", 'seeds = 2\nmeasure = "macro_f1"', True),
    ],
)
def test_settings_decide_whether_a_result_is_stale_and_words_do_not(
    grids: Path, old: str, new: str, stale: bool
) -> None:
    before = settings_sha256(grids / "heads.toml")
    assert old in GRID
    (grids / "heads.toml").write_text(GRID.replace(old, new), encoding="utf-8")
    assert (settings_sha256(grids / "heads.toml") != before) == stale


def test_a_grid_is_run_by_the_command_line_and_its_figures_are_kept(grids: Path, tmp_path: Path) -> None:
    arguments = argparse.Namespace(work=tmp_path / "runs", jobs=1, data=None)
    measured = measure_results.grid("heads", arguments, "c" * 40)
    found = result(**measured)
    assert (found.dataset, found.model, found.seeds) == ("cifar10-mini", "fedvl-tiny", 2)
    assert found.settings_sha256 == settings_sha256(grids / "heads.toml")
    assert [(cell.row, cell.column, cell.n) for cell in found.cells] == [("zero-shot", "iid", 2), ("linear", "iid", 2)]
    low, high = found.cells[0].interval or (0.0, 0.0)
    assert low <= found.figure("zero-shot", "iid").mean <= high


def test_a_grid_whose_runs_fail_has_no_result(grids: Path, tmp_path: Path) -> None:
    (grids / "heads.toml").write_text(GRID.replace("cifar10-mini", "absent-set"), encoding="utf-8")
    arguments = argparse.Namespace(work=tmp_path / "runs", jobs=1, data=None)
    with pytest.raises(SystemExit, match="heads was not measured"):
        measure_results.grid("heads", arguments, "c" * 40)


def test_a_benchmarks_lines_become_cells() -> None:
    (first, second, *_) = measure_results.rounds([{"seconds_per_round": {"bare": 0.01, "ours": 0.02, "loop": 0.08}}])
    assert (first.row, first.column, first.mean) == ("matrix products alone", "ms a round", 10.0)
    assert (second.column, second.mean) == ("relative to FedVL", 0.5)
    line = {"method": "linear", "clients": 1000, "cohort": 10, "round_s": 0.5, "us_per_client": 7, "rss_mb": 2}
    cells = measure_results.scale([{**line, "rss_mb_after_first": 1}])
    assert {cell.row for cell in cells} == {"linear, 1,000 clients, 10 a round"}
    assert [cell.mean for cell in cells] == [0.5, 7, 1, 2]
    line = {"method": "linear", "accuracies": {"float32": [1.0, 2.0]}}
    (cell,) = measure_results.precision([{**line, "differences": {"tf32": {"difference": 0.5, "half_width": 0.25}}}])
    assert (cell.column, cell.interval, cell.n) == ("tf32 less float32, points", (0.25, 0.75), 2)


@pytest.mark.parametrize("path", sorted(GRIDS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_grid_says_what_it_is(path: Path) -> None:
    grid = read_grid(path)
    assert grid.title
    assert grid.note.endswith(".")
    if "DATA/" not in path.read_text(encoding="utf-8"):
        assert path.read_text(encoding="utf-8").startswith(f"# fedvl compare benchmarks/results/{path.name}\n")


def test_every_choice_names_rows_and_a_column_of_its_grid() -> None:
    for choice in CHOICES:
        grid = read_grid(GRIDS / f"{choice.result}.toml")
        assert choice.column in grid.columns
        assert set(choice.rows) <= set(grid.rows)
        assert anchor(choice.result)


def test_markers_of_several_tables_are_told_apart() -> None:
    page = "<!-- results: a -->\n1\n<!-- end of results -->\n<!-- results: b -->\n2\n<!-- end of results -->\n"
    assert [match[2] for match in BLOCK.finditer(page)] == ["a", "b"]
