"""Charts as PDF: objects are where the table says, and what is drawn is where the SVG has it."""

import re

import pytest

from fedvl.comparisons.contents import Comparison
from fedvl.report.charts.lines import Series, line_chart
from fedvl.report.page import curves_of
from fedvl.report.pdf import colour_of, pdf_of, rgb
from fedvl.report.svg import drawing, element, label

CURVES = [
    Series("a (1)", [(1, 60.0), (2, 80.0)], band=[(1, 60.0, 62.0), (2, 78.0, 80.0)]),
    Series("b", [(1, 70.0), (2, 70.0)]),
]


def test_the_table_of_objects_has_their_places():
    content = pdf_of(
        [line_chart(CURVES, 65.0, 400, 300, "accuracy, %"), line_chart(CURVES, None, 300, 200, "accuracy, %")]
    )
    assert content.startswith(b"%PDF-1.4\n")
    assert content.endswith(b"%%EOF\n")
    start = int(re.findall(rb"startxref\n(\d+)", content)[0])
    assert content[start : start + 5] == b"xref\n"
    places = [int(place) for place in re.findall(rb"^(\d{10}) 00000 n $", content, re.MULTILINE)]
    assert len(places) == 3 + 2 * 2
    for number, place in enumerate(places, 1):
        assert content[place:].startswith(b"%d 0 obj\n" % number)
    assert b"/Count 2" in content
    assert [tuple(map(float, box)) for box in re.findall(rb"/MediaBox \[0 0 (\S+) (\S+)\]", content)] == [
        (400, 300),
        (300, 200),
    ]
    for length, stream in re.findall(rb"/Length (\d+) >>\nstream\n(.*?)\nendstream", content, re.DOTALL):
        assert int(length) == len(stream)


def stream_of(parts):
    content = pdf_of([drawing(200, 100, "a chart", parts, "lines")])
    return re.findall(rb"stream\n(.*?)\nendstream", content, re.DOTALL)[0].decode("cp1252").splitlines()


def test_lines_curves_bands_and_dots_are_drawn_in_their_colours():
    curve = element(
        "g",
        element("path", d="M1 2L3 4", css="series") + element("circle", cx=3, cy=4, r=2.5, css="dot"),
        css="c1 row-1",
    )
    band = element("path", d="M1 1L2 1L2 3Z", css="band c0")
    reference = element("line", x1=0, x2=9, y1=5, y2=5, css="reference")
    flip, _, *drawn = stream_of([curve, band, reference])
    assert flip == "1 0 0 -1 0 100 cm"  # the y axis of a PDF points up
    orange = rgb("#d9480f")
    assert colour_of("c1") == "#d9480f"
    assert drawn[0] == f"2 w {orange} RG 1 2 m 3 4 l S 1 w"
    assert drawn[1] == f"5 w {orange} RG 3 4 m 3 4 l S 1 w"
    assert drawn[2] == f"q /Pale gs {rgb(colour_of('c0'))} rg 1 1 m 2 1 l 2 3 l f Q"
    assert drawn[3].endswith("[5 3] 0 d 0 5 m 9 5 l S [] 0 d")
    assert rgb("#ff0033") == "1.000 0.000 0.200"


def test_text_is_escaped_and_ends_where_it_is_anchored():
    tip = element("rect", "", "a tip", x=1)  # which a paper cannot show
    _, _, first, second = stream_of([label(10, 20, "a(b)\\ ±"), label(50, 20, "abc", anchor="end"), tip])
    assert first == "BT 0.106 0.122 0.141 rg /F 11 Tf 1 0 0 -1 10 20 Tm (a\\(b\\)\\\\ ±) Tj ET"
    x = float(re.findall(r"-1 (\S+) 20 Tm \(abc\)", second)[0])
    assert 50 - 3 * 11 < x < 50 - 11


@pytest.mark.parametrize("unknown", ["c99", "row-1", ""])
def test_other_classes_have_no_colour(unknown):
    assert colour_of(unknown) == ""


def test_a_comparison_without_curves_has_no_file():
    assert curves_of(Comparison(kind="table", rows=["a"], columns=["x"], cells=[])) == {}
