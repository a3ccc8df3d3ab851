"""Charts as a PDF for a paper, a page each: lines, curves, circles and text of our own SVG."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from fedvl.report.svg import TEXT_SIZE, coordinate, text_width

STYLES = Path(__file__).parent / "templates" / "report.css"
GREY, BLACK = "#8a9099", "#1b1f24"
NAMED = {"grid": "#d9dee4", "tick": GREY, "reference": "#7a6a2f", "reference-end": "#7a6a2f"}
DASHED = {"reference", "leader"}
HELVETICA = 0.86  # of the width that a page reserves for a text


def pdf_of(charts: Sequence[str]) -> bytes:
    """Return a PDF with a page for each chart, as a light page shows it; no font is embedded."""
    pages = [page_of_chart(chart) for chart in charts]
    first = 4
    kids = " ".join(f"{first + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, (width, height, drawn) in enumerate(pages):
        resources = "<< /Font << /F 3 0 R >> /ExtGState << /Pale << /ca 0.15 >> >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {coordinate(width)} {coordinate(height)}] "
            f"/Resources {resources} /Contents {first + 2 * number + 1} 0 R >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn))
    content, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n"
    end += f"<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
    return content + end.encode()


def page_of_chart(chart: str) -> tuple[float, float, bytes]:
    """Return width, height and the drawing of a chart; the y axis of a PDF points up."""
    root = ElementTree.fromstring(chart)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    lines = [f"1 0 0 -1 0 {coordinate(height)} cm", "1 w 1 J 1 j", *operators(root, BLACK)]
    return width, height, "\n".join(lines).encode("cp1252", errors="replace")


def operators(parent: ElementTree.Element, inherited: str) -> Iterator[str]:
    for each in parent:
        classes = each.get("class", "").split()
        colour = next((found for name in classes if (found := colour_of(name))), inherited)
        if each.tag == "g":
            yield from operators(each, colour)
        elif each.tag == "text":
            yield from text_operators(each, colour)
        elif each.tag == "line":
            ends = [coordinate(float(each.attrib[name])) for name in ("x1", "y1", "x2", "y2")]
            dash = "[5 3] 0 d" if DASHED & {*classes} else "[] 0 d"
            yield f"{rgb(colour)} RG {dash} {ends[0]} {ends[1]} m {ends[2]} {ends[3]} l S [] 0 d"
        elif each.tag == "path":
            moves = [f"{x} {y} {'l' if index else 'm'}" for index, (x, y) in enumerate(spots(each.attrib["d"]))]
            if "band" in classes:
                yield f"q /Pale gs {rgb(colour)} rg {' '.join(moves)} f Q"
            else:
                yield f"2 w {rgb(colour)} RG {' '.join(moves)} S 1 w"
        elif each.tag == "circle":
            x, y = (coordinate(float(each.attrib[name])) for name in ("cx", "cy"))
            yield f"{2 * float(each.attrib['r']):g} w {rgb(colour)} RG {x} {y} m {x} {y} l S 1 w"  # round ends


def text_operators(each: ElementTree.Element, colour: str) -> Iterator[str]:
    words = "".join(part for part in (each.text, *(child.tail for child in each)) if part)
    width = text_width(words) * HELVETICA
    x = float(each.attrib["x"]) - {"middle": width / 2, "end": width}.get(each.get("text-anchor", ""), 0.0)
    escaped = re.sub(r"([\\()])", r"\\\1", words)
    y = coordinate(float(each.attrib["y"]))
    yield f"BT {rgb(colour)} rg /F {TEXT_SIZE} Tf 1 0 0 -1 {coordinate(x)} {y} Tm ({escaped}) Tj ET"


def spots(path: str) -> list[list[str]]:
    return [spot.split() for spot in re.split("[MLZ]", path) if spot.strip()]


def rgb(colour: str) -> str:
    """Return a colour in the numbers of a PDF."""
    return " ".join(f"{int(colour[place : place + 2], 16) / 255:.3f}" for place in (1, 3, 5))


@cache
def colour_of(name: str) -> str:
    """Return the colour of a CSS class on a light page; "" of one without a colour."""
    found = re.search(rf"--{re.escape(name)}: (#[0-9a-f]{{6}})", STYLES.read_text(encoding="utf-8"))
    return NAMED.get(name, "") or (found[1] if found and re.fullmatch("c[0-9]", name) else "")
