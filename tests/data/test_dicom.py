"""DICOM images: windows by hand, and what is refused."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvl.data.dicom import BadDicom, open_dicom
from fedvl.data.images import BadImage, decode
from fedvl.data.sources import open_dataset


def dicom(pixels: np.ndarray, **elements: Any) -> bytes:
    """A file with a patient's name, as scanners write it."""
    pytest.importorskip("pydicom")
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    found = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    bits = 8 * pixels.itemsize
    colours = 3 if pixels.ndim == 3 else 1
    told = {
        "PatientName": "Nobody^Anne",
        "SOPClassUID": SecondaryCaptureImageStorage,
        "SOPInstanceUID": "1.2.3",
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "SamplesPerPixel": colours,
        "PhotometricInterpretation": "RGB" if colours == 3 else "MONOCHROME2",
        "BitsAllocated": bits,
        "BitsStored": bits,
        "HighBit": bits - 1,
        "PixelRepresentation": 0,
        "PixelData": pixels.tobytes(),
        **({"PlanarConfiguration": 0} if colours == 3 else {}),
        **elements,
    }
    for name, value in told.items():
        setattr(found, name, value)
    written = io.BytesIO()
    found.save_as(written)
    return written.getvalue()


def grey(data: bytes) -> list[list[int]]:
    image = np.asarray(decode(data))
    assert (image == image[..., :1]).all()
    return image[..., 0].tolist()


def test_a_window_is_shown_as_the_standard_says() -> None:
    """Hounsfield units by slope and intercept; window 40 +- 50: white from 89.5 on, black up to -10.5, 39.5 in the middle."""
    units = np.array([[-1024, -10, 40], [90, 1000, 0]])
    raw = (units + 1024).astype(np.uint16)
    window = {"RescaleSlope": 1, "RescaleIntercept": -1024, "WindowCenter": [40, 500], "WindowWidth": [101, 2000]}
    expected = [[0, round(255 * 0.5 / 100), round(255 * 50.5 / 100)], [255, 255, round(255 * 10.5 / 100)]]
    assert grey(dicom(raw, **window)) == expected
    inverted = grey(dicom(raw, **window, PhotometricInterpretation="MONOCHROME1"))
    assert np.abs(255 - np.array(inverted) - np.array(expected)).max() <= 1  # rounding


def test_without_a_window_the_whole_range_is_shown() -> None:
    raw = np.array([[100, 300], [200, 500]], np.uint16)
    assert grey(dicom(raw)) == [[0, 128], [64, 255]]
    assert grey(dicom(np.full((2, 2), 7, np.uint16))) == [[0, 0], [0, 0]]


def test_colours_are_kept() -> None:
    raw = np.array([[[255, 0, 10], [1, 2, 3]]], np.uint8)
    assert np.asarray(decode(dicom(raw))).tolist() == raw.tolist()


def test_frames_sizes_and_damage_are_named() -> None:
    raw = np.zeros((2, 2), np.uint16)
    for data, reason in (
        (dicom(raw, NumberOfFrames=3), "3 frames"),
        (dicom(raw, Rows=60_000, Columns=60_000), "60000 x 60000 pixels, more than the limit of 32 megapixels"),
        (dicom(raw, PixelData=b"\0\0"), "damaged"),
        (dicom(raw)[:-4], "damaged"),
        (bytes(128) + b"DICM" + b"\2\0\x10\0UI\x16\x001.2.840.10008.1.2.1.99" + bytes(100), "deflated"),
    ):
        with pytest.raises(BadImage, match=reason) as caught:
            decode(data, "scan.dcm")
        assert caught.value.name == "scan.dcm"


def test_without_pydicom_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(BadImage, match='pip install "pydicom>=3"'):
        decode(bytes(128) + b"DICM")


def test_a_folder_of_scans(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(("healthy", "pneumonia")):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "scan.dcm").write_bytes(dicom(np.eye(4, dtype=np.uint16) * (number + 1)))
    dataset = open_dataset(str(tmp_path))
    assert dataset.class_names == ("healthy", "pneumonia")
    assert dataset.splits["test"].read(1).size == (4, 4)


def test_an_image_of_as_many_pixels_as_the_limit_is_read() -> None:
    raw = np.zeros((2, 3), np.uint16)
    assert open_dicom(dicom(raw), 6).size == (3, 2)
    with pytest.raises(BadDicom, match="3 x 2 pixels"):
        open_dicom(dicom(raw), 5)
