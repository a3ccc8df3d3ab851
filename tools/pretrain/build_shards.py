"""Pack the training images, 64 x 64 WebP, into shuffled shards.

Writes OUT/shard0, shard1, ... (see images.py) and OUT/keys.json, the label keys that the shards' integers point into:
"wn:<WordNet id>", "cal:", "cub:", "car:", "fru:" with the class name, "flk:<file name>" (has captions) or "none".

No held-out set is read here. Held back from the sets that are trained on: Tiny-ImageNet val, the Flickr8k test list,
every 5th Caltech-101 image, the CUB-200 test split.
"""

import argparse
import io
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

from PIL import Image

from tools.pretrain import sources
from tools.pretrain.images import IMAGE_SIZE, encode_webp, fit_square, write_pack

FRUITS_PER_CLASS = 25
Job = tuple[str, str | bytes]


def pack_image(job: Job) -> tuple[str, bytes | None]:
    """(label key, path or bytes) to (label key, WebP bytes); None for a file that cannot be read."""
    key, source = job
    try:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
        image.draft("RGB", (2 * IMAGE_SIZE, 2 * IMAGE_SIZE))  # large JPEG files decode at a fraction of their size
        return key, encode_webp(fit_square(image.convert("RGB"), to_integer=round), quality=75, method=4)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return key, None


def labelled_jobs(data: Path) -> Iterator[Job]:
    """The sets that are plain folders: Caltech-101, CUB-200 train, Stanford Cars train, one image an ImageNet class."""
    for index, row in enumerate(sources.read_rows(data, "caltech101")):
        if index % sources.CALTECH_HELD_EVERY != 0:
            yield "none" if row.label == sources.CALTECH_BACKGROUND else f"cal:{row.label}", row.source
    for row in sources.read_rows(data, "cub200"):
        if row.split == "train":
            yield f"cub:{row.label}", row.source
    for row in sources.read_rows(data, "stanford_cars_train"):
        yield f"car:{row.label}", row.source
    for row in sources.read_rows(data, "imagenet-sample-1000"):
        yield f"wn:{row.fields['wnid']}", row.source


def training_jobs(tiny_imagenet: str, flickr: str, fruits: str, data: Path) -> Iterator[Job]:
    """Every training image, as (label key, path or bytes)."""
    generator = random.Random(0)
    files = sources.git_files(tiny_imagenet, "tiny-imagenet-200/train")
    items = [(identity, "wn:" + path.split("/")[2]) for identity, path in files if path.endswith(".JPEG")]
    generator.shuffle(items)
    yield from sources.git_contents(tiny_imagenet, items)

    held_back = sources.flickr_test_names(flickr)
    files = ((identity, os.path.basename(path)) for identity, path in sources.git_files(flickr, sources.FLICKR_IMAGES))
    items = [(identity, f"flk:{name}") for identity, name in files if name.endswith(".jpg") and name not in held_back]
    yield from sources.git_contents(flickr, items)

    by_class = defaultdict(list)
    for identity, path in sources.git_files(fruits, "Training"):
        if path.endswith(".jpg"):
            by_class[path.split("/")[1]].append(identity)
    items = [
        (identity, f"fru:{name}")
        for name, identities in sorted(by_class.items())
        for identity in generator.sample(sorted(identities), min(FRUITS_PER_CLASS, len(identities)))
    ]
    yield from sources.git_contents(fruits, items)

    yield from labelled_jobs(data)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny-imagenet", required=True, help="git repository with tiny-imagenet-200/")
    parser.add_argument("--flickr", required=True, help="git repository with Flicker8k_Dataset/ and Flicker8k_text/")
    parser.add_argument("--fruits", required=True, help="git repository with Training/ of Fruits-360")
    parser.add_argument(
        "--data", required=True, type=Path, help="holds caltech101, cub200, stanford_cars_train, imagenet-sample-1000"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write the shards to")
    parser.add_argument("--shards", type=int, default=3, help="number of shards (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that decode and encode")
    options = parser.parse_args(arguments)

    keys: dict[str, int] = {}
    records: list[tuple[int, bytes]] = []
    skipped = 0
    with Pool(options.workers) as pool:
        jobs = training_jobs(options.tiny_imagenet, options.flickr, options.fruits, options.data)
        for key, encoded in pool.imap(pack_image, jobs, chunksize=64):
            if encoded is None:
                skipped += 1
                continue
            records.append((keys.setdefault(key, len(keys)), encoded))
            if len(records) % 20000 == 0:
                print(f"{len(records)} images", flush=True)
    random.Random(1).shuffle(records)
    for number in range(options.shards):
        part = records[number :: options.shards]
        write_pack(options.out / f"shard{number}", [encoded for _, encoded in part], [label for label, _ in part])
        print(f"shard{number}: {len(part)} images, {sum(len(encoded) for _, encoded in part) / 1e6:.2f} MB")
    (options.out / "keys.json").write_text(json.dumps(list(keys)))
    print(f"{len(records)} images, {len(keys)} keys, {skipped} files skipped")


if __name__ == "__main__":
    main()
