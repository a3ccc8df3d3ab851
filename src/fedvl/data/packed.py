"""Features, labels and embedded texts of a dataset, in place of its images and its encoder.

A dataset and model that were packed give the same training and test inputs as the originals. An
embedded model is the package's own; of others there is no tower.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from PIL import Image
from pydantic import Field

from fedvl.config import DataConfig
from fedvl.data.catalogue import lookup
from fedvl.data.features import EncodedSplit, encode_split
from fedvl.data.images import BadImage, Decoded
from fedvl.data.imported import ImportedEncoder
from fedvl.data.inputs import embed_classes
from fedvl.data.sources import Opener
from fedvl.data.stores import Dataset, Split
from fedvl.errors import FedVLError
from fedvl.files import Content, Count, Finite, Hash, Names
from fedvl.models import EMBEDDED
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.tensors import Tensors

SPLITS = ("train", "test")
DECIDING = ("dataset", "root", "classes", "corrections", "additions")  # settings that decide which images there are


class PackedRows(Content):
    """A split without its images."""

    identity: Hash
    """SHA-256 of the images in order."""
    images: Count
    """Number of images."""
    kept: list[Count]
    """Those of them that have features."""
    reasons: list[str] = []
    """Why others have none."""
    labels: list[int]
    """Class of each image; -1 without one."""
    domains: list[str] | None = None
    """Domain of each image."""
    units: dict[str, list[Count]] = {}
    """Whose images they are, numbered, by column."""


class PackedSource(Content):
    """A dataset under a model."""

    settings: dict[str, object]
    """The settings that name the dataset."""
    model: str
    """Name of the model."""
    fingerprint: Hash
    """SHA-256 of the model's weights and preprocessing."""
    logit_scale: Finite
    """Factor of the cosine of image and text."""
    dataset: str
    """Name of the dataset."""
    class_names: Names
    """Names of the classes."""
    templates: dict[str, list[str]]
    """Text templates of the class names."""
    notes: list[str] = []
    """Remarks on the dataset."""
    origins: Names = []
    """Dataset of each class of several."""
    splits: dict[str, PackedRows] = Field(max_length=2)
    """Training and test images."""


def key_of(data: DataConfig) -> tuple[object, ...]:
    return tuple(getattr(data, name) for name in DECIDING)


def pack_source(data: DataConfig, model: str, templates: Iterable[str], opener: Opener) -> tuple[PackedSource, Tensors]:
    """Return a dataset under a model without its images, and the features."""
    dataset, encoder = opener.dataset_of(data), opener.model(model, "cpu")
    if isinstance(encoder, FusedEncoder):
        raise FedVLError(f"'{model}' needs the pixels of images, which a pack does not have; leave its runs out.")
    tensors: Tensors = {}
    splits = {}
    for name in (name for name in SPLITS if name in dataset.splits):
        split = dataset.splits[name]
        read = encoded(split, encoder)
        tensors[f"features/{name}"] = smallest(read.tensor)
        splits[name] = PackedRows(
            identity=split.identity,
            images=len(split),
            kept=read.kept.tolist(),
            reasons=[reason for _, reason in read.bad],
            labels=split.labels.tolist(),
            domains=None if split.domains is None else list(split.domains),
            units={
                column: np.unique(values, return_inverse=True)[1].tolist() for column, values in split.units.items()
            },
        )
    for template in sorted(set(templates)):
        tensors[f"texts/{template}"] = embed_classes(dataset, template, encoder, "cpu")
    source = PackedSource(
        settings=data.model_dump(mode="json", include=set(DECIDING)),
        model=model,
        fingerprint=encoder.fingerprint,
        logit_scale=float(encoder.logit_scale),
        dataset=dataset.name,
        class_names=list(dataset.class_names),
        templates={name: list(texts) for name, texts in dataset.templates.items()},
        notes=list(dataset.notes),
        origins=list(dataset.origins),
        splits=splits,
    )
    return source, tensors


def encoded(split: Split, encoder: ImportedEncoder | DualEncoder) -> EncodedSplit:
    """Return the features of a split, also of one of several datasets."""
    if not split.parts:
        return encode_split(split, encoder, "features")
    found = [encoded(part, encoder) for part in split.parts]
    firsts = np.cumsum([0, *map(len, split.parts)])
    return EncodedSplit(
        torch.cat([part.tensor for part in found]),
        np.concatenate([part.kept + first for part, first in zip(found, firsts, strict=False)]),
        [bad for part in found for bad in part.bad],
    )


def smallest(features: torch.Tensor) -> torch.Tensor:
    """Return the features in 16 bits, if these hold all of them."""
    half = features.half()
    return half if bool((half.float() == features).all()) else features


@dataclass(frozen=True)
class NoImages:
    """The store of a split whose images are elsewhere."""

    identity: str

    def read(self, row: int) -> Image.Image:
        raise BadImage("it is in a pack, which has no images.", self.describe(row))

    def decoded(self, row: int) -> Decoded:
        return Decoded(self.read(row))

    def source(self, row: int) -> None:
        """No image has a file."""

    def describe(self, row: int) -> str:
        return f"image {row}"

    def content(self, row: int) -> bytes:
        return f"{self.identity} {row}".encode()

    def fingerprint(self, row: int) -> bytes:
        return self.content(row)


@dataclass(frozen=True, eq=False)
class PackedSplit(Split):
    """A split whose features came with it."""

    features: EncodedSplit = field(default_factory=lambda: EncodedSplit(torch.empty(0, 1), np.empty(0, np.int64), []))

    def carried(self, kind: str) -> EncodedSplit:
        if kind != "features":
            raise FedVLError(f"This needs the {kind} of images, which a pack does not have.")
        return self.features


class PackedEncoder(ImportedEncoder):
    """What a pack has of an encoder: the texts of its class names."""

    def __init__(self, source: PackedSource, dim: int) -> None:
        self.name, self.logit_scale, self.dim = source.model, source.logit_scale, dim
        self.fingerprint = source.fingerprint
        self.texts: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}  # by templates and class name

    def add_texts(self, source: PackedSource, tensors: Tensors) -> None:
        for name, templates in source.templates.items():
            texts = tensors.get(f"texts/{name}")
            if texts is None:
                continue
            if texts.shape != (len(source.class_names), self.dim) or not bool(texts.isfinite().all()):
                raise FedVLError(f"The texts of '{source.dataset}' in the pack do not fit its classes.")
            self.texts.setdefault(tuple(templates), {}).update(zip(source.class_names, texts.float(), strict=True))

    def embed_names(self, names: Sequence[str], templates: Sequence[str]) -> torch.Tensor:
        known = self.texts.get(tuple(templates), {})
        if missing := [name for name in names if name not in known]:
            raise FedVLError(f"The pack has no text of the class '{missing[0]}' in these templates.")
        return torch.stack([known[name] for name in names])

    def look_up(self, split: Split, kind: str) -> NoReturn:
        self._refuse("images")

    def _refuse(self, what: str) -> NoReturn:
        raise FedVLError(f"This needs {what} of '{self.name}', which a pack does not have.")


@dataclass(frozen=True)
class PackedOpener(Opener):
    """Opens what was packed, and nothing else."""

    datasets: Mapping[tuple[object, ...], Dataset] = field(default_factory=dict)

    def dataset_of(self, data: DataConfig) -> Dataset:
        if key_of(data) not in self.datasets:
            raise FedVLError(f"The pack has no features of '{data.dataset}' with these settings.")
        return self.datasets[key_of(data)]


def open_packed(sources: Sequence[tuple[PackedSource, Tensors]]) -> PackedOpener:
    """Return an opener of what was packed under one model; refuse what does not fit together."""
    datasets = {}
    first = sources[0][0]
    encoder = opened_encoder(*sources[0])
    for source, tensors in sources:
        if (source.model, source.fingerprint) != (first.model, encoder.fingerprint):
            raise FedVLError(
                f"The features of '{source.dataset}' in the pack are not of '{first.model}' as it is here."
            )
        datasets[key_of(DataConfig.model_validate(source.settings))] = Dataset(
            source.dataset,
            tuple(source.class_names),
            {name: tuple(texts) for name, texts in source.templates.items()},
            {name: packed_split(source, name, tensors.get(f"features/{name}")) for name in source.splits},
            tuple(source.notes),
            tuple(source.origins),
        )
        if isinstance(encoder, PackedEncoder):
            encoder.add_texts(source, tensors)

    def model(name: str, device: str) -> PackedEncoder | DualEncoder:
        if name != first.model:
            raise FedVLError(f"The pack has no features of the model '{name}'.")
        return encoder.to(device) if isinstance(encoder, DualEncoder) else encoder

    def dataset(name: str, root: object = None) -> NoReturn:
        raise FedVLError(f"This needs the images of '{name}', which a pack does not have.")

    return PackedOpener(dataset, model, datasets)


def opened_encoder(source: PackedSource, tensors: Tensors) -> PackedEncoder | DualEncoder:
    """Return the package's own model of that name, or what the pack has of another."""
    if source.model in EMBEDDED:
        encoder = load_model(source.model)
        if isinstance(encoder, DualEncoder):
            return encoder
    return PackedEncoder(source, next(iter(tensors.values())).shape[-1])


def packed_split(source: PackedSource, name: str, features: torch.Tensor | None) -> PackedSplit:
    rows = source.splits[name]
    columns = [rows.labels, *rows.units.values(), rows.domains or rows.labels]
    if (
        features is None
        or features.dim() != 2
        or not features.is_floating_point()
        or len(features) != len(rows.kept)
        or not bool(features.isfinite().all())
        or any(len(values) != rows.images for values in columns)
        or rows.kept != sorted({*rows.kept})
        or not all(row < rows.images for row in rows.kept)
        or not all(-1 <= label < len(source.class_names) for label in rows.labels)
    ):
        raise FedVLError(f"The {name} features of '{source.dataset}' in the pack do not fit its labels.")
    kept = np.array(rows.kept, np.int64)
    others = np.setdiff1d(np.arange(rows.images), kept).tolist()
    store = NoImages(rows.identity)
    split = PackedSplit(
        store,
        np.arange(rows.images),
        np.array(rows.labels, np.int64),
        domains=None if rows.domains is None else tuple(rows.domains),
        units={column: tuple(map(str, values)) for column, values in rows.units.items()},
        features=EncodedSplit(
            features.float(),
            kept,
            [(store.describe(row), reason) for row, reason in zip(others, rows.reasons, strict=False)],
        ),
    )
    vars(split)["identity"] = rows.identity
    return split


def differing(source: PackedSource, tensors: Tensors, opener: Opener) -> str | None:
    """Say which features of an embedded dataset under an embedded model are not this package's.

    None of other datasets, whose features cannot be checked.
    """
    entry = lookup(source.dataset)
    if source.model not in EMBEDDED or entry is None or not entry.embedded:
        return None
    data = DataConfig.model_validate({**source.settings, "root": None})
    own, theirs = pack_source(data, source.model, [], opener)
    for name, rows in own.splits.items():
        features = tensors[f"features/{name}"]
        same = rows == source.splits.get(name) and torch.equal(features.float(), theirs[f"features/{name}"].float())
        if not same:
            return f"the {name} features or labels are not those of {source.dataset}"
    return ""
