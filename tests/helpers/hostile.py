"""Files that a service must survive: each with what it is to be refused for, or None if it can be read."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
from PIL import Image

from helpers.finished import png

File = tuple[str, bytes]
FORMAT, DAMAGED, PIXELS = "not an image of a known format", "damaged or truncated", "than the limit of 32 megapixels"
PARTS, SCANS, SLOW = "too many parts", "more than 32 scans", "slow to decode"


@cache
def good() -> File:
    return "good.png", png(3)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claimed(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be this large."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def photo() -> Image.Image:
    return Image.open(io.BytesIO(good()[1]))


def upload(name: str, content: bytes, refusal: str | None) -> Callable[[], tuple[File, str | None]]:
    return lambda: ((name, content), refusal)


def large(kind: str, **options: object) -> Callable[[], tuple[File, str | None]]:
    """A file of a few kilobytes and 32.5 megapixels."""
    return lambda: (("large", saved(Image.new("L", (5_700, 5_700)), kind, **options)), PIXELS)


def frames(kind: str, count: int, **options: object) -> Callable[[], tuple[File, str | None]]:
    """A film; only its first frame is looked at."""

    def make() -> tuple[File, str | None]:
        first, rest = photo().convert("RGB"), [Image.new("RGB", (32, 32), (n % 256, n // 256, 0)) for n in range(count)]
        return ("film", saved(first, kind, save_all=True, append_images=rest, **options)), None

    return make


def repeated(kind: str, part: bytes, count: int, position: int, refusal: str) -> Callable[[], tuple[File, str | None]]:
    """An image with the same part inserted very often."""

    def make() -> tuple[File, str | None]:
        whole = saved(photo().convert("RGB"), kind)
        return (f"parts.{kind}", whole[:position] + part * count + whole[position:]), refusal

    return make


def scans(count: int) -> bytes:
    """A progressive JPEG whose last pass over its pixels is there again and again."""
    whole = saved(photo().convert("RGB"), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * (count - whole.count(b"\xff\xda")) + whole[-2:]


def with_chunk(kind: bytes, data: bytes) -> bytes:
    """The good PNG with one chunk more."""
    return good()[1][:33] + chunk(kind, data) + good()[1][33:]


def changed(image: bytes, position: int, new: bytes) -> bytes:
    return image[:position] + new + image[position + len(new) :]


def run_lengths(width: int, height: int) -> bytes:
    """A BMP of one colour in runs, which Pillow decodes slowly."""
    data = (b"\xff\x00" * (width // 255) + b"\x00\x00") * height + b"\x00\x01"
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    start = 14 + len(header) + 1024
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + header + bytes(1024) + data


EXIF_LOOP = b"Exif\0\0MM\0*\0\0\0\x08\0\1\x87\x69\0\4\0\0\0\1\0\0\0\x08\0\0\0\x08"


def tiff_loop() -> bytes:
    """A TIFF whose next page is its first."""
    whole = saved(photo().convert("RGB"), "TIFF")
    (first,) = struct.unpack("<I", whole[4:8])
    (entries,) = struct.unpack("<H", whole[first : first + 2])
    return changed(whole, first + 2 + 12 * entries, struct.pack("<I", first))


UPLOADS: dict[str, Callable[[], tuple[File, str | None]]] = {
    "empty": upload("empty.png", b"", "empty"),
    "text": upload("text.jpg", b"hello", FORMAT),
    "script": upload("x.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", FORMAT),
    "page": upload("x.html.png", b"<html><img src=x onerror=alert(1)></html>", FORMAT),
    "program": upload("run.exe", b"MZ" + bytes(500), FORMAT),
    "archive": upload("z.zip", b"PK\x03\x04" + bytes(500), FORMAT),
    "postscript": upload("x.eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ls) system\n", FORMAT),
    "document": upload("x.pdf", b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n", FORMAT),
    "pickle": upload("x.png", b"cos\nsystem\n(S'true'\ntR.", FORMAT),
    "cut png": lambda: (("cut.png", good()[1][: len(good()[1]) // 2]), DAMAGED),
    "cut jpeg": lambda: (("cut.jpg", saved(photo(), "JPEG")[:300]), DAMAGED),
    "cut webp": lambda: (("cut.webp", saved(photo(), "WEBP")[:100]), DAMAGED),
    "bomb": upload("bomb.png", claimed(50_000, 50_000), PIXELS),
    "giant": upload("giant.png", claimed(6_000, 6_000), PIXELS),
    "strip": lambda: (("strip.png", saved(Image.new("RGB", (4_000, 1)), "PNG")), "longer than 100 times"),
    "no data": lambda: (("idat.png", good()[1].replace(b"IDAT", b"IDAX", 1)), FORMAT),
    "float pixels": lambda: (("f.tiff", saved(Image.fromarray(np.ones((9, 9), "float32")), "TIFF")), "floating-point"),
    "no pixels": upload("none.png", claimed(0, 0), FORMAT),
    "path as a name": lambda: (("../../../../root/.profile", good()[1]), None),
    "markup as a name": lambda: (('<b>"\u202e\n;DROP TABLE', good()[1]), None),
    "jpeg of 2,000 scans": lambda: (("scans.jpg", scans(2_000)), SCANS),
    "jpeg of 33 scans": lambda: (("scans.jpg", scans(33)), SCANS),
    "jpeg of 32 scans": lambda: (("scans.jpg", scans(32)), None),
    "jpeg of 100,000 comments": repeated("JPEG", b"\xff\xfe\x00\x02", 100_000, 2, PARTS),
    "jpeg of 2,000 comments": repeated("JPEG", b"\xff\xfe\x00\x02", 2_000, 2, "1,000 segments"),
    "png of 100,000 chunks": repeated("PNG", chunk(b"abCd", b""), 100_000, 33, PARTS),
    "png of 100,000 pieces": repeated("PNG", chunk(b"IDAT", b""), 100_000, 33, PARTS),
    "gif of 100,000 comments": lambda: (("parts.gif", b"GIF89a\1\0\1\0\0\0\0" + b"!\xfe\1a\0" * 100_000), PARTS),
    "ppm of one long comment": upload("comment.ppm", b"P6\n#" + b"a" * 200_000 + b"\n1 1 255 aaa", PARTS),
    "ppm as text": upload("plain.ppm", b"P3\n1000 1000\n255\n" + b"1 " * 3_000_000, SLOW),
    "ppm of odd range": upload("odd.pgm", b"P5\n1001 1000\n254\n" + bytes(1_001_000), SLOW),
    "bmp of runs": lambda: (("runs.bmp", run_lengths(5_100, 5_100)), SLOW),
    "gif of 1,000 frames": frames("GIF", 1_000),
    "webp of 200 frames": frames("WEBP", 200, lossless=True),
    "tiff of 300 pages": frames("TIFF", 300),
    "png of 300 frames": frames("PNG", 300),
    "large gif": large("GIF"),
    "large webp": large("WEBP", lossless=True),
    "large tiff": large("TIFF", compression="tiff_lzw"),
    "large jpeg": large("JPEG"),
    "large bmp": upload("x.bmp", run_lengths(6_120, 6_120)[:2_000], PIXELS),
    "ppm that claims much": upload("x.ppm", b"P6 99999 99999 255\n", PIXELS),
    "png with compressed text": lambda: (
        ("text.png", with_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10_000_000)))),
        DAMAGED,
    ),
    "png with a compressed profile": lambda: (
        ("profile.png", with_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10_000_000)))),
        DAMAGED,
    ),
    "png that inflates to more than its pixels": lambda: (
        (
            "more.png",
            claimed(32, 32).replace(chunk(b"IDAT", zlib.compress(bytes(100))), b"")[:33]
            + chunk(b"IDAT", zlib.compress(bytes(10_000_000)))
            + chunk(b"IEND", b""),
        ),
        None,
    ),
    "png of 16 bits": lambda: (("deep.png", saved(Image.fromarray(np.zeros((2_000, 2_000), "uint16")), "PNG")), None),
    "tiff whose pages go in a circle": lambda: (("loop.tiff", tiff_loop()), None),
    "exif that points to itself": lambda: (("exif.jpg", saved(photo().convert("RGB"), "JPEG", exif=EXIF_LOOP)), None),
}
