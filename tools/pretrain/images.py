"""Images of 64 x 64 pixels: cropping, packing many of them into one file, reading them back, normalising.

A pack is a folder with `images.bin` (WebP files one after the other) and `index.npz` (`offset`, where each begins and
the last ends; `label`, one integer an image). 132,819 images are 164 MB this way and decode in about a minute.
"""

import hashlib
import io
import itertools
import os
from collections.abc import Callable, Sequence
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import torch
from PIL import Image

IMAGE_SIZE = 64
MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, so that the model folder works with any CLIP reader
STD = (0.26862954, 0.26130258, 0.27577711)

FEW_IMAGES = 2048  # below this, starting worker processes costs more than it saves


def fit_square(image: Image.Image, to_integer: Callable[[float], int] = int) -> Image.Image:
    """Scale the shorter side to 64 (bicubic) and cut out the centre.

    `to_integer` makes the longer side whole: CLIP's preprocessing truncates (the default, used to evaluate), the
    training shards were made with `round`.
    """
    width, height = image.size
    scale = IMAGE_SIZE / min(width, height)
    width, height = max(IMAGE_SIZE, to_integer(width * scale)), max(IMAGE_SIZE, to_integer(height * scale))
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - IMAGE_SIZE) // 2, (height - IMAGE_SIZE) // 2
    return image.crop((left, top, left + IMAGE_SIZE, top + IMAGE_SIZE))


def read_square(source: str | Path | bytes | np.ndarray) -> np.ndarray:
    """Read one image (a path, the bytes of a file or an array of pixels) as 64 x 64 x 3 uint8, as CLIP would."""
    if isinstance(source, np.ndarray):
        image = Image.fromarray(source)
    else:
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    return np.asarray(fit_square(image.convert("RGB")))


def encode_webp(image: Image.Image, quality: int, method: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality, method=method)
    return buffer.getvalue()


def write_pack(folder: Path, encoded: Sequence[bytes], labels: Sequence[int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    offset = np.cumsum([0, *(len(image) for image in encoded)]).astype(np.int64)
    np.savez(folder / "index.npz", offset=offset, label=np.array(labels, np.int32))
    with (folder / "images.bin").open("wb") as file:
        file.writelines(encoded)


def _decode(encoded: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def read_pack(folder: Path, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The first `limit` images (all by default) as n x 64 x 64 x 3 uint8, and their labels."""
    index = np.load(folder / "index.npz")
    offset = index["offset"] if limit is None else index["offset"][: limit + 1]
    with (folder / "images.bin").open("rb") as file:
        content = file.read(int(offset[-1]))
    encoded = [content[begin:end] for begin, end in itertools.pairwise(offset)]
    if len(encoded) <= FEW_IMAGES:
        images = [_decode(image) for image in encoded]
    else:
        with Pool(os.cpu_count()) as pool:
            images = pool.map(_decode, encoded, chunksize=256)
    return np.stack(images), index["label"][: len(encoded)]


def load_shards(root: Path, cache: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """All images of root/shard*, and for each the position of its label key in keys.json.

    With a cache folder the decoded images are kept there, under a name that changes with the shards' indices.
    """
    folders = sorted(folder for folder in root.glob("shard*") if (folder / "images.bin").exists())
    if not folders:
        raise SystemExit(f"no shards in {root}: make them with tools.pretrain.build_shards")
    kept = None
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
        indices = b"".join((folder / "index.npz").read_bytes() for folder in folders)
        kept = cache / f"images-{hashlib.sha256(indices).hexdigest()[:16]}.npz"
        if kept.exists():
            content = np.load(kept)
            return content["images"], content["keys"]
    parts = [read_pack(folder) for folder in folders]
    images, keys = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if kept is not None:
        np.savez(kept, images=images, keys=keys)
    return images, keys


def channels_first(images: np.ndarray, device: torch.device) -> torch.Tensor:
    """n x H x W x 3 pixels as the n x 3 x H x W tensor that models read; still uint8."""
    return torch.from_numpy(np.ascontiguousarray(images)).to(device).permute(0, 3, 1, 2).contiguous()


def standardise(unit: torch.Tensor) -> torch.Tensor:
    """Pixels in [0, 1] less CLIP's mean, over CLIP's standard deviation."""
    mean = torch.tensor(MEAN, device=unit.device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=unit.device).view(1, 3, 1, 1)
    return (unit - mean) / std


def model_input(images: Sequence[np.ndarray] | np.ndarray, device: torch.device) -> torch.Tensor:
    """uint8 images straight to what the vision tower reads."""
    return standardise(channels_first(np.asarray(images), device).float() / 255)
