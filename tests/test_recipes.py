"""Every run that a recipe asks for can be described; that they run is for the benchmarks to show."""

import tomllib
from pathlib import Path

import pytest

import fedvl
from fedvl.config import overlay
from fedvl.data.catalogue import find
from fedvl.experiment import resolve_experiment

FOLDER = Path(fedvl.__file__).parent / "recipes"
RECIPES = sorted(FOLDER.rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_cell_of_a_recipe_is_an_experiment(path):
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    assert set(recipe) == {"seeds", "base", "rows", "columns"}
    described = set()
    for row in recipe["rows"].values():
        for column in recipe["columns"].values():
            settings = {}
            for layer in (recipe["base"], row, column):
                overlay(settings, layer)
            experiment = resolve_experiment(settings)
            find(experiment.data.dataset)
            described.add(experiment.to_toml())
    assert len(described) == len(recipe["rows"]) * len(recipe["columns"])  # no two cells are the same run
