"""Measure how many images a second are encoded, against the bare forward pass and bare decoding.

    python -m benchmarks.encoding [--device cuda | cpu] [--model vit-b-16 | fedvl-tiny] [--images 2048]
        [--precision float32 | tf32 | bfloat16] [--json]

Images are made JPEGs of 500 x 375 pixels; ViT-B/16 has its real sizes and random weights. ``encode``
is what a run does: read, decode, check, resize, crop, encode, write the feature cache. The model's
fingerprint, of all its weights, is taken before, once for a run, in ``fingerprint_s`` seconds.
On a GPU ``processes`` decode, and the GPU resizes, with the pixels of Pillow.
``forward`` is the image tower alone, on batches that are on the device. ``decode`` is reading and
preprocessing alone of 2048 images at most, with 1, 2, 4 ... threads; ``draft`` is the same with JPEG's own reduction while
decoding (Image.draft), which FedVL does not use: pixels differ, and so features, and ``draft_cosine`` says by
how much. ``decoders`` are Pillow and others that are installed, decoding alone, for a second of one core.
On a processor ``precisions`` compares float32, bfloat16 and int8 (dynamic quantisation) on
test images of cifar10-mini: the tower's images a second, the least cosine of two features of an image,
and zero-shot accuracy, which means nothing with random weights. ``--precision`` is of the products in
encode and forward; a run encodes in float32 unless ``model.encoding`` is bfloat16.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.prompts import build
from fedvl.data.encoding import BATCH, BATCHES, READERS, encode_images
from fedvl.data.features import encode_split
from fedvl.data.inputs import embed_classes
from fedvl.data.sources import open_dataset
from fedvl.data.staging import DECODING_PROCESSES
from fedvl.data.stores import Split
from fedvl.models import transformer
from fedvl.models.clip import DualEncoder
from fedvl.tensors import usable_cores

SIZE, DRAFTED, PASSES = (500, 375), 8, 3
DECODED = 2048  # images that are decoded alone
PRECISE = {"vit-b-16": 16, "fedvl-tiny": 500}  # test images


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
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(write, range(count)))


def rate(count: int, work: Callable[[], Any], device: str) -> float:
    """Return images a second."""
    began = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return round(count / (time.perf_counter() - began), 1)


def threads() -> Sequence[int]:
    most = usable_cores()
    return [number for number in (1, 2, 4, 8, 16, 32) if number <= most]


def decode_rate(split: Split, encoder: DualEncoder, readers: int, count: int) -> float:
    with ThreadPoolExecutor(readers) as pool:
        return rate(count, lambda: list(pool.map(lambda i: encoder.preprocess(split.read(i)), range(count))), "cpu")


def decoders() -> dict[str, Callable[[bytes], Any]]:
    """Return what decodes a JPEG to rows of RGB: Pillow, and what else is installed."""
    found: dict[str, Callable[[bytes], Any]] = {"pillow": lambda data: np.asarray(Image.open(io.BytesIO(data)))}
    with contextlib.suppress(ImportError):
        simplejpeg = import_module("simplejpeg")
        found["simplejpeg"] = simplejpeg.decode_jpeg
    with contextlib.suppress(ImportError, RuntimeError):
        turbo = import_module("turbojpeg")
        found["turbojpeg"] = partial(turbo.TurboJPEG().decode, pixel_format=turbo.TJPF_RGB)
    with contextlib.suppress(ImportError):
        cv2 = import_module("cv2")
        found["opencv"] = lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
    with contextlib.suppress(ImportError):
        pyvips = import_module("pyvips")
        found["pyvips"] = lambda data: pyvips.Image.new_from_buffer(data, "").numpy()
    return found


def decoder_figures(paths: Sequence[Path], encoder: DualEncoder) -> dict[str, Any]:
    """Return how many images each decoder decodes in a second of one core, and if pixels are Pillow's.

    ``pixels_sha256`` is of preprocessed images: another Pillow gives the same, or other features.
    """
    files = [path.read_bytes() for path in paths]
    known = decoders()
    figures: dict[str, Any] = {}
    for name, decode in known.items():
        same = all(np.array_equal(decode(data), known["pillow"](data)) for data in files[:DRAFTED])
        speeds = []
        for _ in range(PASSES):
            began = time.process_time()
            for data in files:
                decode(data)
            speeds.append(round(len(files) / (time.process_time() - began), 1))
        figures[name] = {"rate": max(speeds), "same_pixels": same}
    pixels = [encoder.preprocess(Image.open(path)).numpy().tobytes() for path in paths[:DRAFTED]]
    return {"decoders": figures, "pixels_sha256": sha256(b"".join(pixels)).hexdigest()[:16]}


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
    size = BATCHES.get((device.partition(":")[0], encoder.encoding), BATCH)
    pixels = torch.randint(256, (size, 3, side, side), dtype=torch.uint8, device=device)
    batches = max(1, count // size)

    def work(number: int) -> None:
        with torch.inference_mode():
            for _ in range(number):
                encoder.encode_image(encoder.normalise(pixels)).half().cpu()

    work(2 if device != "cpu" else 1)
    return rate(size * batches, lambda: work(batches), device)


@contextlib.contextmanager
def in_int8() -> Iterator[None]:
    """Multiply by weights in int8, each quantised once (dynamic quantisation)."""
    made: dict[Any, torch.nn.Module] = {}

    def multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        key = weight.data_ptr(), weight.shape
        if key not in made:
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
            layer.weight.data, layer.bias.data = weight, bias
            made[key] = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer), {torch.nn.Linear})[0]
        product: Tensor = made[key](x)
        return product

    with mock.patch.object(transformer, "multiply", multiply):
        yield


def precision_figures(encoder: DualEncoder, count: int) -> dict[str, dict[str, float]]:
    """Return the tower's rate on test images, the least cosine with float32, zero-shot accuracy."""
    dataset = open_dataset("cifar10-mini")
    split = dataset.splits["test"]
    chosen = np.linspace(0, len(split) - 1, min(count, len(split))).astype(int).tolist()
    images = [encoder.preprocess(split.read(index)) for index in chosen]
    labels = torch.from_numpy(split.labels[chosen])
    texts = embed_classes(dataset, "default", encoder, "cpu")
    lower = encoder.encoding_in("bfloat16")
    kinds = {"float32": (encoder, contextlib.nullcontext), "bfloat16": (lower, contextlib.nullcontext)}
    found: dict[str, dict[str, float]] = {}
    exact = torch.empty(0)
    for name, (tower, inside) in (kinds | {"int8": (encoder, in_int8)}).items():

        def work(tower: DualEncoder = tower) -> Tensor:
            batches = [images[start : start + 8] for start in range(0, len(images), 8)]
            return torch.cat([encode_images(tower, "features", batch) for batch in batches]).float()

        with inside():
            features = work()
            speed = max(rate(len(images), work, "cpu") for _ in range(PASSES))
        exact = features if name == "float32" else exact
        right = (torch.nn.functional.normalize(features, dim=-1) @ texts.T).argmax(1) == labels
        found[name] = {
            "rate": speed,
            "least_cosine": round(float(torch.cosine_similarity(features, exact).min()), 5),
            "accuracy": round(100 * float(right.float().mean()), 2),
        }
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
    if arguments.precision == "bfloat16":
        encoder = encoder.encoding_in("bfloat16")
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
            "decode": {n: decode_rate(split, encoder, n, min(some, DECODED)) for n in threads()},
        }
        found |= decoder_figures(sorted(images.rglob("*.jpg"))[: min(some, 256)], encoder)
        found |= draft_figures(sorted(images.rglob("*.jpg"))[: min(some, DECODED)], encoder, threads()[-1])
        with in_precision(arguments.precision, arguments.device.partition(":")[0]):
            found["forward"] = forward_rate(encoder, arguments.device, some)
            work = lambda: encode_split(split, encoder, "features", Path(folder) / "cache")  # noqa: E731
            found["encode"] = rate(len(split), work, arguments.device)
    if arguments.device == "cpu":
        found["precisions"] = precision_figures(encoder, PRECISE[arguments.model])
    found["encode_of_forward"] = round(found["encode"] / found["forward"], 2)
    known = {
        "device": arguments.device,
        "model": arguments.model,
        "precision": arguments.precision,
        "images": len(split),
    }
    known |= {"readers": READERS, "processes": DECODING_PROCESSES, "torch_threads": torch.get_num_threads()}
    if arguments.json:
        print(json.dumps({**known, **found}))
        return
    for name, value in {**known, **found}.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
