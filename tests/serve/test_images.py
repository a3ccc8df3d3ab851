"""The images of the page: small copies without the headers of a file."""

from io import BytesIO

import numpy as np
from data.test_dicom import dicom
from PIL import Image

from fedvl.serve.images import preview_of


def opened(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content))


def test_a_preview_is_small_and_has_no_header_of_its_file():
    scan = dicom(np.full((600, 300), 9, np.uint8))
    assert b"Nobody^Anne" in scan
    shown = preview_of(scan)
    assert b"Nobody" not in shown
    assert (opened(shown).format, opened(shown).size) == ("PNG", (240, 480))
    photo = BytesIO()
    small = Image.new("RGB", (3, 2), (0, 0, 255))
    marked = small.getexif()
    marked[0x010E] = "Name of a patient"
    small.save(photo, "JPEG", exif=marked)
    assert b"patient" in photo.getvalue()
    assert b"patient" not in preview_of(photo.getvalue())
