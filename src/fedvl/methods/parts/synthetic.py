"""The class-balanced synthetic set that a server builds before training (CacheFL, eq. 2 and 3).

It comes from images of each class, which a text-to-image model wrote earlier or writes now. Without
such a model, a simulation can use images of the dataset that no client holds, or the class texts.
Both are approximations. The former are nearer to the test than generated images are. The latter are
further away: in CLIP-like models images lie off the texts (the "modality gap").
"""

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvl.data.assemble import plain_name
from fedvl.data.catalogue import class_key
from fedvl.data.encoding import ImageEncoder, Progress
from fedvl.data.features import default_cache_dir, encode_split
from fedvl.data.partition import few_shot
from fedvl.data.sources import read_path
from fedvl.data.stores import Split
from fedvl.errors import FedVLError
from fedvl.files import write_whole
from fedvl.methods.base import Samples
from fedvl.seeding import torch_generator
from fedvl.version import install_command

PIPELINE = "diffusers:"  # prefix of a text-to-image model's folder or hub name
FILE_MARK = "@"  # before the name of a file of class descriptions
HELD_OUT = "held-out"  # images of the dataset that no client holds, in place of generated ones


def features_around(texts: Tensor, shots: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Return ``shots`` vectors per unit text, class by class: unit(text + sigma * normal)."""
    centres = texts.repeat_interleave(shots, dim=0)
    normal = torch.randn(centres.shape, generator=generator).to(centres)
    return normalize(centres + sigma * normal, dim=-1)


def features_held_out(samples: Samples, class_names: Sequence[str], shots: int, seed: int) -> Tensor:
    """Return unit features of ``shots`` images a class that no client holds, class by class."""
    labels = samples.labels.cpu().numpy()
    found = np.bincount(labels[labels >= 0], minlength=len(class_names))
    if found.min() < shots:
        least = int(found.argmin())
        raise FedVLError(
            f"The cache needs {shots} images of class '{class_names[least]}' that no client holds, and there are "
            f"{found[least]}; give clients fewer with data.shots, or use fewer with method.cache_shots."
        )
    rows = few_shot(labels, shots, seed)
    rows = rows[np.argsort(labels[rows], kind="stable")]
    return normalize(samples.inputs["features"][torch.from_numpy(rows).to(samples.labels.device)], dim=-1)


def features_of_pictures(
    source: Path, class_names: Sequence[str], shots: int, encoder: ImageEncoder, progress: Progress | None = None
) -> Tensor:
    """Return unit features of the first ``shots`` images of each class, class by class.

    ``source`` is a folder of class folders (or a parquet file or manifest with labels). A folder
    matches a class name however that is spelled; other folders are ignored.
    """
    if not source.exists():
        raise FedVLError(
            f"There are no synthetic images at {source}; name a folder that has a folder of images per class."
        )
    table = read_path(source)
    rows = _rows_of_classes(table.labels, class_names)
    for name, found in zip(class_names, rows, strict=True):
        if not found:
            raise FedVLError(f"The synthetic images in {source} have no class '{name}'; add a folder of that name.")
        if len(found) < shots:
            raise FedVLError(
                f"The synthetic images in {source} have {len(found)} of class '{name}' where {shots} are needed; "
                f"add some, or use fewer with --set method.cache_shots={len(found)}."
            )
    chosen = np.array([row for found in rows for row in found[:shots]], np.int64)
    split = Split(table.store, chosen, np.repeat(np.arange(len(rows)), shots))
    encoded = encode_split(split, encoder, "features", progress=progress)
    if encoded.bad:
        name, reason = encoded.bad[0]
        raise FedVLError(f"The synthetic image {name} in {source} cannot be used ({reason.rstrip('.')}); replace it.")
    return normalize(encoded.tensor, dim=-1)


def _rows_of_classes(labels: Sequence[str], class_names: Sequence[str]) -> list[list[int]]:
    """Return each class's rows, by exact name or else without case, spaces and punctuation."""
    by_name: dict[str, list[int]] = {}
    by_key: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        by_name.setdefault(plain_name(unquote(label)).casefold(), []).append(row)
        by_key.setdefault(class_key(unquote(label)), []).append(row)
    keys = [class_key(name) for name in class_names]
    loose = [by_key.get(key, []) if keys.count(key) == 1 else [] for key in keys]  # "C" and "C++" have one key
    return [by_name.get(name.casefold()) or other for name, other in zip(class_names, loose, strict=True)]


def pictures_folder(model: str, prompt: str) -> Path:
    """Return the cache folder of a model's images for a prompt; delete it to generate anew."""
    text = descriptions_in(prompt) if prompt.startswith(FILE_MARK) else prompt
    known = hashlib.sha256(f"{model}\0{text}".encode()).hexdigest()[:8]
    return default_cache_dir() / "synthetic" / f"{Path(model).name}-{known}"


def descriptions_in(prompt: str) -> str:
    """Return the text of a file of class descriptions, given as @FILE."""
    try:
        return Path(prompt.removeprefix(FILE_MARK)).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FedVLError(
            f"Cannot read class descriptions from {prompt.removeprefix(FILE_MARK)}; give a text file with a line "
            "'CLASS: description' for each class."
        ) from error


def prompts_of(prompt: str, class_names: Sequence[str]) -> list[str]:
    """Return the prompt of each class: the text around its name, or its line of a file."""
    if not prompt.startswith(FILE_MARK):
        return [prompt.replace("{}", name) for name in class_names]
    lines = (line.partition(":") for line in descriptions_in(prompt).splitlines())
    known = {class_key(name): text.strip() for name, _, text in lines}
    if lacking := [name for name in class_names if not known.get(class_key(name))]:
        raise FedVLError(
            f"{prompt.removeprefix(FILE_MARK)} has no description of class '{lacking[0]}'; add a line '{lacking[0]}: description'."
        )
    return [known[class_key(name)] for name in class_names]


def generate_pictures(
    model: str,
    prompt: str,
    class_names: Sequence[str],
    shots: int,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Generate the missing images with a `diffusers` pipeline, and return their folder.

    Image i of a class has a seed of its own, so that it does not depend on the others, and a
    stopped run resumes.
    """
    folder = pictures_folder(model, prompt)
    prompts = dict(zip(class_names, prompts_of(prompt, class_names), strict=True))
    wanted = [
        (name, index, folder / _folder_name(name) / f"{index:03}.png") for name in class_names for index in range(shots)
    ]
    missing = [item for item in wanted if not item[2].exists()]
    pipeline = _pipeline(model, device) if missing else None
    for done, (name, index, path) in enumerate(missing, 1):
        generator = torch_generator(0, "picture", name, index)
        image = pipeline(prompts[name], generator=generator).images[0]  # type: ignore[misc]
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "PNG")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, buffer.getvalue())
        except OSError as error:
            raise FedVLError(
                f"Generated images cannot be written to {folder} ({error.strerror or error}); "
                "set FEDVL_CACHE to another folder."
            ) from error
        if progress is not None:
            progress(done, len(missing))
    return folder


def _folder_name(class_name: str) -> str:
    """Return a class name as a folder name from which it can be recovered."""
    return quote(class_name, safe=" ").replace(".", "%2E")


def _pipeline(model: str, device: torch.device | str) -> Callable[..., Any]:
    try:
        from diffusers import DiffusionPipeline  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise FedVLError(
            f"Generating images needs diffusers: {install_command('generate')}; "
            "or name a folder of images per class as method.synthetic."
        ) from error
    try:
        pipeline = DiffusionPipeline.from_pretrained(model, use_safetensors=True)  # never a pickle
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise FedVLError(f"'{model}' is not a text-to-image model that diffusers can load ({reason}).") from error
    pipeline.set_progress_bar_config(disable=True)  # one bar for all pictures is enough
    moved: Callable[..., Any] = pipeline.to(device)
    return moved
