"""The images that a user gives: files, folders of them, and images in memory."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from fedvl.data.images import EXTENSIONS, HEIC, decode, is_image
from fedvl.data.stores import content_of
from fedvl.errors import FedVLError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    AnyImage = str | Path | Image.Image | NDArray[np.integer[Any]]

ImageSource = tuple[str, Path | bytes]  # an image's name, and its file or the content of one


@dataclass(frozen=True)
class GivenImages:
    """Images that a user gives, as the feature cache reads them."""

    sources: Sequence[ImageSource]

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def identity(self) -> str:
        return hashlib.sha256(b"\n".join(map(self.content, range(len(self))))).hexdigest()

    def read(self, index: int) -> Image.Image:
        return decode(self.sources[index][1])

    def source(self, index: int) -> Path | bytes:
        return self.sources[index][1]

    def describe(self, index: int) -> str:
        return self.sources[index][0]

    def content(self, index: int) -> bytes:
        return content_of(self.sources[index][1])


def image_sources(images: "AnyImage | Sequence[AnyImage]") -> Iterator[ImageSource]:
    """Yield each image with its name; an image in memory becomes the bytes of a PNG file."""
    single = isinstance(images, str | Path) or hasattr(images, "getexif") or getattr(images, "ndim", 4) < 4
    given: list[Any] = [images] if single else list(images)  # type: ignore[arg-type]
    if not given:
        raise FedVLError("There are no images to predict; give files, folders, PIL images or arrays.")
    for number, image in enumerate(given):
        if isinstance(image, str | Path):
            yield from ((str(path), path) for path in image_files([Path(image)]))
        else:
            yield f"image {number}", png_of(image)


def png_of(image: Any) -> bytes:
    """Return a PIL image or an array as the bytes of a PNG file, which loses nothing."""
    if isinstance(image, np.ndarray):
        colours = image.ndim == 3 and image.shape[2] in (3, 4)
        if not image.size or not (
            (image.dtype == np.uint8 and (colours or image.ndim == 2)) or (image.dtype == np.uint16 and image.ndim == 2)
        ):
            raise FedVLError(
                f"An array of {image.dtype} and shape {image.shape} is not an image; give uint8 from 0 to 255 as height x width x 3."
            )
        image = Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise FedVLError(f"A {type(image).__name__} is not an image; give a path, a PIL image or a NumPy array.")
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):  # what PNG does not have
        image = image.convert("RGB")
    content = io.BytesIO()
    image.save(content, "PNG", exif=image.getexif(), compress_level=1)
    return content.getvalue()


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Files as given; of folders, all images by name, and HEIC photos, to be refused if need be."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(file for file in path.rglob("*") if is_image(file, EXTENSIONS | HEIC))
        elif path.exists():
            found.append(path)
        else:
            raise FedVLError(f"There is no {path}; give image files or folders of them.")
    if not found:
        raise FedVLError(f"There are no images in {', '.join(map(str, paths))}; give files such as photo.jpg.")
    return found
