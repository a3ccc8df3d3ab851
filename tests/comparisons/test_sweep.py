"""Sweeps: what is tried, that the choice is by validation images alone, and one look at the test."""

import json
import math
from pathlib import Path

import pytest
from helpers.runs import OPENER

from fedvl.comparisons.contents import Comparison
from fedvl.comparisons.sweep import COLUMN, Range, perform_sweep, read_axes, settings_to_try, sweep_grid
from fedvl.display import GridDisplay, SilentLine
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import wilson
from fedvl.report.comparison_tables import cell_text
from fedvl.report.page import write_comparison

SMALL = {"data": {"clients": 2, "shots": 20, "test_shots": 10, "partition": "iid"}, "federation": {"rounds": 3}}


def test_values_and_ranges_are_read() -> None:
    words = ["training.learning_rate=0.01,0.1", "method.name=linear, fedprox", "training.betas=[0.9, 0.99]"]
    assert read_axes([*words, "method.mu=1e-3..1:log", "training.local_epochs=1..5"]) == {
        "training.learning_rate": [0.01, 0.1],
        "method.name": ["linear", "fedprox"],
        "training.betas": [[0.9, 0.99]],
        "method.mu": Range(0.001, 1.0, True),
        "training.local_epochs": Range(1.0, 5.0, False),
    }


def test_all_combinations_by_name() -> None:
    found = settings_to_try(read_axes(["training.learning_rate=0.01,0.1", "data.clients=2,4", "seed=3"]), None)
    assert list(found) == [f"learning_rate {rate}, clients {clients}" for rate in (0.01, 0.1) for clients in (2, 4)]
    assert found["learning_rate 0.1, clients 2"] == {"training": {"learning_rate": 0.1}, "data": {"clients": 2}}


def test_random_settings_lie_in_their_ranges_and_are_the_same_again() -> None:
    axes = read_axes(["training.learning_rate=0.001..1:log", "training.local_epochs=1..5", "data.clients=2,4"])
    drawn = settings_to_try(axes, 200)
    assert settings_to_try(axes, 200) == drawn
    rates = sorted(settings["training"]["learning_rate"] for settings in drawn.values())
    assert 0.001 <= rates[0] < rates[-1] <= 1
    assert math.log10(rates[len(rates) // 2]) == pytest.approx(-1.5, abs=0.3)  # the middle of -3 and 0
    assert {settings["training"]["local_epochs"] for settings in drawn.values()} == {1, 2, 3, 4, 5}
    assert {settings["data"]["clients"] for settings in drawn.values()} == {2, 4}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["training.learning_rate=0.1"], "Nothing to choose from"),
        (["training.learning_rate=0.1..1"], "--random"),
        (["training.learning_rate=1..0.1"], "from a lower to a higher"),
        (["training.learning_rate=0..1:log"], "above 0 with :log"),
        (["training.learning_rate=1.2.3..4"], "A range is LOW..HIGH"),
        (["training learning_rate=0.1,1"], "--set takes"),
    ],
)
def test_mistakes_are_told(words: list[str], told: str) -> None:
    with pytest.raises(FedVLError, match=told):
        settings_to_try(read_axes(words), None)


def sweep(runs: Path, *words: str) -> Comparison:
    grid = sweep_grid(SMALL, read_axes(words), None, 0.25, 1)
    return perform_sweep(grid, runs, GridDisplay(SilentLine()), OPENER, "fedvl sweep")


def test_the_best_on_validation_images_is_tested_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    summary = sweep(runs, "training.learning_rate=0.001,0.3,1e9")
    assert summary.opening is not None
    results = {path.parent.name: json.loads(path.read_bytes()) for path in runs.glob("*/result.json")}
    tested = [result for result in results.values() if result["right"]]
    reference = tested.pop([result["method"] for result in tested].index("ridge"))
    assert f"ridge {reference['accuracy']:.1f} %" in summary.opening
    assert len(tested) == 1
    cells = {cell.row: cell for cell in summary.cells}
    for cell in cells.values():
        (name,) = cell.runs
        assert cell.mean == results[name]["per_round_validation"][-1]
        assert cell.interval == wilson(cell.mean, results[name]["validation_images"])
        assert results[name]["accuracy"] is None
    best = max(cells.values(), key=lambda cell: cell.mean)
    assert [cell.row for cell in cells.values() if cell.chosen] == [best.row]
    assert "validation" not in tested[0]["config"]["evaluation"]  # trained on all images, and the last round tested
    assert sum(map(sum, tested[0]["partition_counts"])) == 200
    assert "learning_rate is at the end of its range" in summary.opening or best.row == "learning_rate 0.3"
    assert cell_text(best).endswith("chosen")
    assert f"it has {tested[0]['accuracy']:.1f} %" in summary.opening
    assert best.row in summary.opening

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}

    before = times()
    assert sweep(runs, "training.learning_rate=0.001,0.3,1e9").opening == summary.opening
    assert times() == before
    page = write_comparison(summary, tmp_path).read_text(encoding="utf-8")
    assert summary.opening in page
    assert page.count(">chosen<") == 1


def test_with_patience_the_model_of_the_best_round_is_chosen_and_tested(tmp_path: Path) -> None:
    summary = sweep(tmp_path, "training.learning_rate=0.1,0.3", "federation.patience=2")
    results = {path.parent.name: json.loads(path.read_bytes()) for path in tmp_path.glob("*/result.json")}
    (tested,) = [result for result in results.values() if result["right"] and result["method"] == "linear"]
    assert summary.opening is not None
    for cell in summary.cells:
        assert cell.mean == max(results[cell.runs[0]]["per_round_validation"])
    (best,) = [cell for cell in summary.cells if cell.chosen]
    assert tested["state_sha256"] == results[best.runs[0]]["state_sha256"]
    assert "training.learning_rate is at the end of its range; try more values." in summary.opening


def test_a_sweep_of_which_everything_fails_chooses_nothing(tmp_path: Path) -> None:
    summary = sweep(tmp_path, "data.dataset=no-such-set,nor-this")
    assert (summary.cells, len(summary.failures), summary.opening) == ([], 2, None)
    assert COLUMN in summary.columns
