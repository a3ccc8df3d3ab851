"""Grids of runs: what is laid over what, and what is told of a file that is wrong."""

from pathlib import Path

import pytest
from helpers.grids import grid_of

from fedvl.comparisons.grid import QUICK, Variant, folder_name, layered, read_grid
from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment

SMALL = {"data": {"clients": 2, "shots": 4, "partition": "iid"}, "federation": {"rounds": 2}}


def test_rows_win_over_columns_and_everything_over_the_base() -> None:
    grid = grid_of(
        base={"data": {"clients": 1, "shots": 1, "partition": "iid"}},
        columns={"c": {"data": {"clients": 2, "shots": 2}}},
        rows={"r": {"data": {"clients": 3}}},
        seeds=2,
    )
    first, second = grid.cases()
    assert first.settings == {"data": {"clients": 3, "shots": 2, "partition": "iid"}, "seed": 0}
    assert second.settings["seed"] == 1
    (over,) = grid.under(Variant(settings={"data": {"clients": 9}}, seeds=1)).cases()
    assert over.settings["data"] == {"clients": 9, "shots": 2, "partition": "iid"}


def test_the_embedded_stand_in_replaces_a_rows_settings_and_is_won_over_by_columns() -> None:
    grid = grid_of(
        base={"model": {"name": "large"}},
        rows={"r": {"method": {"name": "fedavg-nn", "weights": "file"}, "embedded": {"method": {"name": "fedavg-nn"}}}},
        columns={"paper's": {"data": {"dataset": "big"}}},
        embedded={
            "settings": {"model": {"name": "small"}, "data": {"clients": 3}},
            "columns": {"ours": {"beside": "paper's", "data": {"dataset": "tiny", "clients": 4}}},
        },
        seeds=1,
    )
    (case,) = grid.on_embedded().cases()
    assert case.column == "ours"
    assert case.settings["method"] == {"name": "fedavg-nn"}
    assert (case.settings["model"], case.settings["data"]) == ({"name": "small"}, {"dataset": "tiny", "clients": 4})


def test_a_column_may_be_measured_in_its_own_way() -> None:
    grid = grid_of(columns={"x": {"measure": "macro_f1"}, "y": {}}, seeds=1)
    assert [case.measure for case in grid.cases()] == ["macro_f1", "accuracy"]


def test_folders_differ_where_anything_differs_and_only_there() -> None:
    plain, again = (resolve_experiment({"method": {"name": "linear"}, **SMALL}) for _ in range(2))
    other = resolve_experiment({"method": {"name": "linear", "scale": 2.0}, **SMALL})
    assert folder_name(plain) == folder_name(again) != folder_name(other)
    assert folder_name(plain).startswith("linear-cifar10-mini-iid-0-")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seeds = 1\n", "rows"),
        ("[rows.a]\npaper = [1.0, 2.0]\n", "has 2 values of the paper for 1 columns"),
        ("[rows.a]\n[embedded.columns.x]\nbeside = 'y'\n", "is compared with 'y'"),
        ("colour = 1\n[rows.a]\n", "There is no setting 'colour'"),
    ],
)
def test_a_grid_file_that_is_wrong_is_told_so(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(text)
    with pytest.raises(FedVLError, match=told):
        read_grid(tmp_path / "grid.toml")


def test_a_quick_run_is_one_epoch_in_one_round_of_three_clients() -> None:
    quick = resolve_experiment(layered({"method": {"name": "fst-cbdg"}}, QUICK))
    assert (quick.federation.rounds, quick.training.local_epochs, quick.data.clients) == (1, 1, 3)
    assert (quick.data.shots, quick.data.test_shots, quick.data.minimum) == (4, 5, 0)
