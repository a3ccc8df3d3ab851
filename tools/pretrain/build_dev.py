"""Pack the monitor set: images that are never trained on, to watch a training run by.

Samples of the train or val parts of held-out sets, Tiny-ImageNet val, held-back Caltech-101 images and the Flickr8k
test list. The reported test numbers do not come from here, but choices were made by it: see the model card.
Writes OUT/images.bin, OUT/index.npz (see images.py) and OUT/sets.json (which rows are which set, names, captions).
"""

import argparse
import json
import os
import random
from pathlib import Path

from PIL import Image

from tools.pretrain import sources
from tools.pretrain.held_out import read_set
from tools.pretrain.images import encode_webp, read_square, write_pack

# (set, split, at most so many images)
SAMPLES = (
    ("cifar10", "train", 3000),
    ("oxford_pets", "trainval", 1000),
    ("flowers102", "val", 1000),
    ("eurosat_rgb", "all", 1000),
    ("food101_10x100", "train", 500),
    ("grocery_pypi_eccd", "train", 600),
    ("tiny_imagenet_subset", "val", 2000),
    ("caltech101", "held", 1000),
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="holds the sets named in SAMPLES")
    parser.add_argument("--flickr", required=True, help="git repository with Flicker8k_Dataset/ and Flicker8k_text/")
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    options = parser.parse_args(arguments)

    generator = random.Random(0)
    encoded: list[bytes] = []
    labels: list[int] = []
    ranges: dict[str, tuple[int, int]] = {}
    names: dict[str, list[str]] = {}
    captions: list[str] = []

    def add(source: object, label: int) -> None:
        encoded.append(encode_webp(Image.fromarray(read_square(source)), quality=92, method=2))
        labels.append(label)

    for name, split, count in SAMPLES:
        images = read_set(options.data, name)
        rows, start = images.splits[split], len(labels)
        for source, label in generator.sample(rows, min(count, len(rows))):
            add(source, label)
        ranges[name], names[name] = (start, len(labels)), images.class_names
        print(f"{name}: {len(labels) - start} images", flush=True)

    wanted, by_name = sources.flickr_test_names(options.flickr), sources.flickr_captions(options.flickr)
    files = (
        (identity, os.path.basename(path))
        for identity, path in sources.git_files(options.flickr, sources.FLICKR_IMAGES)
    )
    items = [(identity, name) for identity, name in files if name in wanted]
    start = len(labels)
    for name, content in sources.git_contents(options.flickr, items):
        add(content, 0)
        captions.append(by_name[name][0])
    ranges["flickr_test"] = (start, len(labels))

    write_pack(options.out, encoded, labels)
    (options.out / "sets.json").write_text(json.dumps({"range": ranges, "names": names, "captions": captions}))
    print(f"{len(labels)} images, {sum(map(len, encoded)) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
