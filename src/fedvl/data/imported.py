"""Vectors of an encoder that FedVL does not run: imported once, and found again for each image.

An image is known by the SHA-256 of its file, so that its name and place do not matter. All is one
file, `imported/NAME.safetensors` in the feature cache, with the manifest and a digest in its
metadata; the digest is verified on every load.
"""

import hashlib
import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import torch
from numpy.lib import format as npy
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from safetensors import SafetensorError, safe_open

from fedvl.data.catalogue import class_key
from fedvl.data.features import OWN_FILE, EncodedSplit, default_cache_dir, keep_private
from fedvl.data.stores import Split
from fedvl.errors import FedVLError
from fedvl.files import SHORTENED, parse_json, read_file, regular, write_whole
from fedvl.models import EMBEDDED
from fedvl.models.checkpoint import load_model
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.tensors import MAX_BYTES, Tensors, digest, to_bytes
from fedvl.tensors import load as read_tensors

MAX_IMPORTED_MANIFEST = 2**30  # bytes
MAX_WIDTH = 2**14  # numbers of a vector
NORM_TOLERANCE = 0.01  # how far from 1 the length of a unit vector in 16 bits may be
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class ImportedManifest(BaseModel):
    """What belongs to a file of vectors; rows are in its order."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, StringConstraints(pattern=r"^\w[\w.-]{0,63}$")]  # of the encoder, for --model
    sha256: Sha256  # of the encoder's weights: the same vectors come from the same weights
    normalised: bool  # whether vectors have unit length
    logit_scale: float = Field(100.0, gt=0, le=1e4)  # factor of the cosine of image and text
    images: list[Sha256] = Field(min_length=1)  # of each image file
    classes: list[str] = []  # class names of the texts


class ImportedEncoder:
    """What FedVL knows of the encoder: its vectors of some images and class names, and no tower."""

    vision_layers = 0

    def __init__(self, manifest: ImportedManifest, vectors: Tensors) -> None:
        self.name, self.manifest, self.logit_scale = manifest.name, manifest, manifest.logit_scale
        self.dim = vectors["images"].shape[1]
        self._images, self._texts = vectors["images"], vectors.get("texts", torch.empty(0, self.dim))
        self._rows = {image: row for row, image in enumerate(manifest.images)}
        self._classes = {class_key(name): row for row, name in enumerate(manifest.classes)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the encoder and its texts, not of images: parties have different ones."""
        known = self.manifest.model_dump(include={"sha256", "normalised", "logit_scale", "classes"})
        return hashlib.sha256((json.dumps(known, sort_keys=True) + digest({"texts": self._texts})).encode()).hexdigest()

    def look_up(self, split: Split, kind: str) -> EncodedSplit:
        """Return the vectors of a split; an image without one is left out with the reason."""
        if kind != "features":
            self._refuse("more of an image than its vector")
        found = [self._rows.get(split.sha256(index)) for index in range(len(split))]
        kept = np.array([index for index, row in enumerate(found) if row is not None], np.int64)
        if not len(kept):
            raise FedVLError(
                f"No image of this dataset is among those that were imported for '{self.name}'; import their vectors, or "
                "check that the manifest has the SHA-256 of each image file."
            )
        reason = f"no vector was imported for it with '{self.name}'."
        bad = [(split.describe(index), reason) for index, row in enumerate(found) if row is None]
        rows = torch.tensor([row for row in found if row is not None])
        return EncodedSplit(self._images[rows], kept, bad)

    def embed_names(self, names: Sequence[str], templates: Sequence[str]) -> torch.Tensor:
        """Return the imported texts of class names; zeros if none were imported at all.

        They were made with templates of their own.
        """
        if not self._classes:
            return torch.zeros(len(names), self.dim)
        if missing := [name for name in names if class_key(name) not in self._classes]:
            raise FedVLError(
                f"No text was imported for the class '{missing[0]}' with '{self.name}'; import vectors of all class names."
            )
        return self._texts[[self._classes[class_key(name)] for name in names]]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return iter(())

    def tokenise(self, texts: Sequence[str]) -> NoReturn:
        self._refuse("the text tower")

    def preprocess(self, image: Any) -> NoReturn:
        self._refuse("the image tower")

    def normalise(self, pixels: torch.Tensor) -> NoReturn:
        self._refuse("the image tower")

    def _refuse(self, what: str) -> NoReturn:
        raise FedVLError(
            f"This needs {what} of '{self.name}', of which only vectors were imported; use a method on features, such as "
            "linear or fed-mp, or a model that FedVL runs."
        )


def open_model(name: str, device: str = "cpu") -> DualEncoder | FusedEncoder | ImportedEncoder:
    """Open a model: imported vectors of that name, or what `load_model` loads."""
    if name not in EMBEDDED and name == Path(name).name and "\0" not in name and imported_path(name).is_file():
        return load_imported(name)
    return load_model(name, device)


def encoding_in(
    encoder: DualEncoder | FusedEncoder | ImportedEncoder, precision: str
) -> DualEncoder | FusedEncoder | ImportedEncoder:
    """Return the encoder, as it encodes images in a precision."""
    if precision == "float32":
        return encoder
    if not isinstance(encoder, DualEncoder):
        raise FedVLError(f"With '{encoder.name}' no images are encoded before training; leave out model.encoding.")
    return encoder.encoding_in(precision)


def imported_path(name: str) -> Path:
    return default_cache_dir() / "imported" / f"{name}.safetensors"


def load_imported(name: str) -> ImportedEncoder:
    path = imported_path(name)
    try:
        with safe_open(regular(path, MAX_BYTES), framework="pt") as file:  # memory-mapped
            metadata = file.metadata() or {}
            vectors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        if digest(vectors) != metadata["digest"]:
            raise ValueError("its digest is not the one that was written")
        return ImportedEncoder(ImportedManifest.model_validate_json(metadata["manifest"]), vectors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise FedVLError(f"The vectors imported as '{name}' are damaged ({reason}); import them again.") from error


def import_vectors(file: Path, manifest: Path) -> ImportedEncoder:
    """Check a file of vectors and its manifest, and keep them for `--model NAME`."""
    described = read_imported_manifest(manifest)
    if described.name in EMBEDDED:
        raise FedVLError(f"'{described.name}' is the name of an embedded model; give the imported one another name.")
    return keep_vectors(file, described, read_vectors(file, described))


def keep_vectors(source: Path, described: ImportedManifest, vectors: Tensors) -> ImportedEncoder:
    """Check vectors, and keep them in the feature cache under the manifest's name."""
    for name, rows in vectors.items():
        check_rows(source, name, rows, described)
    path = imported_path(described.name)
    keep_private(path.parent.parent)
    keep_private(path.parent)
    metadata = {"manifest": described.model_dump_json(), "digest": digest(vectors)}
    write_whole(path, to_bytes(vectors, metadata), OWN_FILE)
    return load_imported(described.name)


def read_imported_manifest(path: Path) -> ImportedManifest:
    try:
        return ImportedManifest.model_validate(parse_json(read_file(path, MAX_IMPORTED_MANIFEST)))
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"])) or "the whole"
        raise FedVLError(f"{path} is not a manifest of vectors: {location}: {first['msg']}.") from error
    except OSError as error:
        raise FedVLError(f"Cannot read the manifest {path}: {error.strerror or error}; check the path.") from error
    except ValueError as error:
        raise FedVLError(f"The manifest {path} is not JSON ({error}); docs/models.md shows one.") from error


def read_vectors(path: Path, manifest: ImportedManifest) -> Tensors:
    """Read `images` and perhaps `texts`, with one row for each that the manifest names."""
    wanted = {"images": len(manifest.images), "texts": len(manifest.classes)}
    wanted = {name: count for name, count in wanted.items() if count}
    if path.suffix == ".npz":
        found = read_npz(path, wanted)
    elif path.suffix == ".safetensors":
        found = read_tensors(path)
    else:
        raise FedVLError(f"{path} is neither .npz nor .safetensors; save the vectors as one of these.")
    if found.keys() != wanted.keys():
        raise FedVLError(
            f"{path} has the arrays {SHORTENED.repr(sorted(found))} where its manifest needs "
            f"{' and '.join(wanted)}; save these."
        )
    for name, count in wanted.items():
        tensor = found[name]
        if (
            tensor.dtype not in FLOATS
            or tensor.dim() != 2
            or len(tensor) != count
            or not 0 < tensor.shape[1] <= MAX_WIDTH
        ):
            raise unexpected(path, name, tensor.shape, str(tensor.dtype).removeprefix("torch."), count)
    if len({tensor.shape[1] for tensor in found.values()}) > 1:
        raise FedVLError(f"Images and texts of {path} have vectors of different lengths; export both from one encoder.")
    return {name: tensor.float().contiguous() for name, tensor in found.items()}


def unexpected(path: Path, name: str, shape: Sequence[int], kind: str, rows: int) -> FedVLError:
    return FedVLError(
        f"The array {name} of {path} is {SHORTENED.repr(list(shape))} of {kind[:100]} where floats of [{rows}, 1 to "
        f"{MAX_WIDTH}] are expected by its manifest."
    )


def read_npz(path: Path, wanted: dict[str, int]) -> Tensors:
    """Read arrays of floats; nothing is unpacked before its size is known to fit the manifest."""
    found: Tensors = {}
    try:
        with zipfile.ZipFile(regular(path, MAX_BYTES)) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name not in wanted or name in found:
                    raise FedVLError(
                        f"{path} has an array {name[:40]!r} that is not expected; save images and texts only."
                    )
                with archive.open(member) as file:
                    version = npy.read_magic(file)
                    header = npy.read_array_header_1_0(file) if version == (1, 0) else npy.read_array_header_2_0(file)
                    shape, _, dtype = header
                    if (
                        dtype.kind != "f"
                        or len(shape) != 2
                        or shape[0] != wanted[name]
                        or not 0 < shape[1] <= MAX_WIDTH
                    ):
                        raise unexpected(path, name, shape, str(dtype), wanted[name])
                    if member.file_size > math.prod(shape) * dtype.itemsize + 2**16:
                        raise ValueError(f"{name} is longer than its header says")
                with archive.open(member) as file:
                    array = npy.read_array(file, allow_pickle=False)
                found[name] = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    except FedVLError:
        raise
    except Exception as error:  # NumPy reads the header as Python, and raises what that does
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise FedVLError(f"{path} cannot be read as .npz ({reason}).") from error
    return found


def check_rows(path: Path, name: str, rows: torch.Tensor, manifest: ImportedManifest) -> None:
    """Refuse numbers that are not finite, and unit vectors of another length."""
    finite = rows.isfinite().all(1)
    if not finite.all():
        raise FedVLError(
            f"Row {int((~finite).nonzero()[0])} of {name} in {path} has numbers that are not finite; fix it."
        )
    lengths = rows.norm(dim=1)
    if not lengths.all():
        raise FedVLError(f"Row {int((lengths == 0).nonzero()[0])} of {name} in {path} is all zeros; export it again.")
    if manifest.normalised and (wrong := (lengths - 1).abs() > NORM_TOLERANCE).any():
        row = int(wrong.nonzero()[0])
        raise FedVLError(
            f"Row {row} of {name} in {path} has length {float(lengths[row]):.3g}, and the manifest says that vectors are "
            'normalised; write "normalised": false.'
        )
