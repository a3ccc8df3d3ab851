"""Twenty files that a service must survive: each with what it is to be refused for, or None if it can be read."""

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
}
