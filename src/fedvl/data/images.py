"""Decode one image file to RGB, or raise `BadImage` with the reason."""

import contextlib
import io
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedvl.errors import FedVLError
from fedvl.files import read_file

MAX_PIXELS = 32_000_000
MAX_BYTES = 2**28
# Encoders resize the shorter side to their input size, so a strip of 1 x 30,000 would grow to gigapixels.
MAX_ASPECT = 100
# Pillow's other formats run external programs (EPS) or are rarely used and so rarely tested.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
EXTENSIONS = frozenset({".jpg", ".jpeg", ".jpe", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"})

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# warnings.catch_warnings changes state that all threads share.
_WARNINGS_LOCK = threading.Lock()


class BadImage(FedVLError):  # noqa: N818 (a public name)
    """A file that cannot be used as an image: `reason` is a sentence, `name` says which file."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name


def decode(source: bytes | Path, name: str = "") -> Image.Image:
    """Return the first frame as upright 8-bit RGB, with transparency laid over white.

    The content decides the format, not the file name.
    """
    try:
        data = source if isinstance(source, bytes) else read_file(source, MAX_BYTES)
    except OSError as error:
        raise BadImage(f"the file cannot be read ({error.strerror or error}).", name) from error
    except FedVLError as error:
        raise BadImage(f"it cannot be read: {error}", name) from error
    if not data:
        raise BadImage("the file is empty (0 bytes).", name)
    image = _open(data, name)
    width, height = image.size
    if width * height > MAX_PIXELS:
        limit = MAX_PIXELS // 1_000_000
        raise BadImage(f"it has {width} x {height} pixels, more than the limit of {limit} megapixels.", name)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadImage(f"it is {width} x {height} pixels, longer than {MAX_ASPECT} times its width.", name)
    try:
        image.load()
        return _upright(_to_rgb(image), image)
    except BadImage as error:
        error.name = name
        raise
    except Exception as error:  # Pillow raises many kinds for broken files; none may stop an encoding.
        raise BadImage(f"the image is damaged or truncated ({_brief(error)}).", name) from error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress Pillow's warnings about large and odd headers, which are checked here."""
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _open(data: bytes, name: str) -> Image.Image:
    try:
        with _quietly():
            return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadImage(f"it has more pixels than the limit of {MAX_PIXELS // 1_000_000} megapixels.", name) from error
    except UnidentifiedImageError as error:
        raise BadImage("it is not an image of a known format (JPEG, PNG, GIF, WebP, BMP, TIFF, PPM).", name) from error
    except Exception as error:
        raise BadImage(f"the image is damaged or truncated ({_brief(error)}).", name) from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise BadImage("its pixels are floating-point numbers of unknown range; convert it to 8 or 16 bits.")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_sixteen_bits(image)
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        white = Image.new("RGBA", layers.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layers).convert("RGB")
    return image.convert("RGB")


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255.

    Pillow's own conversion clips at 255, which turns most such images white.
    """
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise BadImage("its pixels are 32-bit numbers beyond 0..65535; convert it to 8 or 16 bits.")
    return Image.fromarray(np.round(values / 257).astype(np.uint8)).convert("RGB")


def _upright(rgb: Image.Image, original: Image.Image) -> Image.Image:
    try:
        with _quietly():
            orientation = original.getexif().get(_ORIENTATION_TAG)
    except Exception:  # The pixels are valid even if the EXIF block is not.
        return rgb
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return rgb if turn is None else rgb.transpose(turn)


def _brief(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120].rstrip(".")
