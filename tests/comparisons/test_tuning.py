"""Tuned grids: what is tried, that the choice is by validation images alone, and files that ``fedvl compare`` reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.grids import grid_of
from helpers.runs import OPENER

import fedvl
from fedvl.comparisons.contents import Failure
from fedvl.comparisons.grid import Grid, layered, read_grid
from fedvl.comparisons.run import GridOutcome, perform_grid
from fedvl.comparisons.sweep import chosen_grid, listed_axes, perform_sweep, read_axes, settings_at_edge, sweep_grid
from fedvl.comparisons.tuning import perform_tuned, trials_of, tried_in, tuning_sentences, with_choices, write_grid
from fedvl.display import GridDisplay, SilentLine
from fedvl.errors import FedVLError
from fedvl.runs.contents import Result

SMALL = {"data": {"clients": 2, "shots": 20, "test_shots": 10, "partition": "iid"}, "federation": {"rounds": 3}}
RATES = {"training.learning_rate": [0.001, 0.3]}


def method(name: str, **more: Any) -> dict[str, Any]:
    return {"method": {"name": name}, **more}


def test_every_trained_row_tries_as_many_settings_and_zero_shot_none() -> None:
    rows = {
        "linear": method("linear"),
        "slow": method("promptfl", tune={"training.learning_rate": [1e-5, 1e-4]}),
        "zero": method("zero-shot"),
        "given": method("linear", tune={}),
    }
    tried = tried_in(grid_of(rows=rows, tune=RATES))
    assert {row: list(settings) for row, settings in tried.items()} == {
        "linear": ["learning_rate 0.001", "learning_rate 0.3"],
        "slow": ["learning_rate 1e-05", "learning_rate 0.0001"],
    }
    rows["slow"]["tune"]["training.learning_rate"].append(1e-3)
    with pytest.raises(FedVLError, match="for a fair comparison, not 2 for linear, 3 for slow"):
        tried_in(grid_of(rows=rows, tune=RATES))


def test_no_trial_sees_the_test() -> None:
    cells = {"linear": {"x": {"training": {"momentum": 0.5}}}}
    columns = {"x": {"measure": "bytes_up_per_client_round"}, "y": {}}
    grid = grid_of(rows={"linear": method("linear")}, columns=columns, cells=cells, tune=RATES, validation=0.3, seeds=2)
    cases = list(trials_of(grid).cases())
    assert len(cases) == 2 * 2 * 2
    assert {case.measure for case in cases} == {"rounds.validation"}
    assert all(case.settings["evaluation"] == {"validation": 0.3, "test": False} for case in cases)
    first = cases[0]
    assert (first.row, first.settings["training"]) == (
        "linear: learning_rate 0.001",
        {"momentum": 0.5, "learning_rate": 0.001},
    )
    assert trials_of(grid_of(rows={"linear": method("linear")})).rows == {}


def test_a_range_is_not_tried() -> None:
    assert listed_axes(["training.learning_rate=1e-3,0.1"]) == {"training.learning_rate": [1e-3, 0.1]}
    with pytest.raises(FedVLError, match="--tune takes values to try"):
        listed_axes(["training.learning_rate=0.1..1"])


def test_settings_of_a_cell_win_over_row_and_column() -> None:
    grid = grid_of(
        rows={"a": {"training": {"learning_rate": 1}}, "b": {}},
        columns={"x": {"training": {"learning_rate": 2}}, "y": {}},
        cells={"a": {"x": {"training": {"learning_rate": 3}}}},
        left_out=[("b", "y")],
        seeds=1,
    )
    found = {(case.row, case.column): case.settings["training"] for case in grid.cases()}
    assert found == {
        ("a", "x"): {"learning_rate": 3},
        ("a", "y"): {"learning_rate": 1},
        ("b", "x"): {"learning_rate": 2},
    }
    with pytest.raises(ValueError, match="cells has 'z', which is not a row or column"):
        grid_of(rows={"a": {}}, columns={"x": {}}, cells={"a": {"z": {}}})


# --- choosing


def chosen_of(values: dict[str, list[float | None]], untrained: float = 10.0) -> Any:
    """Choose among made-up validation accuracies of one row and column, a list of seeds for each rate."""
    grid = grid_of(
        rows={"linear": method("linear")},
        columns={"x": {}},
        tune={"training.learning_rate": [float(rate) for rate in values]},
        seeds=2,
    )
    trials = GridOutcome(trials_of(grid))
    for rate, found in values.items():
        place = (f"linear: learning_rate {float(rate)}", "x")
        for seed, value in enumerate(found):
            if value is not None:
                trials.figures.setdefault(place, []).append([0.0, value])  # of each round; the last counts
                trials.seeds.setdefault(place, []).append(seed)
                result = Result(method="m", validation_images=50, untrained_validation_accuracy=untrained)
                trials.results.setdefault(place, []).append(result)
            else:
                trials.failures.append(Failure(row=place[0], column="x", seed=seed, error="diverged"))
    return with_choices(grid, trials), trials


def test_the_mean_over_seeds_decides_and_a_setting_that_fails_does_not_count() -> None:
    (grid, (cell,)), _ = chosen_of({"0.1": [50, 52], "0.2": [60, 44], "0.3": [51, 52], "0.4": [99, None]})
    assert (cell.chosen, cell.validation) == ("learning_rate 0.2", [51, 52, 51.5, None])
    assert grid.cells == {"linear": {"x": {"training": {"learning_rate": 0.2}}}}
    assert (cell.at_edge, cell.ties, cell.untrained, cell.best) == ([], [], 10.0, 52)
    assert "evaluation" not in next(grid.cases()).settings  # the test of a model of all training images
    (told,) = tuning_sentences([cell], 0.2)
    assert told.startswith("Tuned: 4 settings tried for each of 1 rows in each column, chosen by the mean of 2 seeds")


def test_edges_ties_and_the_untrained_model_are_told() -> None:
    (_, (cell,)), _ = chosen_of({"0.1": [50, 52], "0.2": [51, 51], "0.3": [1, 1]}, untrained=51.0)
    assert (cell.at_edge, cell.ties) == (["training.learning_rate"], ["learning_rate 0.2"])
    _, edge, tie, untrained = tuning_sentences([cell], 0.2)
    assert edge == "The chosen value is at the end of its range (try more): linear (x)."
    assert tie == "Several settings are equal, and the first was taken: linear (x)."
    assert untrained == "The untrained model is as good on the validation images as the chosen setting: linear (x)."


def test_a_cell_of_which_everything_fails_is_left_out_and_told() -> None:
    (grid, cells), trials = chosen_of({"0.1": [50, None], "0.2": [None, None]})
    assert (grid.left_out, cells, list(grid.cases())) == ([("linear", "x")], [], [])
    outcome = perform_tuned(
        grid_of(
            rows={"linear": method("linear")}, columns={"x": {}}, tune={"training.learning_rate": [0.1, 0.2]}, seeds=2
        ),
        lambda part: trials if "linear" not in part.rows else GridOutcome(part),
    )
    assert [failure.error for failure in outcome.failures] == [
        "No setting finished with every seed; the first: diverged"
    ]


def test_an_edge_is_of_numbers_that_differ() -> None:
    tried: dict[str, dict[str, Any]] = {
        "a": {"training": {"learning_rate": 0.1, "optimiser": "sgd", "momentum": 0.5}},
        "b": {"training": {"learning_rate": 0.2, "optimiser": "adam", "momentum": 0.5}},
        "c": {"training": {"learning_rate": 0.3, "optimiser": "adam", "momentum": 0.5}},
    }
    assert [settings_at_edge(tried, name) for name in tried] == [
        ["training.learning_rate"],
        [],
        ["training.learning_rate"],
    ]


# --- from end to end


def test_a_tuned_comparison_tests_the_best_setting_of_each_cell_once(tmp_path: Path) -> None:
    found = fedvl.compare(
        ["linear", "zero-shot"],
        seeds=2,
        tune=RATES,
        out=tmp_path,
        quiet=True,
        **{"data.clients": 2, "data.shots": 20, "data.test_shots": 10, "rounds": 3},
    )
    (cell,) = found.summary.tuned
    results = [json.loads(path.read_bytes()) for path in (tmp_path / "runs").glob("linear-*/result.json")]
    blind = [result for result in results if result["accuracy"] is None]
    tested = [result for result in results if result["accuracy"] is not None]
    assert (len(blind), len(tested)) == (2 * 2, 2)
    for name, mean in zip(cell.tried, cell.validation, strict=True):
        rate = float(name.split()[1])
        last = [r["per_round_validation"][-1] for r in blind if r["config"]["training"]["learning_rate"] == rate]
        assert mean == pytest.approx(sum(last) / 2)
    assert {f"learning_rate {result['config']['training']['learning_rate']}" for result in tested} == {cell.chosen}
    assert all(result["config"]["evaluation"].get("validation") is None for result in tested)
    assert "Tuned: 2 settings tried for each of 1 rows" in (found.summary.note or "")
    assert cell.chosen in (tmp_path / "report.html").read_text(encoding="utf-8")
    again = read_grid(tmp_path / "tuned.toml")
    settings = {case.row: case.settings for case in again.cases()}
    assert f"learning_rate {settings['linear']['training']['learning_rate']}" == cell.chosen
    outcome = perform_grid(again, tmp_path / "runs", GridDisplay(SilentLine()), OPENER)
    assert sorted(outcome.runs["linear", "accuracy"]) == sorted(
        path.parent.name
        for path in (tmp_path / "runs").glob("linear-*/result.json")
        if json.loads(path.read_bytes())["accuracy"] is not None
    )


def test_compare_reads_what_a_sweep_has_chosen(tmp_path: Path) -> None:
    grid = sweep_grid(layered(SMALL, method("linear")), read_axes(["training.learning_rate=0.001,0.3"]), None, 0.25, 1)
    summary = perform_sweep(grid, tmp_path / "runs", GridDisplay(SilentLine()), OPENER, "fedvl sweep")
    found = chosen_grid(grid, summary)
    assert found is not None
    write_grid(found, tmp_path / "chosen.toml")
    (case, *_) = read_grid(tmp_path / "chosen.toml").cases()
    (chosen,) = [cell.row for cell in summary.cells if cell.chosen]
    assert case.row == "linear"
    assert f"learning_rate {case.settings['training']['learning_rate']}" == chosen
    assert "evaluation" not in case.settings or "validation" not in case.settings["evaluation"]
    assert chosen_grid(grid, summary.model_copy(update={"cells": []})) is None


def test_a_written_grid_is_read_as_it_was(tmp_path: Path) -> None:
    grid = Grid.model_validate(
        {
            "title": 'A "quoted" title',
            "seeds": 2,
            "base": {"data": {"clients": 3}, "seed": 5},
            "rows": {"a, b": {"measure": "macro_f1", "method": {"name": "linear", "flag": True}}},
            "columns": {"iid": {}, "x.y": {"data": {"partition": "iid"}}},
            "cells": {"a, b": {"x.y": {"training": {"betas": [0.9, 0.99]}}}},
        }
    )
    write_grid(grid, tmp_path / "grid.toml")
    assert list(read_grid(tmp_path / "grid.toml").cases()) == list(grid.cases())
