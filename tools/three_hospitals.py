"""Write the embedded images as the folders of three hospitals, to try a federation: python tools/three_hospitals.py images.

With a hospital's name behind it, only the images of this one are written, into the folder itself.
"""

import sys
from pathlib import Path

from fedvl.data.sources import open_dataset

HOSPITALS = ("hospital-a", "hospital-b", "hospital-c")


def write_images(folder: Path, only: str | None = None) -> None:
    """Write every third image to each hospital, the tenth of them for its test."""
    dataset = open_dataset("cifar10-mini")
    split = dataset.splits["train"]
    for row in range(len(split)):
        hospital = HOSPITALS[row % 3]
        if only in (None, hospital):
            part = "test" if row % 10 == 9 else "train"
            place = (folder if only else folder / hospital) / part / dataset.class_names[split.labels[row]]
            place.mkdir(parents=True, exist_ok=True)
            split.read(row).save(place / f"{row}.png")


if __name__ == "__main__":
    write_images(Path(sys.argv[1]), *sys.argv[2:3])
