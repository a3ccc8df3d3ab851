"""Decode one image file to RGB, or raise `BadImage` with the reason."""

import io
import re
import threading
import warnings
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import (
    Image,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401  (registers WebP; to find it, Pillow would load its 40 other formats)
)

from fedvl.data.dicom import BadDicom, is_dicom, open_dicom
from fedvl.errors import FedVLError
from fedvl.files import read_file
from fedvl.version import install_command

if READS_HEIC := find_spec("pillow_heif") is not None:  # an extra
    import pillow_heif

    pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)

DECODING = 1  # raised when the same file becomes other pixels, of which features are then others
MAX_PIXELS = 32_000_000
MAX_IMAGE_BYTES = 2**28
# Encoders resize the shorter side to their input size, so a strip of 1 x 30,000 would grow to gigapixels.
MAX_ASPECT = 100
# Limits on the time of decoding: a small file can ask for minutes of it.
MAX_SCANS = 32  # passes over all pixels of a JPEG file; ten are usual
MAX_SEGMENTS = 1_000  # of a JPEG file
MAX_READS = 100_000  # Pillow reads headers piece by piece, slowly; 20 MB of PNG in small chunks are 10,000 pieces
MAX_SLOW = 1_000_000  # pixels and bytes of what Pillow decodes in Python (plain PPM, RLE BMP)
DIM = 2**13  # of 16 bits: the largest value of 12 bits and less lies below
WIDE_SUFFIXES = frozenset({"", ".png", ".tif", ".tiff", ".pgm", ".ppm"})  # of files that may have 16 bits
BAND = 256  # rows converted at a time, so that a large image is in memory only once or twice
# Pillow's other formats run external programs (EPS) or are rarely used and so rarely tested.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", *(("HEIF",) if READS_HEIC else ()))
HEIC = frozenset({".heic", ".heif"})
# Pictures that are not read: a folder of them says so by name.
UNREAD = (frozenset() if READS_HEIC else HEIC) | frozenset(
    {".avif", ".jxl", ".jp2", ".svg", ".psd", ".ico", ".tga", ".eps", ".pdf", ".nii"}
    | {".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raf", ".mov", ".mp4"}
)
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".dcm"}
    | (HEIC if READS_HEIC else set())
)

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
# The kind of a HEIC file, behind the length of its first box.
_HEIC_KIND = re.compile(rb"....ftyp(hei[csmx]|hev[cx]|mif1|msf1)", re.DOTALL)
# A marker of a JPEG file that begins a segment or ends the image: not a stuffed zero, a restart or padding.
_JPEG_MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")


# How files of images begin, where their names do not say what they are.
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")


def is_image(path: Path, extensions: Collection[str]) -> bool:
    """Whether a file is an image by its name, or by its content where the name has no extension.

    PACS exports DICOM as ``IM000001``, or as a UID that ends in a number.
    """
    suffix = path.suffix.lower()
    if path.name.startswith(".") or not (suffix in extensions or not suffix or suffix[1:].isdecimal()):
        return False
    return path.is_file() and (suffix in extensions or _begins_as_image(path))


def _begins_as_image(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            head = file.read(132)
    except OSError:
        return False
    webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    return head.startswith(_BEGINNINGS) or webp or is_dicom(head) or (READS_HEIC and bool(_HEIC_KIND.match(head)))


class BadImage(FedVLError):  # noqa: N818 (a public name)
    """A file that cannot be used as an image: `reason` is a sentence, `name` says which file."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.name = name


class Decoded(NamedTuple):
    """An image as models see it, and what its file said."""

    image: Image.Image  # upright 8-bit RGB
    mode: str = "RGB"  # of the file, as Pillow names it
    orientation: int = 1  # of EXIF; 1: upright as it is
    highest: int | None = None  # the largest value, of pixels with more than 8 bits


class _Pieces(io.BytesIO):
    """A file in memory that can be read in a limited number of pieces."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > MAX_READS:
            raise BadImage("it has too many parts; save it again with another program.")
        return super().read(size)


def is_dim(path: Path) -> bool:
    """Whether an image of 16 bits has values of 12 bits, and so is read as nearly black."""
    if path.suffix.lower() not in WIDE_SUFFIXES:
        return False
    try:
        with _QUIET, Image.open(path, formats=FORMATS) as image:
            if not _has_wide_pixels(image):
                return False
        return (decode_fully(path).highest or 0) < DIM
    except Exception:  # the image is read again later, which says what is wrong with it
        return False


def decode(source: bytes | Path, name: str = "", most_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the first frame as upright 8-bit RGB, with transparency laid over white.

    The content decides the format, not the file name.
    """
    return decode_fully(source, name, most_pixels).image


def decode_fully(source: bytes | Path, name: str = "", most_pixels: int = MAX_PIXELS) -> Decoded:
    """Return the first frame as :func:`decode` does, with what the file said of it."""
    try:
        data = source if isinstance(source, bytes) else read_file(source, MAX_IMAGE_BYTES)
    except OSError as error:
        raise BadImage(f"the file cannot be read ({error.strerror or error}).", name) from error
    except FedVLError as error:
        raise BadImage(f"it cannot be read: {error}", name) from error
    if not data:
        raise BadImage("the file is empty (0 bytes).", name)
    image = _open_dicom(data, name) if is_dicom(data) else _open(data, name)
    width, height = image.size
    if width * height > most_pixels:
        limit = most_pixels // 1_000_000
        raise BadImage(f"it has {width} x {height} pixels, more than the limit of {limit} megapixels.", name)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadImage(f"it is {width} x {height} pixels, longer than {MAX_ASPECT} times its width.", name)
    try:
        _check_time(image, data)
        image.load()
        orientation = _orientation(image)
        highest = int(np.asarray(image).max()) if _has_wide_pixels(image) else None
        return Decoded(_turned(_to_rgb(image), orientation), image.mode, orientation, highest)
    except BadImage as error:
        error.name = name
        raise
    except Exception as error:  # Pillow raises many kinds for broken files; none may stop an encoding.
        raise BadImage(f"the image is damaged or truncated ({_brief(error)}).", name) from error


class _Quiet:
    """Suppress Pillow's warnings about large and odd headers, which are checked here.

    What warnings.catch_warnings changes is shared by all threads: the first of them changes it and
    the last one restores it, so that none waits while another reads an image.
    """

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0
        self.caught: warnings.catch_warnings[None]

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.caught = warnings.catch_warnings()
                self.caught.__enter__()
                warnings.simplefilter("ignore")
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.caught.__exit__(None, None, None)


_QUIET = _Quiet()


def _open(data: bytes, name: str) -> Image.Image:
    try:
        with _QUIET:
            return Image.open(_Pieces(data), formats=FORMATS)
    except BadImage as error:
        error.name = name
        raise
    except Image.DecompressionBombError as error:
        raise BadImage(f"it has more pixels than the limit of {MAX_PIXELS // 1_000_000} megapixels.", name) from error
    except UnidentifiedImageError as error:
        if _HEIC_KIND.match(data) and not READS_HEIC:
            raise BadImage(
                f"it is a HEIC photo; install what reads it with {install_command('heic')}.", name
            ) from error
        raise BadImage("it is not an image of a known format (JPEG, PNG, GIF, WebP, BMP, TIFF, PPM).", name) from error
    except Exception as error:
        raise BadImage(f"the image is damaged or truncated ({_brief(error)}).", name) from error


def _open_dicom(data: bytes, name: str) -> Image.Image:
    try:
        return open_dicom(data, MAX_PIXELS)
    except BadDicom as error:
        raise BadImage(f"{error}.", name) from error
    except Exception as error:  # pydicom raises many kinds for broken files
        raise BadImage(
            f"the DICOM file is damaged, or compressed in a way that is not read ({_brief(error)}).", name
        ) from error


def _check_time(image: Image.Image, data: bytes) -> None:
    """Refuse what would take long to decode for its size."""
    if data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    in_python = any(tile[0] in Image.DECODERS for tile in getattr(image, "tile", ()))
    if in_python and max(len(data), image.width * image.height) > MAX_SLOW:
        raise BadImage(f"such a {image.format} file is slow to decode and has 1 megapixel at most; save it as PNG.")


def _check_jpeg(data: bytes) -> None:
    """Count segments and scans as libjpeg finds them: up to the end of the image."""
    position, scans = 2, 0
    for _ in range(MAX_SEGMENTS):
        marker = _JPEG_MARKER.search(data, position)
        if marker is None or marker[1] == b"\xd9":
            return
        scans += marker[1] == b"\xda"
        if scans > MAX_SCANS:
            break
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2])
    raise BadImage(f"it has more than {MAX_SCANS} scans or {MAX_SEGMENTS:,} segments; save it again as JPEG.")


def _has_wide_pixels(image: Image.Image) -> bool:
    return image.mode == "I" or image.mode.startswith("I;16")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise BadImage("its pixels are floating-point numbers of unknown range; convert it to 8 or 16 bits.")
    if _has_wide_pixels(image):
        return _in_bands(image, _from_sixteen_bits)
    if image.has_transparency_data:
        return _in_bands(image, _over_white)
    return image if image.mode == "RGB" else image.convert("RGB")


def _in_bands(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, BAND):
        whole.paste(convert(image.crop((0, top, image.width, min(top + BAND, image.height)))), (0, top))
    return whole


def _over_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _from_sixteen_bits(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255.

    Pillow's own conversion clips at 255, which turns most such images white.
    """
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise BadImage("its pixels are 32-bit numbers beyond 0..65535; convert it to 8 or 16 bits.")
    return Image.fromarray(np.round(values / 257).astype(np.uint8)).convert("RGB")


def _orientation(original: Image.Image) -> int:
    try:
        with _QUIET:
            orientation = original.getexif().get(_ORIENTATION_TAG)
    except Exception:  # The pixels are valid even if the EXIF block is not.
        return 1
    return orientation if isinstance(orientation, int) and orientation in _UPRIGHT else 1


def _turned(rgb: Image.Image, orientation: int) -> Image.Image:
    turn = _UPRIGHT.get(orientation)
    return rgb if turn is None else rgb.transpose(turn)


def how_to_read(formats: Collection[str]) -> str:
    """Return what to do with pictures of these formats, which are not read."""
    saved = "save them as JPEG or PNG"
    return (
        f"{install_command('heic')} for HEIC, or {saved}"
        if any(f".{name.lower()}" in HEIC for name in formats)
        else saved
    )


def _brief(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120].rstrip(".")
