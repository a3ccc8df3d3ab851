"""Folders of real images of one or more sites, and faults that are planted in them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from fedvl.data.sources import open_dataset

CLASSES = ("automobile", "bird", "deer", "dog", "ship")  # which the embedded model knows
TRAIN, TEST = 12, 6  # images of a class at a site


def write_sites(folder: Path, sites: tuple[str, ...]) -> None:
    """Give each site other images of cifar10-mini: train/CLASS and test/CLASS."""
    dataset = open_dataset("cifar10-mini")
    split, names = dataset.splits["train"], dataset.class_names
    for name in CLASSES:
        rows = np.flatnonzero(split.labels == names.index(name))
        for number, site in enumerate(sites):
            own = rows[number * (TRAIN + TEST) : (number + 1) * (TRAIN + TEST)]
            for place, row in enumerate(own.tolist()):
                path = folder / site / ("train" if place < TRAIN else "test") / name
                path.mkdir(parents=True, exist_ok=True)
                split.read(row).save(path / f"{row}.png")


def images_of(site: Path, name: str, part: str = "train") -> list[Path]:
    return sorted((site / part / name).iterdir())


def change(paths: list[Path], how: Callable[[Image.Image], Image.Image]) -> None:
    for path in paths:
        how(Image.open(path)).save(path)


def every(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.png") if path.stem.isdecimal())


# --- one fault each


def unreadable(site: Path) -> None:
    path = images_of(site, "bird")[0]
    path.write_bytes(path.read_bytes()[:200])


def repeated(site: Path) -> None:
    path = images_of(site, "bird")[1]
    path.with_name("copy.png").write_bytes(path.read_bytes())


def leaked(site: Path) -> None:
    path = images_of(site, "bird")[2]
    (site / "test" / "bird" / "leaked.png").write_bytes(path.read_bytes())


def nearly_repeated(site: Path) -> None:
    path = images_of(site, "ship")[0]
    larger = Image.open(path).resize((48, 48), Image.Resampling.BICUBIC)
    larger.point(lambda value: min(255, value + 12)).save(path.with_name("again.jpg"), quality=70)


def in_two_classes(site: Path) -> None:
    path = images_of(site, "dog")[0]
    (site / "train" / "deer" / "dog-too.png").write_bytes(path.read_bytes())


def rare(site: Path) -> None:
    for path in images_of(site, "deer")[3:]:
        path.unlink()


def misspelt(site: Path) -> None:
    for part in ("train", "test"):
        (site / part / "automobile").rename(site / part / "automobil")


def turned(site: Path) -> None:
    change(every(site), lambda image: image.transpose(Image.Transpose.ROTATE_90))


def inverted(site: Path) -> None:
    change(every(site), lambda image: image.point(lambda value: 255 - value))


def blank(site: Path) -> None:
    Image.new("RGB", (32, 32), (90, 90, 90)).save(site / "train" / "dog" / "blank.png")


def thumbnails(site: Path) -> None:
    change(images_of(site, "dog")[:2], lambda image: image.resize((7, 7)))


def outside_any_class(site: Path) -> None:
    path = images_of(site, "ship")[1]
    path.rename(site / "train" / path.name)


def exchanged(site: Path) -> None:
    for part in ("train", "test"):
        (site / part / "dog").rename(site / part / "kept")
        (site / part / "ship").rename(site / part / "dog")
        (site / part / "kept").rename(site / part / "ship")


def twelve_bits(site: Path) -> None:
    path = images_of(site, "bird")[3]
    grey = np.asarray(Image.open(path).convert("L"), np.uint16) * 16
    Image.fromarray(grey).save(path)


def one_class_enlarged(site: Path) -> None:
    change([*images_of(site, "bird"), *images_of(site, "bird", "test")], lambda image: image.resize((40, 40)))


def emptied(site: Path) -> None:
    (site / "train" / "frog").mkdir()
