"""A table of runs, as a recipe describes it: rows x columns x seeds, mean and deviation of the accuracy.

    python -m benchmarks.recipe fst-cbdg/tables [--set data.dataset=cifar10-mini] [--seeds 1] [--rows FST]

A recipe is a TOML file under ``src/fedvl/recipes``: settings of an experiment (``base``), and what rows and columns lay over them.
"""

import argparse
import statistics
import tomllib
from pathlib import Path
from typing import Any

import torch

import fedvl
from benchmarks.runs import run
from fedvl.config import overlay, parse_assignment

RECIPES = Path(fedvl.__file__).parent / "recipes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipe", help=", ".join(sorted(str(p.relative_to(RECIPES).with_suffix("")) for p in RECIPES.rglob("*.toml")))
    )
    parser.add_argument("--set", action="append", default=[], help="laid over every run, as fedvl run has it")
    parser.add_argument("--seeds", type=int, help="fewer or more than the recipe's")
    parser.add_argument("--rows", default="", help="only rows whose name holds this")
    arguments = parser.parse_args()
    recipe = tomllib.loads((RECIPES / f"{arguments.recipe}.toml").read_text(encoding="utf-8"))
    columns: dict[str, Any] = recipe["columns"]
    torch.set_num_threads(2)
    print(f"| accuracy, % | {' | '.join(columns)} | seconds of training |\n|{'---|' * (len(columns) + 2)}")
    for name, row in recipe["rows"].items():
        if arguments.rows not in name:
            continue
        cells, seconds = [], []
        for column in columns.values():
            values = []
            for seed in range(arguments.seeds or recipe["seeds"]):
                settings: dict[str, Any] = {"seed": seed}
                for layer in (recipe["base"], row, column, *map(parse_assignment, arguments.set)):
                    overlay(settings, layer)
                finished = run(settings)
                values.append(finished.accuracy)
                seconds.append(finished.seconds)
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.1f} ± {spread:.1f}")
        print(f"| {name} | {' | '.join(cells)} | {statistics.median(seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
