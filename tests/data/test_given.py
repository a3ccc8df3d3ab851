"""Images that a user gives: files, folders and images in memory."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedvl.data.given import image_files, image_sources, png_of
from fedvl.errors import FedVLError

BLUE = Image.new("RGB", (3, 2), (0, 0, 255))


def opened(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content))


def named(images: Any) -> list[str]:
    return [name for name, _ in image_sources(images)]


def test_one_image_or_several_of_any_kind(tmp_path):
    for name in ("b.png", "a.jpg"):
        BLUE.save(tmp_path / name)
    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    files = [str(tmp_path / "a.jpg"), str(tmp_path / "b.png")]
    assert named(tmp_path) == named(str(tmp_path)) == files
    assert named(BLUE) == named(pixels[0]) == ["image 0"]
    assert named(pixels) == ["image 0", "image 1"]
    assert named([BLUE, tmp_path / "b.png", pixels[0]]) == ["image 0", files[1], "image 2"]
    assert [path for _, path in image_sources(tmp_path)] == [tmp_path / "a.jpg", tmp_path / "b.png"]
    with pytest.raises(FedVLError, match="There are no images to predict"):
        named([])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_a_png_keeps_the_mode_and_the_pixels(mode):
    image = BLUE.convert("L").convert(mode) if mode == "I;16" else BLUE.convert(mode)
    found = opened(png_of(image))
    assert (found.format, found.mode) == ("PNG", mode)
    assert found.tobytes() == image.tobytes()


def test_a_mode_that_png_does_not_have_becomes_rgb():
    found = opened(png_of(BLUE.convert("CMYK")))
    assert found.mode == "RGB"
    assert found.getpixel((0, 0)) == (0, 0, 255)


def test_orientation_stays():
    image = BLUE.copy()
    image.getexif()[0x0112] = 6
    assert opened(png_of(image)).getexif()[0x0112] == 6


@pytest.mark.parametrize(
    "shape, kind, mode",
    [
        ((2, 3, 3), np.uint8, "RGB"),
        ((2, 3, 4), np.uint8, "RGBA"),
        ((2, 3), np.uint8, "L"),
        ((2, 3), np.uint16, "I;16"),
        ((2, 3, 2), np.uint8, None),
        ((2, 3, 3), np.uint16, None),
        ((2, 3), np.float32, None),
        ((0, 3, 3), np.uint8, None),
        ((3,), np.uint8, None),
    ],
)
def test_arrays_of_whole_numbers_are_images(shape, kind, mode):
    pixels = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    if mode is None:
        with pytest.raises(FedVLError, match=rf"An array of {np.dtype(kind)} and shape .* is not an image; give uint8"):
            png_of(pixels)
    else:
        found = opened(png_of(pixels))
        assert found.mode == mode
        np.testing.assert_array_equal(np.asarray(found), pixels)


def test_what_is_no_image_is_named_by_its_type():
    with pytest.raises(FedVLError, match=r"A dict is not an image; give a path, a PIL image or a NumPy array\."):
        png_of({})


def test_folders_are_searched_by_name_and_files_taken_as_they_are(tmp_path):
    for name in ("z/b.PNG", "a.jpeg", "phone.heic", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    inside = [tmp_path / name for name in ("a.jpeg", "phone.heic", "z/b.PNG")]
    assert image_files([tmp_path]) == inside
    assert image_files([tmp_path / "notes.txt", tmp_path / "z"]) == [tmp_path / "notes.txt", inside[2]]
    with pytest.raises(FedVLError, match=r"There is no .*absent; give image files or folders of them\."):
        image_files([tmp_path / "absent"])
    with pytest.raises(FedVLError, match=r"There are no images in .*folder\.png; give files such as photo\.jpg\."):
        image_files([tmp_path / "folder.png"])
