"""Measure how many images a second are encoded, against the bare forward pass and bare decoding.

    python -m benchmarks.encoding [--device cuda | cpu] [--model vit-b-16 | fedvl-tiny] [--images 2048]
        [--precision float32 | tf32 | bfloat16] [--json]

Images are made JPEGs of 500 x 375 pixels; ViT-B/16 has its real sizes and random weights. ``encode``
is what a run does: read, decode, check, resize, crop, encode, write the feature cache. The model's
fingerprint, of all its weights, is taken before, once for a run, in ``fingerprint_s`` seconds.
``forward`` is the image tower alone, on batches that are on the device. ``decode`` is reading and preprocessing
alone, with 1, 2, 4 ... threads; ``draft`` is the same with JPEG's own reduction while decoding
(Image.draft), which FedVL does not use: pixels differ, and so features, and ``draft_cosine`` says by
how much. On a processor ``products`` are the matrix products of the tower alone in float32, bfloat16
and int8 (dynamic quantisation). ``--precision`` is of the products in encode and forward; a run
encodes in float32.
"""

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.prompts import build
from fedvl.data import features
from fedvl.data.features import encode_images, encode_split
from fedvl.data.sources import open_dataset
from fedvl.data.stores import Split
from fedvl.models.clip import DualEncoder

SIZE, DRAFTED, PASSES = (500, 375), 8, 3
BATCHES = {"cpu": 8}  # images of a forward pass; 64 on a GPU, as a run encodes them


def make_images(folder: Path, count: int) -> None:
    """Write photos of nothing: smooth colours with some noise, as large as a photo is as JPEG."""

    def write(number: int) -> None:
        noise = np.random.default_rng(number)
        smooth = Image.fromarray(noise.integers(0, 256, (12, 16, 3), np.uint8)).resize(SIZE, Image.Resampling.BICUBIC)
        grain = noise.integers(-12, 13, (SIZE[1], SIZE[0], 1))
        pixels = np.clip(np.asarray(smooth).astype(np.int64) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"class-{number % 2}" / f"{number:05d}.jpg", quality=90)

    for name in ("class-0", "class-1"):
        (folder / name).mkdir(parents=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(write, range(count)))


def rate(count: int, work: Callable[[], Any], device: str) -> float:
    """Return images a second."""
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return round(count / (time.perf_counter() - began), 1)


def threads() -> Sequence[int]:
    most = len(os.sched_getaffinity(0))
    return [number for number in (1, 2, 4, 8, 16, 32) if number <= most]


def decode_rate(split: Split, encoder: DualEncoder, readers: int, count: int) -> float:
    with ThreadPoolExecutor(readers) as pool:
        return rate(count, lambda: list(pool.map(lambda i: encoder.preprocess(split.read(i)), range(count))), "cpu")


def drafted(path: Path, encoder: DualEncoder) -> Tensor:
    """Preprocess a file with JPEG's own reduction."""
    image = Image.open(io.BytesIO(path.read_bytes()))
    image.draft("RGB", (encoder.image_size, encoder.image_size))
    return encoder.preprocess(image.convert("RGB"))


def draft_figures(paths: Sequence[Path], encoder: DualEncoder, readers: int) -> dict[str, float]:
    with ThreadPoolExecutor(readers) as pool:
        speed = rate(len(paths), lambda: list(pool.map(lambda path: drafted(path, encoder), paths)), "cpu")
    few = paths[:DRAFTED]
    exact = encode_images(encoder, "features", [encoder.preprocess(Image.open(path)) for path in few]).float()
    other = encode_images(encoder, "features", [drafted(path, encoder) for path in few]).float()
    cosine = torch.cosine_similarity(exact, other).min()
    return {"draft": speed, "draft_cosine": round(float(cosine), 5)}


def forward_rate(encoder: DualEncoder, device: str, count: int) -> float:
    """Return the rate of the tower alone; the first batches warm it up."""
    side = encoder.image_size
    size = BATCHES.get(device, 64)
    pixels = torch.randint(256, (size, 3, side, side), dtype=torch.uint8, device=device)
    batches = max(1, count // size)

    def work(number: int) -> None:
        with torch.inference_mode():
            for _ in range(number):
                encoder.encode_image(encoder.normalise(pixels)).half().cpu()

    work(2 if device != "cpu" else 1)
    return rate(size * batches, lambda: work(batches), device)


def product_rates(encoder: DualEncoder) -> dict[str, float]:
    """Return rates of the tower's products alone, of 8 images, in three precisions."""
    width, tokens, layers = encoder.vision_width, (encoder.image_size // 16) ** 2 + 1, encoder.vision_layers
    sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    exact = torch.nn.ModuleList(torch.nn.Linear(*size) for _ in range(layers) for size in sizes)
    small = torch.ao.quantization.quantize_dynamic(exact, {torch.nn.Linear}, torch.qint8)
    inputs = {size: torch.randn(8 * tokens, size) for size in (width, 4 * width)}
    found = {}
    for name, modules, kind in (
        ("float32", exact, torch.float32),
        ("bfloat16", exact, torch.bfloat16),
        ("int8", small, None),
    ):
        if kind is torch.bfloat16:
            modules = modules.to(kind)
        given = {size: tensor.to(kind or torch.float32) for size, tensor in inputs.items()}

        def work(modules: Any = modules, given: dict[int, Tensor] = given) -> None:
            with torch.inference_mode():
                for module in modules:
                    module(given[module.in_features])

        work()
        found[name] = rate(8 * PASSES, lambda: [work() for _ in range(PASSES)], "cpu")
    return found


@contextlib.contextmanager
def in_precision(kind: str, device: str) -> Iterator[None]:
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    with torch.autocast(device, torch.bfloat16, enabled=kind == "bfloat16"):
        yield
    torch.set_float32_matmul_precision("highest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=["vit-b-16", "fedvl-tiny"], default="vit-b-16")
    parser.add_argument("--precision", choices=["float32", "tf32", "bfloat16"], default="float32")
    parser.add_argument("--images", type=int, help="2048, or 32 on a processor")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    count = arguments.images or (32 if arguments.device == "cpu" else 2048)
    encoder = build(arguments.model, arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        make_images(images, count)
        split = open_dataset(str(images)).splits["train"]
        some = min(count, len(split))
        began = time.perf_counter()
        assert encoder.fingerprint
        taken = round(time.perf_counter() - began, 2)
        found: dict[str, Any] = {
            "fingerprint_s": taken,
            "decode": {n: decode_rate(split, encoder, n, some) for n in threads()},
        }
        found |= draft_figures(sorted(images.rglob("*.jpg"))[:some], encoder, threads()[-1])
        with in_precision(arguments.precision, arguments.device.partition(":")[0]):
            found["forward"] = forward_rate(encoder, arguments.device, some)
            work = lambda: encode_split(split, encoder, "features", Path(folder) / "cache")  # noqa: E731
            found["encode"] = rate(len(split), work, arguments.device)
    if arguments.device == "cpu" and arguments.model == "vit-b-16":
        found["products"] = product_rates(encoder)
    found["encode_of_forward"] = round(found["encode"] / found["forward"], 2)
    known = {
        "device": arguments.device,
        "model": arguments.model,
        "precision": arguments.precision,
        "images": len(split),
    }
    known |= {"readers": features._READERS, "torch_threads": torch.get_num_threads()}
    if arguments.json:
        print(json.dumps({**known, **found}))
        return
    for name, value in {**known, **found}.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
