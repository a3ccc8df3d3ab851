"""Run Fed-PRIME's full recipe on photos of mixed shapes with random ViLT-B/32 weights.

    python -m benchmarks.fed_prime_recipe [--photos 2] [--rounds 2]

It shows that a row of the recipe starts, trains and tests on what it asks for; random weights and noise for
photos give accuracies that mean nothing. Both datasets have eight classes and so many photos of each,
wide, tall and square in turn; those of Food-101 have a title, those of MM-IMDB a text of 200 words.
"""

import argparse
import csv
import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import ViltConfig, ViltModel

from fedvl.commands.compare import reproduce_all
from fedvl.comparisons.grid import read_recipe
from fedvl.models.checkpoint import EMBEDDED_FOLDER

ROW = "miss both, Fed-PRIME"
GENRES = ["Drama", "Comedy", "Documentary", "Horror", "Western", "Romance", "Thriller", "Music"]
SHAPES = ((640, 400), (380, 600), (448, 448))  # width and height


def make_photos(folder: Path, classes: list[str], photos: int, words: int) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    with open(folder / "manifest.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label", "split", "text"))
        for number, name in enumerate(classes):
            for photo in range(photos):
                width, height = SHAPES[(number + photo) % len(SHAPES)]
                pixels = generator.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
                path = f"{number}-{photo}.jpg"
                Image.fromarray(pixels).resize((width, height)).save(folder / path)
                text = " ".join([name, *("best" for _ in range(words - 1))])
                rows.writerow((path, name, "test" if photo == 0 else "train", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=2, help="photos of each class, one of them for the test")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    arguments = parser.parse_args()
    recipe = read_recipe("fed-prime/table1")
    classes = next(iter(recipe.columns.values())).settings["data"]["classes"]
    with tempfile.TemporaryDirectory() as place:
        model, root = Path(place) / "vilt-b32", Path(place) / "data"
        ViltModel(ViltConfig()).save_pretrained(model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(EMBEDDED_FOLDER / name, model / name)
        make_photos(root / "upmc-food101", classes, arguments.photos, words=8)
        make_photos(root / "mm-imdb", GENRES, arguments.photos, words=200)
        settings = {
            "model": {"name": str(model)},
            "data": {"root": str(root), "clients": arguments.clients},
            "federation": {"rounds": arguments.rounds},
        }
        reproduce_all(
            ["fed-prime/table1"], "paper", False, 1, [ROW], settings, Path(place) / "out", jobs=1, quiet=False
        )


if __name__ == "__main__":
    main()
