"""The sets that the models are evaluated on: class names, prompts, and which images the model card reports."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.pretrain.sources import CALTECH_BACKGROUND, CALTECH_HELD_EVERY, Row, read_rows

EUROSAT_NAMES = {
    "AnnualCrop": "annual crop land",
    "Forest": "forest",
    "HerbaceousVegetation": "herbaceous vegetation land",
    "Highway": "highway or road",
    "Industrial": "industrial buildings",
    "Pasture": "pasture land",
    "PermanentCrop": "permanent crop land",
    "Residential": "residential buildings",
    "River": "river",
    "SeaLake": "sea or lake",
}
CALTECH_NAMES = {
    "Faces": "face",
    "Faces_easy": "face close-up",
    "Leopards": "leopard",
    "Motorbikes": "motorbike",
    "airplanes": "airplane",
    "car_side": "car",
}
PLAIN_PROMPT = "a photo of a {}"
# The prompt that CoOp has for the set, where it has one.
SET_PROMPTS = {
    "oxford_pets": "a photo of a {}, a type of pet",
    "flowers102": "a photo of a {}, a type of flower",
    "eurosat_rgb": "a centered satellite photo of {}",
    "dtd10": "{} texture",
    "food101_10x100": "a photo of {}, a type of food",
}
ENSEMBLE = (
    "a photo of a {}",
    "a {}",
    "{}",
    "a picture of a {}",
    "a low resolution photo of a {}",
    "a photo of the {}",
    "a blurry photo of a {}",
    "a close-up photo of a {}",
)
# (split, every so many images) that the model card's table reports; "*" is all splits together. The last two sets are
# held-back images of classes that were trained on; the card has them from the monitor sample.
REPORTED = {
    "cifar10": ("test", 1),
    "oxford_pets": ("test", 3),
    "flowers102": ("test", 6),
    "eurosat_rgb": ("all", 9),
    "dtd10": ("all", 1),
    "food101_10x100": ("*", 1),
    "grocery_pypi_eccd": ("test", 1),
    "tiny_imagenet_subset": ("val", 1),
    "caltech101": ("held", 1),
}


@dataclass(frozen=True)
class LabelledSet:
    splits: dict[str, list[tuple[str | bytes | np.ndarray, int]]]  # (image source, class)
    class_names: list[str]

    def rows(self, split: str) -> list[tuple[str | bytes | np.ndarray, int]]:
        return [row for rows in self.splits.values() for row in rows] if split == "*" else self.splits[split]


def _read_cifar(path: Path) -> LabelledSet:
    content = np.load(path)
    splits = {
        split: [(image, int(label)) for image, label in zip(content[f"x_{split}"], content[f"y_{split}"], strict=True)]
        for split in ("train", "test")
    }
    return LabelledSet(splits, [str(name) for name in content["classes"]])


def _shown_name(name: str, label: str, row: Row) -> str:
    """The class name as it stands in a prompt."""
    plain = label.lower().replace("_", " ")
    if name == "eurosat_rgb":
        return EUROSAT_NAMES[label]
    if name == "caltech101":
        return CALTECH_NAMES.get(label, plain)
    if name == "grocery_pypi_eccd":
        coarse = row.fields["coarse"].lower()
        return plain if coarse in plain else f"{plain} {coarse}"
    return plain


def read_set(root: Path, name: str) -> LabelledSet:
    """A set of the data folder; CIFAR-10 is cifar10/cifar10.npz (x_train, y_train, x_test, y_test, classes)."""
    if name == "cifar10":
        return _read_cifar(root / "cifar10" / "cifar10.npz")
    rows = list(enumerate(read_rows(root, name)))
    rows = [(index, row) for index, row in rows if row.label != CALTECH_BACKGROUND]
    examples = {row.label: row for _, row in reversed(rows)}
    labels = sorted(examples)
    position = {label: number for number, label in enumerate(labels)}
    splits: dict[str, list[tuple[str | bytes | np.ndarray, int]]] = {}
    for index, row in rows:
        split = "val" if row.split == "valid" else row.split
        if name == "caltech101":  # has no official split: the rows that build_shards.py holds back
            split = "held" if index % CALTECH_HELD_EVERY == 0 else "used"
        splits.setdefault(split, []).append((row.source, position[row.label]))
    return LabelledSet(splits, [_shown_name(name, label, examples[label]) for label in labels])
