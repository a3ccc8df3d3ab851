"""Write a small subset of a parquet file of images as class folders, with the same draw for the same numbers.

    python -m benchmarks.subset caltech101.parquet caltech --train 16 --test 8
    python -m benchmarks.subset oxford_pets.parquet pets --train 30 --test 15 --of trainval:test

``--of`` names the values of the column ``split`` from which training and test images are drawn, joined by commas. Without
it a class is divided: at most a quarter of its images are for the test.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pyarrow.parquet import read_table


def draw(labels: list[str], splits: list[str], train: int, test: int, of: str) -> Iterable[tuple[str, str, int]]:
    """Yield the part, the class and the row of each chosen image, class by class."""
    generator = np.random.default_rng(0)
    sources = [source.split(",") for source in of.split(":")] if of else []
    for name in sorted(set(labels)):
        rows = np.array([row for row, label in enumerate(labels) if label == name])
        if sources:
            parts = [
                generator.permutation([row for row in rows if splits[row] in source])[:count]
                for source, count in zip(sources, (train, test), strict=True)
            ]
        else:
            rows = generator.permutation(rows)
            held_out = min(test, len(rows) // 4)
            parts = [rows[held_out : held_out + train], rows[:held_out]]
        for part, chosen in zip(("train", "test"), parts, strict=True):
            yield from ((part, name, int(row)) for row in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, required=True)
    parser.add_argument("--test", type=int, required=True)
    parser.add_argument("--of", default="")
    asked = parser.parse_args()
    table = read_table(asked.file)
    images, labels, splits = (table[name].to_pylist() for name in ("image", "label", "split"))
    counts = {"train": 0, "test": 0}
    for part, name, row in draw(labels, splits, asked.train, asked.test, asked.of):
        folder = asked.folder / part / name.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        content = images[row]["bytes"] if isinstance(images[row], dict) else images[row]
        (folder / f"{row}.jpg").write_bytes(content)
        counts[part] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
