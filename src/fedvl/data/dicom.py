"""Decode a DICOM image of one frame, with its own display window; an optional extra (pydicom).

Only what the pixels need is read. Names, dates and other headers go nowhere.
"""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedvl.version import install_command

MARK = b"DICM"  # behind a preamble of 128 bytes
INFLATES = b"1.2.840.10008.1.2.1.99"  # a transfer syntax whose few bytes may unpack to any number
WHITE = 255


class BadDicom(Exception):  # noqa: N818 (as BadImage)
    """A file that cannot be used, with the reason."""


def is_dicom(data: bytes) -> bool:
    return data[128:132] == MARK


def open_dicom(data: bytes, most_pixels: int) -> Image.Image:
    """Return a grey or RGB image; raise `BadDicom` with the reason, or what pydicom raises."""
    try:
        import pydicom
    except ImportError:
        raise BadDicom(f"it is a DICOM image; install what reads it with {install_command('dicom')}") from None
    if INFLATES in data:
        raise BadDicom("it is a deflated DICOM file; save it uncompressed")
    found = pydicom.dcmread(io.BytesIO(data))
    frames, rows, columns = int(found.get("NumberOfFrames") or 1), int(found.Rows), int(found.Columns)
    if frames != 1:
        raise BadDicom(f"it has {frames} frames; save each as an image of its own")
    if rows * columns > most_pixels:
        raise BadDicom(
            f"it has {columns} x {rows} pixels, more than the limit of {most_pixels // 1_000_000} megapixels"
        )
    pixels = found.pixel_array
    if pixels.ndim == 3:
        return Image.fromarray(_eight_bits(pixels, int(found.BitsStored)))
    if found.PhotometricInterpretation == "PALETTE COLOR":
        from pydicom.pixels import apply_color_lut

        coloured = apply_color_lut(pixels, found)
        return Image.fromarray(_eight_bits(coloured, 8 * coloured.itemsize))
    return Image.fromarray(_grey(pixels, found))


def _eight_bits(pixels: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    scaled: npt.NDArray[np.uint8] = np.round(pixels.astype(np.float32) * (WHITE / (2**bits - 1))).astype(np.uint8)
    return scaled


def _grey(pixels: npt.NDArray[Any], found: Any) -> npt.NDArray[np.uint8]:
    """Show the first window of the file, or the whole range of values if it has none."""
    from pydicom.multival import MultiValue
    from pydicom.pixels import apply_modality_lut

    values = apply_modality_lut(pixels, found).astype(np.float64)
    centre, width = (
        value[0] if isinstance(value, MultiValue) else value
        for value in (found.get("WindowCenter"), found.get("WindowWidth"))
    )
    if centre is not None and width is not None and float(width) > 1:
        low, high = (float(centre) - 0.5 + side * (float(width) - 1) / 2 for side in (-1, 1))  # PS3.3 C.11.2.1.2.1
    else:
        low, high = float(values.min()), float(values.max())
    share = np.clip((values - low) / (high - low), 0, 1) if high > low else np.zeros_like(values)
    if found.PhotometricInterpretation == "MONOCHROME1":  # the least value is white
        share = 1 - share
    shown: npt.NDArray[np.uint8] = np.round(WHITE * share).astype(np.uint8)
    return shown
