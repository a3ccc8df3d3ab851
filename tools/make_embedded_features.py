"""Compute the features that ship inside the package again.

    python tools/make_embedded_features.py [OUT_FOLDER]

Run this after the embedded model or images have changed.
"""

import argparse
from pathlib import Path

from fedvl.data.features import SHIPPED, ship_features
from fedvl.data.sources import open_dataset
from fedvl.models.checkpoint import load_model

MODEL = "fedvl-tiny"
DATASETS = ("cifar10-mini", "emoji-mini")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=SHIPPED)
    folder = parser.parse_args().out
    encoder = load_model(MODEL)
    made = set()
    for name in DATASETS:
        for part, split in open_dataset(name).splits.items():

            def show(done: int, total: int, label: str = f"{name} {part}") -> None:
                print(f"\r{label}: {done} of {total}", end="", flush=True)

            path = ship_features(split, encoder, folder, show)
            made |= {path, path.with_suffix(".json")}
            print(f" -> {path.name}, {path.stat().st_size:,} bytes")
    # Files of an earlier model or image set would never be used again.
    for path in folder.iterdir():
        if path.suffix in (".safetensors", ".json") and path not in made:
            path.unlink()


if __name__ == "__main__":
    main()
