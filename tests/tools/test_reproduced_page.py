"""The page of reproduced tables: what is kept of a run, how parts are joined, and what makes a table stale."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedvl.comparisons.grid import layered, read_recipe, recipe_names
from tools import reproduced_page
from tools.reproduced_page import PAGE, Cell, Table, asked_sha256, page, read_tables, section, store, taken_in

NAME = "fst-cbdg/table4"


def comparison(rows: list[str], means: dict[tuple[str, str], float], **changes: Any) -> dict[str, Any]:
    """What fedvl reproduce writes for some rows of the recipe."""
    recipe = read_recipe(NAME).on_embedded()
    cell = {"measure": "accuracy", "deviation": 0.25, "n": 3, "interval": [1.0, 99.0], "near_chance": False}
    return {
        "recipe": NAME,
        "fedvl_version": "0.1.0",
        "date": "2026-11-19T05:00:00+00:00",
        "seeds": 3,
        "rows": rows,
        "columns": list(recipe.columns),
        "cells": [{**cell, "row": row, "column": column, "mean": mean} for (row, column), mean in means.items()],
        "series": [],
        "tuned": [],
        "findings": [],
        "settings": {
            "base": layered(recipe.base, {"federation": {"threads": 4}}),  # as --jobs has it
            "rows": {name: recipe.rows[name].settings for name in rows},
            "columns": {name: entry.settings for name, entry in recipe.columns.items()},
            "cells": recipe.cells,
        },
        **changes,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result), encoding="utf-8")


BALANCED, EQUAL = "Balanced sampling", "Equal sampling"
IID = "cifar10-mini, iid"


def test_parts_of_a_recipe_become_one_table_with_rows_in_the_recipes_order(tmp_path: Path) -> None:
    write(tmp_path / "a" / NAME / "comparison.json", comparison([BALANCED], {(BALANCED, IID): 60.0}))
    write(tmp_path / "b" / NAME / "comparison.json", comparison([EQUAL], {(EQUAL, IID): 50.0}))
    write(tmp_path / "b" / NAME / "runs" / "comparison.json", {"not": "of a recipe"})
    (table,) = taken_in(tmp_path, "c" * 40)
    assert table.rows == [EQUAL, BALANCED]
    assert {(cell.row, cell.mean, cell.interval) for cell in table.cells} == {
        (EQUAL, 50.0, (1.0, 99.0)),
        (BALANCED, 60.0, (1.0, 99.0)),
    }
    assert (table.commit, table.seeds, table.command) == ("c" * 40, 3, f"fedvl reproduce {NAME} --on embedded")
    assert table.settings_sha256 == asked_sha256(read_recipe(NAME).on_embedded())  # threads do not matter


def test_a_tuned_table_states_its_tuning_and_only_differences_beyond_chance(tmp_path: Path) -> None:
    recipe = read_recipe("bench/tuned").on_embedded()
    row, other, column = "Linear (FedAvg)", "zero-shot", "one model"
    chosen = {row: {column: {"training": {"learning_rate": 0.1}}}}
    cell = {"row": row, "column": column, "tried": ["0.01", "0.1"], "validation": [60.0, 70.0], "chosen": "0.1"}
    beyond = "one model, against zero-shot, beyond chance in 1 comparisons: above it: Linear (FedAvg)."
    part = comparison([], {(other, column): 53.8, (row, column): 67.0}) | {
        "recipe": "bench/tuned",
        "rows": [other, row],
        "columns": list(recipe.columns),
        "tuned": [{**cell, "images": 40, "seeds": 3, "untrained": 50.0, "at_edge": ["learning_rate"], "ties": []}],
        "findings": ["Linear (FedAvg) is higher than zero-shot in 1 of 1 columns.", beyond],
        "settings": {
            "base": recipe.base,
            "rows": {name: entry.settings for name, entry in recipe.rows.items()},
            "columns": {name: entry.settings for name, entry in recipe.columns.items()},
            "cells": chosen,
        },
    }
    write(tmp_path / "tuned" / "comparison.json", part)
    (table,) = taken_in(tmp_path, "c" * 40)
    tuning, edge, difference = table.told
    assert tuning.startswith("Tuned: 2 settings tried for each of 1 rows")
    assert "Linear (FedAvg) (one model)" in edge
    assert difference == beyond
    assert table.settings_sha256 == asked_sha256(recipe)  # what was chosen is no change of the recipe
    assert " ".join(table.told) in section(table)
    assert "1 of 1" not in section(table)


def test_a_stored_table_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduced_page, "RESULTS", tmp_path)
    write(tmp_path / "x" / NAME / "comparison.json", comparison([BALANCED], {(BALANCED, IID): 60.0}))
    (table,) = taken_in(tmp_path / "x", "c")
    store(table)
    assert read_tables(tmp_path)[NAME] == table


def table(**changes: Any) -> Table:
    cells = [
        Cell(row=EQUAL, column=IID, mean=53.94, deviation=0.06, interval=(50.84, 57.16), n=3),
        Cell(row=BALANCED, column=IID, mean=59.6, deviation=0.1, n=3),
        Cell(row=EQUAL, column="emoji-mini, iid", mean=16.1, n=3, near_chance=True),
        Cell(row=BALANCED, column="emoji-mini, iid", mean=13.8, n=3, near_chance=True),
    ]
    fields = {
        "recipe": NAME,
        "command": f"fedvl reproduce {NAME} --on embedded",
        "commit": "0123456789",
        "version": "0.1.0",
        "date": "2026-11-19T05:00:00+00:00",
        "seeds": 3,
        "settings_sha256": asked_sha256(read_recipe(NAME).on_embedded()),
        "rows": [EQUAL, BALANCED],
        "columns": ["cifar10-mini, s = 10", IID, "emoji-mini, iid"],
        "cells": cells,
    }
    return Table.model_validate(fields | changes)


def test_a_section_has_command_figures_the_papers_values_and_what_is_counted() -> None:
    shown = section(table())
    assert f"`fedvl reproduce {NAME} --on embedded`, 3 seeds, commit `012345678`, 2026-11-19. The paper: " in shown
    assert "\n| Equal sampling |  | 53.9 ± 0.1, 50.8 to 57.2 (68.6) | 16.1 † |\n" in shown
    assert "\n| Balanced sampling |  | 59.6 ± 0.1 (74) | 13.8 † |\n" in shown
    assert shown.endswith(
        "\n\nThis table: Balanced sampling is higher than Equal sampling in 1 of 1 columns. "
        "Not counted, since zero-shot is near chance level: emoji-mini, iid.\n"
    )
    assert "have changed" not in shown
    assert "Not measured" not in shown


def test_a_section_says_in_what_the_recipe_differs_from_what_was_measured() -> None:
    assert "\n\nThe recipe's settings have changed since this was measured.\n" in section(table(settings_sha256="0"))
    assert "have changed" not in section(table(settings_sha256=""))  # not known
    assert f"\n\nNot measured, rows: {EQUAL}.\n" in section(table(rows=[BALANCED]))
    assert '\n\nNot measured, columns: "emoji-mini, iid".\n' in section(table(columns=["cifar10-mini, s = 10", IID]))


def test_the_page_is_as_the_stored_tables_have_it() -> None:
    tables = read_tables()
    assert sorted(tables) == recipe_names()
    assert PAGE.read_text(encoding="utf-8") == page(tables), "run python -m tools.reproduced_page"
