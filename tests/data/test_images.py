"""Hostile and odd image files: each is refused with a reason or decoded to the right thing."""

import io
import pickle
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedvl.data.images import _QUIET, MAX_PIXELS, BadImage, decode, decode_fully


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photo(width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def plain(colour: float | tuple[float, ...] | str, mode: str = "RGB", size: tuple[int, int] = (20, 10)) -> Image.Image:
    return Image.new(mode, size, colour)


def png(width: int, height: int, depth: int, colour_type: int, rows: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def broken_checksum() -> bytes:
    data = bytearray(saved(photo(), "PNG"))
    data[data.index(b"IDAT") + 40] ^= 0xFF
    return bytes(data)


def text_bomb() -> bytes:
    info = PngInfo()
    info.add_text("comment", "a" * 70_000_000, zip=True)
    return saved(plain("red"), "PNG", pnginfo=info)


def shortened(kind: str, **options: object) -> bytes:
    data = saved(photo(), kind, **options)
    return data[: len(data) // 2]


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "no bytes": (lambda: b"", "empty"),
    "text": (lambda: b"this is no picture\n" * 20, "not an image"),
    "web page": (lambda: b"<!DOCTYPE html><html><body>404</body></html>", "not an image"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>', "not an image"),
    "random bytes": (lambda: np.random.default_rng(1).bytes(5000), "not an image"),
    "pickle": (lambda: pickle.dumps([1, 2, 3]), "not an image"),
    "postscript": (lambda: saved(photo(), "EPS"), "not an image"),
    "icon": (lambda: saved(photo(), "ICO"), "not an image"),
    "start of a jpeg": (lambda: b"\xff\xd8\xff\xe0", "not an image"),
    "half a jpeg": (lambda: shortened("JPEG"), "damaged or truncated"),
    "half a progressive jpeg": (lambda: shortened("JPEG", progressive=True), "damaged or truncated"),
    "half a png": (lambda: shortened("PNG"), "damaged or truncated"),
    "half a gif": (lambda: shortened("GIF"), "damaged or truncated"),
    "half a webp": (lambda: shortened("WEBP", lossless=True), "damaged or truncated"),
    "half a bmp": (lambda: shortened("BMP"), "damaged or truncated"),
    "png with a flipped bit": (broken_checksum, "damaged"),
    "png with a text bomb": (text_bomb, "damaged"),
    "33 megapixels": (lambda: png(6600, 5000, 1, 0, b""), "limit of 32 megapixels"),
    "100 megapixels": (lambda: png(10_000, 10_000, 1, 0, b""), "limit of 32 megapixels"),
    "400 megapixels": (lambda: png(20_000, 20_000, 1, 0, b""), "limit of 32 megapixels"),
    "4 gigapixel gif": (lambda: b"GIF89a\xff\xff\xff\xff\x00\x00\x00" + b"\x2c" + bytes(20), "limit of 32 megapixels"),
    "a strip": (lambda: saved(plain("red", size=(9000, 1)), "PNG"), "100 times"),
    "floats": (lambda: saved(plain(0.5, "F"), "TIFF"), "floating-point"),
    "32-bit numbers": (lambda: saved(plain(70_000, "I"), "TIFF"), "32-bit"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_with_a_reason(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(BadImage, match=reason) as caught:
        decode(make(), "picture.jpg")
    assert caught.value.name == "picture.jpg"
    assert str(caught.value) == caught.value.reason
    assert "\n" not in caught.value.reason
    assert caught.value.reason.endswith(".")


def half_transparent_palette() -> Image.Image:
    image = plain(0, "P")
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.paste(1, (0, 0, 10, 10))
    return image


def frames() -> list[Image.Image]:
    return [plain("blue"), plain("green"), plain("yellow")]


def animated(kind: str, **options: object) -> bytes:
    first, *rest = frames()
    return saved(first, kind, save_all=True, append_images=rest, **options)


def broken_exif() -> bytes:
    return saved(plain("red"), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff" + bytes(8), quality=100)


RED, WHITE, BLUE = (255, 0, 0), (255, 255, 255), (0, 0, 255)
# What is decoded: its bytes, and the colours expected in the left and right half.
DECODED: dict[str, tuple[Callable[[], bytes], tuple[int, ...], tuple[int, ...]]] = {
    "cmyk jpeg": (lambda: saved(plain((0, 255, 255, 0), "CMYK"), "JPEG", quality=100), RED, RED),
    "cmyk tiff": (lambda: saved(plain((0, 255, 255, 0), "CMYK"), "TIFF"), RED, RED),
    "16-bit grey png": (lambda: saved(plain(32_896, "I;16"), "PNG"), (128,) * 3, (128,) * 3),
    "16-bit grey tiff": (lambda: saved(plain(65_535, "I;16"), "TIFF"), WHITE, WHITE),
    "32-bit grey tiff of 16-bit range": (lambda: saved(plain(25_700, "I"), "TIFF"), (100,) * 3, (100,) * 3),
    "16-bit colour png": (
        lambda: png(4, 2, 16, 2, (b"\0" + struct.pack(">HHH", 65_535, 0, 0) * 4) * 2),
        RED,
        RED,
    ),
    "grey": (lambda: saved(plain(77, "L"), "PNG"), (77,) * 3, (77,) * 3),
    "1 bit": (lambda: saved(plain(1, "1"), "PNG"), WHITE, WHITE),
    "palette": (lambda: saved(half_transparent_palette(), "PNG"), (0, 255, 0), RED),
    "palette with a clear colour": (lambda: saved(half_transparent_palette(), "PNG", transparency=1), WHITE, RED),
    "gif with a clear colour": (lambda: saved(half_transparent_palette(), "GIF", transparency=1), WHITE, RED),
    "clear": (lambda: saved(plain((9, 9, 9, 0), "RGBA"), "PNG"), WHITE, WHITE),
    "half clear": (lambda: saved(plain((255, 0, 0, 51), "RGBA"), "PNG"), (255, 204, 204), (255, 204, 204)),
    "half clear grey": (lambda: saved(plain((0, 51), "LA"), "PNG"), (204,) * 3, (204,) * 3),
    "one colour clear": (lambda: saved(plain("red"), "PNG", transparency=(255, 0, 0)), WHITE, WHITE),
    "animated gif": (lambda: animated("GIF"), BLUE, BLUE),
    "animated png": (lambda: animated("PNG"), BLUE, BLUE),
    "animated webp": (lambda: animated("WEBP", lossless=True), BLUE, BLUE),
    "pages of a tiff": (lambda: animated("TIFF"), BLUE, BLUE),
    "broken exif": (broken_exif, (254, 0, 0), (254, 0, 0)),
    "one pixel": (lambda: saved(plain("red", size=(1, 1)), "PNG"), RED, RED),
    "bmp": (lambda: saved(plain("red"), "BMP"), RED, RED),
    "ppm": (lambda: saved(plain("red"), "PPM"), RED, RED),
}


@pytest.mark.parametrize("kind", DECODED)
def test_decoded_to_the_right_colours(kind: str) -> None:
    make, left, right = DECODED[kind]
    image = decode(make(), "picture.jpg")
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == left
    assert image.getpixel((image.width - 1, image.height - 1)) == right


def test_lossless_formats_keep_every_pixel_whatever_the_extension(tmp_path: Path) -> None:
    expected = np.asarray(photo())
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("PPM", {})):
        path = tmp_path / "picture.jpg"
        path.write_bytes(saved(photo(), kind, **options))
        assert np.array_equal(np.asarray(decode(path)), expected), kind


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation: int) -> None:
    """The camera's transformation is applied by hand to an upright picture; decode must bring that picture back."""
    upright = np.asarray(photo(6, 4))
    as_stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: np.rot90(upright, 2).swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(as_stored)), "PNG", exif=exif)
    assert np.array_equal(np.asarray(decode(data)), upright)


def test_the_largest_allowed_image_is_decoded() -> None:
    width, height = 8000, 4000
    assert width * height == MAX_PIXELS
    image = decode(png(width, height, 1, 0, (b"\0" + b"\xff" * (width // 8)) * height))
    assert image.size == (width, height)
    assert image.getpixel((7999, 3999)) == WHITE


def test_tall_images_are_converted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bands of rows, of which the last is shorter, each pixel as by itself."""
    monkeypatch.setattr("fedvl.data.images.BAND", 16)
    values = np.random.default_rng(3).integers(0, 65536, (50, 20), dtype=np.uint16)
    expected = np.repeat((values.astype(np.uint32) + 128)[..., None] // 257, 3, axis=2)
    assert np.array_equal(np.asarray(decode(saved(Image.fromarray(values), "PNG"))), expected)
    layers = np.random.default_rng(4).integers(0, 256, (50, 20, 4), dtype=np.uint8)
    share = layers[..., 3:] / 255
    found = np.asarray(decode(saved(Image.fromarray(layers), "PNG")))
    assert np.abs(found - (layers[..., :3] * share + 255 * (1 - share))).max() <= 1


def test_only_the_scans_of_the_image_itself_count() -> None:
    """Not what looks like one in its metadata or behind its end, as in the film of a motion photo."""
    whole = saved(photo(), "JPEG", comment=b"\xff\xda\x00\x02" * 500)
    assert decode(whole + b"\xff\xda\x00\x02" * 50_000).size == (40, 30)


def test_missing_file_and_folder_are_bad_images(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.png", tmp_path):
        with pytest.raises(BadImage, match="cannot be read"):
            decode(path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_damaged_files_never_raise_anything_else(kind: str) -> None:
    """Flip bytes anywhere: the result is an RGB image within the cap, or BadImage."""
    whole = saved(photo(), kind)
    generator = np.random.default_rng(2)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for position in generator.integers(0, min(len(data), 400), 4):
            data[position] = generator.integers(0, 256)
        try:
            image = decode(bytes(data))
        except BadImage:
            refused += 1
        else:
            assert image.mode == "RGB"
            assert image.width * image.height <= MAX_PIXELS
    assert refused > 0


def test_a_heic_photo_is_read_like_others_with_the_extra(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    halves = plain("red", size=(40, 30))
    halves.paste(plain("blue", size=(20, 30)), (20, 0))
    turned = halves.rotate(90, expand=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    for image, options in ((halves, {}), (turned, {"exif": exif.tobytes()})):
        found = decode(saved(image, "HEIF", **options))
        assert (found.mode, found.size) == ("RGB", (40, 30))
        assert np.abs(np.asarray(found, int)[5:25, 5:15] - (255, 0, 0)).max() < 12
        assert np.abs(np.asarray(found, int)[5:25, 25:35] - (0, 0, 255)).max() < 12
    whole = saved(photo(200, 100), "HEIF")
    for broken in (whole[: len(whole) // 2], whole[:40]):
        with pytest.raises(BadImage, match=r"damaged or truncated|not an image"):
            decode(broken)
    with pytest.raises(BadImage, match="longer than 100 times its width"):
        decode(saved(plain("red", size=(2000, 16)), "HEIF"))


def test_a_heic_photo_without_the_extra_is_named(without_heic: None) -> None:
    for kind in (b"heic", b"mif1"):
        with pytest.raises(
            BadImage, match=r'it is a HEIC photo; install what reads it with pip install "pillow-heif>=1.1"'
        ):
            decode(b"\0\0\0\x18ftyp" + kind + b"\0" * 40)
    with pytest.raises(BadImage, match="not an image of a known format"):
        decode(b"\0\0\0\x18ftypqt  " + b"\0" * 40)


def test_warnings_are_silent_until_the_last_thread_has_opened_its_image() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = warnings.filters[:]
        with _QUIET:  # a thread
            with _QUIET:  # another one, that ends first
                warnings.warn("two are inside", stacklevel=1)
            warnings.warn("one is still inside", stacklevel=1)
        warnings.warn("outside", stacklevel=1)
        assert warnings.filters == before
    assert [str(warning.message) for warning in told] == ["outside"]


def test_what_a_file_says_of_its_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_fully(saved(photo(), "JPEG", exif=exif))
    assert (turned.image.size, turned.orientation, turned.mode, turned.highest) == ((30, 40), 6, "RGB", None)
    wide = np.full((9, 12), 4095, np.uint16)
    wide[0, 0] = 0
    found = decode_fully(saved(Image.fromarray(wide), "PNG"))
    assert (found.orientation, found.highest) == (1, 4095)
    assert found.mode.startswith("I")
    exif[0x0112] = 9  # of no meaning
    assert decode_fully(saved(photo(), "JPEG", exif=exif)).orientation == 1
