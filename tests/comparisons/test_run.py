"""Grids that are run: what is run once, what survives a failure, and the arithmetic of the summary."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.grids import grid_of, outcome_of

from fedvl.comparisons.contents import Averaged, Comparison, Points
from fedvl.comparisons.grid import Grid
from fedvl.comparisons.run import (
    GridOutcome,
    averaged_columns,
    beyond_chance,
    finite,
    flags_grid,
    perform_grid,
    summarise,
)
from fedvl.data.sources import Opener
from fedvl.display import GridDisplay, TerminalDisplay
from fedvl.errors import FedVLError
from fedvl.evaluation.base_to_new import mean_intervals
from fedvl.evaluation.statistics import bootstrap_clients, bootstrap_lead, bootstrap_right, wilson
from fedvl.files import read_json, validated
from fedvl.report.comparison_tables import cell_text, footnote, html_table, latex_table, opening
from fedvl.report.page import write_comparison
from fedvl.runs.contents import Result

CONFIG: dict[str, Any] = {"evaluation": {"every": 1}}
SMALL = {"data": {"clients": 2, "shots": 4, "partition": "iid"}, "federation": {"rounds": 2}}


@pytest.fixture(scope="module")
def opener() -> Opener:
    return Opener.once()


def perform(grid: Grid, runs: Path, opener: Opener) -> GridOutcome:
    with TerminalDisplay(quiet=True) as display:
        return perform_grid(grid, runs, GridDisplay(display), opener)


def test_flags_make_a_row_a_method_and_a_column_a_dataset_and_partition() -> None:
    grid = flags_grid(["linear", "zero-shot"], ["a", "b"], ["iid", "shards:2"], 3, {"training": {"momentum": 0.5}})
    assert list(grid.rows) == ["linear", "zero-shot"]
    assert list(grid.columns) == ["a, iid", "a, shards:2", "b, iid", "b, shards:2"]
    assert len(list(grid.cases())) == 2 * 4 * 3
    assert list(flags_grid(["linear"], [], [], 1, {}).columns) == ["accuracy"]


def test_an_option_goes_to_the_methods_that_have_it_and_that_is_said() -> None:
    base = {"method": {"mu": 0.5, "preset": "paper"}, "training": {"momentum": 0.5}}
    grid = flags_grid(["linear", "fedprox"], [], [], 1, base)
    methods = {case.row: case.settings["method"] for case in grid.cases()}
    assert methods == {
        "linear": {"name": "linear", "preset": "paper"},
        "fedprox": {"name": "fedprox", "preset": "paper", "mu": 0.5},
    }
    assert grid.note == "method.mu=0.5 is for fedprox; the other methods have no mu."
    assert flags_grid(["fedprox"], [], [], 1, base).note == ""
    with pytest.raises(FedVLError, match="None of linear, zero-shot has an option 'mu'"):
        flags_grid(["linear", "zero-shot"], [], [], 1, base)


# --- running


def test_runs_are_ordinary_shared_and_not_run_again(tmp_path: Path, opener: Opener) -> None:
    """Two rows that are the same experiment share a folder; a second call runs nothing."""
    grid = grid_of(base=SMALL, rows={"one": {}, "same": {}, "zero": {"method": {"name": "zero-shot"}}}, seeds=1)
    outcome = perform(grid, tmp_path, opener)
    assert outcome.runs["one", "all"] == outcome.runs["same", "all"]
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 2
    results = {folder: (folder / "result.json").read_bytes() for folder in folders}
    assert all((folder / "config.toml").is_file() for folder in folders)
    assert perform(grid, tmp_path, opener).figures == outcome.figures
    assert {folder: (folder / "result.json").read_bytes() for folder in folders} == results


def test_an_interrupted_run_is_gone_on_with_to_the_same_bits(tmp_path: Path, opener: Opener) -> None:
    grid = grid_of(base=SMALL, seeds=1)
    (folder,) = (tmp_path / name for name in perform(grid, tmp_path, opener).runs["a", "all"])
    whole = json.loads((folder / "result.json").read_bytes())
    for path in (folder / "result.json", *folder.glob("journal/*2.*")):  # as if stopped after round 1
        path.unlink()
    perform(grid, tmp_path, opener)
    again = json.loads((folder / "result.json").read_bytes())
    assert again["state_sha256"] == whole["state_sha256"]
    assert again["per_round"] == whole["per_round"]


def test_a_run_that_fails_loses_no_other(tmp_path: Path, opener: Opener) -> None:
    rows = {"good": {}, "bad": {"data": {"dataset": "no-such-set"}}, "after": {"method": {"name": "zero-shot"}}}
    outcome = perform(grid_of(base=SMALL, rows=rows, seeds=1), tmp_path, opener)
    assert [failure.row for failure in outcome.failures] == ["bad"]
    assert "no-such-set" in outcome.failures[0].error
    assert set(outcome.figures) == {("good", "all"), ("after", "all")}
    summary = summarise(outcome, "fedvl compare")
    assert {cell.row for cell in summary.cells} == {"good", "after"}


def test_a_damaged_run_folder_is_a_failure_of_its_own(tmp_path: Path, opener: Opener) -> None:
    grid = grid_of(base=SMALL, seeds=1)
    (name,) = perform(grid, tmp_path, opener).runs["a", "all"]
    (tmp_path / name / "result.json").write_text("{")
    assert len(perform(grid, tmp_path, opener).failures) == 1
    shutil.rmtree(tmp_path / name)
    assert not perform(grid, tmp_path, opener).failures


# --- the summary


def test_mean_deviation_and_the_best_of_each_column() -> None:
    summary = summarise(outcome_of({("a", "x"): [1.0, 2.0, 3.0], ("b", "x"): [4.0, 6.0, 9.0]}), "c")
    worse, better = summary.cells
    assert (worse.mean, worse.deviation, worse.n) == (2.0, 1.0, 3)
    assert (worse.best, better.best) == (False, True)
    assert better.against == "a"
    assert better.p == pytest.approx(0.0390, abs=5e-4)  # differences 3, 4, 6: t = 13/3 / (1.5275 / sqrt 3) = 4.914
    assert better.significant


def test_a_lead_is_tested_image_by_image() -> None:
    """The best row is right on two of four images more often than the other, in both seeds; and one that no run can show."""
    places = {("a", "x"): [75.0, 75.0], ("b", "x"): [25.0, 25.0]}
    outcome = outcome_of(places)
    outcome.tests = {("a", "x"): [("s", "1110")] * 2, ("b", "x"): [("s", "0010")] * 2}
    best = next(cell for cell in summarise(outcome, "").cells if cell.best)
    assert best.lead == bootstrap_lead(["1110"] * 2, ["0010"] * 2)
    said = "a has the highest accuracy, 75.0 %, but +50.0 points over b may be chance (95 % over seeds and test images 0.0 to "
    assert opening(summarise(outcome, "")) == said + "100.0, paired)."
    outcome.tests[("b", "x")][1] = ("another test", "0010")
    assert next(cell for cell in summarise(outcome, "").cells if cell.best).lead is None


def test_a_lead_in_two_seeds_is_not_beyond_chance_where_they_differ() -> None:
    """Right on 98 and on 52 of 100 images, against 50 in both: Student's t of one degree of freedom is wide."""
    texts = {"a": ["1" * 98 + "0" * 2, "1" * 52 + "0" * 48], "b": ["1" * 50 + "0" * 50] * 2}
    outcome = outcome_of({(row, "x"): [100 * text.count("1") / 100 for text in found] for row, found in texts.items()})
    outcome.tests = {(row, "x"): [("s", text) for text in found] for row, found in texts.items()}
    (best,) = (cell for cell in summarise(outcome, "").cells if cell.best)
    assert best.lead is not None
    assert best.lead.low < 0 < best.lead.high
    assert not best.significant


def test_rows_are_compared_on_common_seeds_alone() -> None:
    """B has the higher mean over its own seeds, and the lower one in every seed that both have."""
    outcome = outcome_of({("a", "x"): [47.9, 47.8, 55.0, 50.0], ("b", "x"): [90.0, 46.3, 46.6, 53.5]})
    outcome.seeds = {("a", "x"): [1, 2, 3, 4], ("b", "x"): [0, 1, 2, 3]}
    summary = summarise(outcome, "")
    best, other = summary.cells
    assert (best.best, other.best, best.compared, best.against) == (True, False, [1, 2, 3], "b")
    assert best.ahead == pytest.approx((1.6 + 1.2 + 1.5) / 3)
    assert best.p == pytest.approx(0.0072, abs=5e-4)
    outcome.seeds = {("a", "x"): [1, 2, 3, 4], ("b", "x"): [5, 6, 7, 8]}
    assert not any(cell.best for cell in summarise(outcome, "").cells)


def test_one_seed_is_said_not_to_speak_for_others() -> None:
    outcome = outcome_of({("a", "x"): [100.0], ("b", "x"): [0.0]})
    outcome.tests = {("a", "x"): [("s", "1" * 100)], ("b", "x"): [("s", "0" * 100)]}
    summary = summarise(outcome, "")
    assert not any(cell.significant for cell in summary.cells)
    assert "one seed was compared, and others may order the rows differently" in opening(summary)
    assert "Seeds were not varied" in footnote(summary)


def test_a_column_whose_zero_shot_guesses_is_marked_and_not_counted() -> None:
    """14 % of 100 images with 10 classes is near chance, 60 % is not."""
    figures = {(row, column): [50.0 + (row == "a"), 52.0 + (row == "a")] for row in "ab" for column in "xy"}
    outcome = outcome_of(figures)
    for place in figures:
        reached = 14.0 if place[1] == "x" else 60.0
        outcome.tests[place] = [("s", "1" * 50 + "0" * 50)] * 2
        result = Result(method="m", zero_shot_accuracy=reached, class_names=list("0123456789"), config=CONFIG)
        outcome.results[place] = [result] * 2
    summary = summarise(outcome, "")
    assert [cell.near_chance for cell in summary.cells] == [True, False, True, False]
    assert opening(summary).startswith("Best of 2 rows in 1 columns: a in 1")
    assert "<th>x †</th><th>y</th>" in html_table(summary)
    assert r"x $^{\dagger}$ & y" in latex_table(summary)
    assert "† Zero-shot is near chance level" in footnote(summary)


def test_only_differences_beyond_chance_are_told_of_a_reference() -> None:
    texts = {"zero": "1" * 50 + "0" * 50, "good": "1" * 80 + "0" * 20, "same": "1" * 51 + "0" * 49, "bad": "0" * 100}
    outcome = outcome_of({(row, "x"): [float(text.count("1"))] * 2 for row, text in texts.items()}, against="zero")
    outcome.tests = {(row, "x"): [("s", text)] * 2 for row, text in texts.items()}
    assert beyond_chance(outcome) == [
        "x, against zero, beyond chance in 3 comparisons: above it: good; below it: bad; no difference is shown for 1 row."
    ]
    outcome.seeds["good", "x"] = [2, 3]  # no common seed
    assert "above" not in beyond_chance(outcome)[0]


def test_a_single_run_has_the_interval_of_its_images() -> None:
    outcome = outcome_of({("a", "x"): [75.0], ("b", "x"): [60.0]})
    outcome.tests = {("a", "x"): [("s", "1110")], ("b", "x"): [("s", "1110")]}  # b is a mean over clients
    first, second = summarise(outcome, "").cells
    assert first.interval == wilson(75.0, 4)
    assert second.interval is None
    assert cell_text(first) == "75.0 (30.1 to 95.4; n = 4)"
    assert "In brackets, the interval of 95 %" in footnote(summarise(outcome, ""))


def test_several_runs_have_an_interval_over_seeds_and_images() -> None:
    outcome = outcome_of({("a", "x"): [75.0, 25.0], ("b", "x"): [60.0, 70.0], ("c", "x"): [75.0, 25.0]})
    outcome.tests = {
        ("a", "x"): [("s", "1110"), ("s", "0010")],
        ("b", "x"): [("s", "1110"), ("s", "0010")],  # means over clients
        ("c", "x"): [("s", "1110"), ("other", "0010")],
    }
    clients = [([50.0, 70.0], [10, 10]), ([60.0, 80.0], [10, 10])]
    outcome.results = {
        ("b", "x"): [
            Result(method="m", per_client_accuracy=[*own, None], per_client_test_images=[*n, 0], config=CONFIG)
            for own, n in clients
        ]
    }
    seeds, means, tests = summarise(outcome, "").cells
    assert seeds.interval == bootstrap_right(["1110", "0010"])
    assert means.interval == bootstrap_clients(clients)
    assert tests.interval is None  # of different images
    low, high = bootstrap_right(["1110", "0010"])
    assert cell_text(seeds) == f"50.0 ± 35.4 ({low:.1f} to {high:.1f}; n = 4)"
    assert "over seeds and test images (two-level bootstrap)" in footnote(summarise(outcome, ""))


def test_figures_of_base_to_new_have_intervals_over_seeds_too() -> None:
    right = {"owner": [0, 0, 1, 1], "own": "1101", "local": "1001", "base": [1000, 500, 0, 1000], "new": [1000, 0]}
    outcome = outcome_of({("a", "x"): [75.0, 75.0]}, measure="accuracy@own")
    result = Result.model_validate({"method": "m", "base_to_new_right": right, "config": CONFIG})
    outcome.results = {("a", "x"): [result] * 2}
    (cell,) = summarise(outcome, "").cells
    assert result.base_to_new_right is not None
    expected = mean_intervals([result.base_to_new_right] * 2)
    assert cell.interval == expected["own"]
    assert expected["own"].low < 75 < expected["own"].high
    assert list(expected) == ["own", "local", "base", "new", "hm3", "hm2", "cm"]


def best_rows(measure: str, figures: dict[str, float]) -> list[str]:
    outcome = outcome_of({(row, "x"): [value] for row, value in figures.items()}, measure=measure)
    return [cell.row for cell in summarise(outcome, "").cells if cell.best]


def test_the_smaller_cost_is_the_better_and_equal_rows_have_no_best() -> None:
    assert best_rows("local_flops", {"a": 5.0, "b": 7.0}) == ["a"]
    assert best_rows("accuracy", {"a": 5.0, "b": 7.0}) == ["b"]
    assert best_rows("accuracy", {"a": 5.0, "b": 5.0}) == []


def test_series_are_averaged_step_by_step_and_end_in_their_cell() -> None:
    summary = summarise(outcome_of({("a", "x"): [[1.0, 2.0], [3.0, 6.0]]}), "c")
    (series,) = summary.series
    assert (series.row, series.column, series.values, series.n) == ("a", "x", [2.0, 4.0], 2)
    assert series.deviations == pytest.approx([2**0.5, 8**0.5])
    assert summary.cells[0].mean == 4.0


def test_points_are_those_of_the_first_seed() -> None:
    summary = summarise(outcome_of({("a", "x"): [Points(y=[1.0], value=3.0), Points(y=[2.0], value=5.0)]}), "c")
    (points,) = summary.points
    assert json.loads(points.to_json()) == {"row": "a", "column": "x", "y": [1], "value": 3.0}
    assert summary.cells[0].mean == 4.0


def test_all_forms_are_written_and_the_file_is_read_as_what_it_was(tmp_path: Path) -> None:
    figures = {("50% & <b>", "x_1"): [10.0, 20.0, 30.0], ("plain", "x_1"): [1.0, 2.0, 3.5]}
    summary = summarise(outcome_of(figures, title="T & t"), "fedvl compare --methods a")
    write_comparison(summary, tmp_path / "new")
    path = tmp_path / "new" / "comparison.json"
    assert {path.name, "table.csv", "table.tex", "table.html"} <= {each.name for each in path.parent.iterdir()}
    assert validated(Comparison, read_json(path), path) == summary
    assert read_json(path)["schema"] == 1
    lead = next(cell for cell in read_json(path)["cells"] if cell["best"])
    assert {"p", "against", "ahead", "compared", "significant", "interval", "near_chance"} <= lead.keys()
    assert "paper" not in lead


def test_a_figure_that_is_not_finite_is_a_failure_and_not_a_value() -> None:
    assert finite("rounds.loss", [1.0, 2.0]) == [1.0, 2.0]
    for figure in (float("nan"), [1.0, float("inf")], Points(value=float("inf"))):
        with pytest.raises(FedVLError, match="'loss' is not finite in this run"):
            finite("loss", figure)


def test_columns_that_differ_in_the_dataset_alone_are_averaged() -> None:
    columns: dict[str, Any] = {
        "Pets, iid": {"data": {"dataset": "oxford-pets", "partition": "iid"}},
        "Pets, pat": {"data": {"dataset": "oxford-pets", "partition": "disjoint"}},
        "DTD, iid": {"data": {"dataset": "dtd", "partition": "iid"}},
        "DTD, pat": {"data": {"dataset": "dtd", "partition": "disjoint"}},
        "DTD, bytes": {"data": {"dataset": "dtd", "partition": "iid"}, "measure": "bytes_up"},
        "Pets, bytes": {"data": {"dataset": "oxford-pets", "partition": "iid"}, "measure": "bytes_up"},
        "alone": {"data": {"dataset": "dtd"}},
    }
    grid = Grid.model_validate({"rows": {"a": {"method": {"name": "linear"}}}, "columns": columns})
    assert averaged_columns(grid) == [
        Averaged(name="average, iid", columns=["Pets, iid", "DTD, iid"]),
        Averaged(name="average, pat", columns=["Pets, pat", "DTD, pat"]),
    ]
    assert averaged_columns(flags_grid(["linear"], ["dtd", "cub"], [], 1, {})) == [
        Averaged(name="average", columns=["dtd", "cub"])
    ]
    assert averaged_columns(flags_grid(["linear"], [], ["iid", "disjoint"], 1, {})) == []
