"""Python objects as the names and files that settings have.

Images, features and partitions are written to the folder `given` of the feature cache, under a
hash of their content, so that a run of them is resumed like any other. A method's class stays in
this process.
"""

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedvl.config import Settings
from fedvl.data.features import default_cache_dir, keep_private
from fedvl.errors import FedVLError
from fedvl.files import SHORTENED, write_whole
from fedvl.methods import register

if TYPE_CHECKING:
    from fedvl.data.imported import ImportedEncoder

GIVEN_FORMAT = "give dataset=(images, labels), or (images, labels, test_images, test_labels)"
SPLITS_GIVEN = ("train", "test")


class Vectors(NamedTuple):
    """Features and class names of a dataset, and the model that made the features."""

    model: str
    images: list[bytes]
    classes: list[str]
    width: int


def settings_of_objects(given: Mapping[str, Any], model: str) -> Settings:
    """Return settings in which a class, arrays and rows are replaced by names and files."""
    settings = dict(given)
    if isinstance(settings.get("method"), type):
        settings["method"] = register(settings["method"])
    if is_object(settings.get("dataset")):
        parts = settings["dataset"]
        several = len(parts) == 4
        settings["dataset"], vectors = written_dataset(parts)
        if vectors is not None:
            settings["model"] = imported_features(Path(settings["dataset"]), vectors._replace(model=model)).name
            settings.setdefault("evaluation.examples", 0)  # vectors cannot be looked at
        if not several and is_object(settings.get("partition")):
            raise FedVLError(
                "A partition by rows needs test images that are given too, since otherwise some of these rows are held out "
                "for the test; give dataset=(images, labels, test_images, test_labels)."
            )
    if is_object(settings.get("partition")):
        settings["partition"] = written_rows(settings["partition"])
    return settings


def is_object(value: Any) -> bool:
    """Whether a dataset or partition is given by its content, and not by one or several names."""
    return isinstance(value, tuple | list) and not all(isinstance(part, str | Path) for part in value)


def written_rows(rows: Sequence[Any]) -> str:
    """Write a partition as a file of rows, and return its path."""
    try:
        content = json.dumps([[int(row) for row in own] for own in rows]).encode()
    except (TypeError, ValueError) as error:
        raise FedVLError(
            "A partition is a text such as 'iid', or a list of row numbers for each client, as in [[0, 5, 9], [2, 3]]."
        ) from error
    path = given_folder() / f"partition-{short_hash(content)}.json"
    if not path.exists():
        write_whole(path, content)
    return str(path)


def written_dataset(parts: Sequence[Any]) -> tuple[str, Vectors | None]:
    """Write images or features with a manifest; return the folder and what the features are."""
    if len(parts) not in (2, 4):
        raise FedVLError(f"A dataset of {len(parts)} parts was given; {GIVEN_FORMAT}.")
    stated = SPLITS_GIVEN if len(parts) == 4 else ("",)
    rows, contents, width, kinds = list[tuple[str, str, str]](), list[bytes](), 0, set[bool]()
    for split, images, labels in zip(stated, parts[::2], parts[1::2], strict=True):
        found, width = contents_of(images)
        names = label_names(labels)
        if len(names) != len(found):
            raise FedVLError(
                f"There are {len(found):,} images and {len(names):,} labels; give one label for each image."
            )
        for row, (name, (ending, content)) in enumerate(zip(names, found, strict=True)):
            rows.append((f"{split or 'all'}/{row:07d}{ending}", name, split))
            contents.append(content)
        kinds.add(bool(width))
    if len(kinds) > 1:
        raise FedVLError(
            "The training images are given as images and the test images as features, or the reverse; give both alike."
        )
    text = io.StringIO()
    csv.writer(text).writerows([("path", "label", "split"), *rows])
    manifest = text.getvalue().encode()
    digest = hashlib.sha256(manifest)
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    folder = given_folder() / f"{'features' if width else 'images'}-{digest.hexdigest()[:16]}"
    if not (folder / "manifest.csv").exists():
        for (path, _, _), content in zip(rows, contents, strict=True):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        write_whole(folder / "manifest.csv", manifest)  # last: with it the folder is complete
    classes = sorted({name for _, name, _ in rows} - {""})
    return str(folder), Vectors("", contents, classes, width) if width else None


VECTOR = ".vector"  # the 32-bit floats of one image's features


def contents_of(images: Any) -> tuple[list[tuple[str, bytes]], int]:
    """Return the ending and the content of a file for each image, and the length of a vector."""
    from fedvl.data.given import image_sources

    if hasattr(images, "detach"):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray) and images.dtype.kind == "f":
        if images.ndim != 2 or not images.size:
            raise FedVLError(
                f"Features of shape {images.shape} were given; give one row of floats for each image, or images as uint8."
            )
        rows = np.ascontiguousarray(images, dtype="<f4")
        return [(VECTOR, row.tobytes()) for row in rows], rows.shape[1]
    return [
        (".png", source) if isinstance(source, bytes) else (source.suffix, source.read_bytes())
        for _, source in image_sources(images)
    ], 0


def label_names(labels: Any) -> list[str]:
    """Return class names; None is an image without a label."""
    names = ["" if label is None else label for label in labels]
    if odd := [name for name in names if not isinstance(name, str)]:
        raise FedVLError(
            f"The label {SHORTENED.repr(odd[0])} is not a class name, which the model reads; give words, as in [names[label] for "
            "label in labels]."
        )
    return [str(name) for name in names]


def imported_features(folder: Path, vectors: Vectors) -> "ImportedEncoder":
    """Keep features under a name for ``model``, with the texts of the model that made them."""
    import torch

    from fedvl.data.catalogue import general_templates
    from fedvl.data.imported import ImportedManifest, keep_vectors, open_model
    from fedvl.data.inputs import embed_names
    from fedvl.models.clip import DualEncoder

    encoder = open_model(vectors.model)
    if not isinstance(encoder, DualEncoder):
        raise FedVLError(
            f"'{vectors.model}' has no features of images alone; name the CLIP model that made them as model."
        )
    if encoder.dim != vectors.width:
        raise FedVLError(
            f"The features have {vectors.width} numbers and those of '{vectors.model}' {encoder.dim}; name the model that "
            "made them as model."
        )
    rows = torch.from_numpy(np.frombuffer(b"".join(vectors.images), "<f4").reshape(-1, vectors.width).copy())
    described = ImportedManifest(
        name=f"{folder.name}-{encoder.fingerprint[:8]}",
        sha256=encoder.fingerprint,
        normalised=False,
        logit_scale=encoder.logit_scale,
        images=[hashlib.sha256(content).hexdigest() for content in vectors.images],
        classes=vectors.classes,
    )
    texts = embed_names(vectors.classes, general_templates()["default"], encoder, "cpu")
    return keep_vectors(Path("the features given"), described, {"images": rows, "texts": texts.float().contiguous()})


def given_folder() -> Path:
    """Return the folder of objects that were given, which only its owner reads."""
    folder = default_cache_dir().absolute() / "given"
    keep_private(folder.parent)
    keep_private(folder)
    return folder


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
