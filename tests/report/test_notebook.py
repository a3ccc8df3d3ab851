"""What a notebook shows: a chart as a drawing of its own, tables, and data frames if pandas is installed."""

import base64
import re
import sys
from xml.etree import ElementTree

import pytest

from fedvl.report.notebook import Chart, frame, html_table
from fedvl.report.svg import drawing, element

DRAWN = drawing(10, 20, "One box", [element("rect", x=1, y=1, width=3, height=4)], "box")


def test_a_chart_is_a_file_of_its_own_with_its_style(tmp_path):
    chart = Chart(DRAWN, "accuracy by <round>")
    path = chart.save(str(tmp_path / "chart.svg"))
    assert path == tmp_path / "chart.svg"
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg"
    assert root.find(f"{svg}style") is not None
    assert root.find(f".//{svg}rect") is not None
    assert repr(chart) == "<chart of accuracy by <round>>"


def test_a_notebook_shows_the_drawing_as_an_image_with_its_caption():
    chart = Chart(DRAWN, "accuracy by <round>")
    shown = chart._repr_html_()
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', shown)
    assert base64.b64decode(data).decode() == chart.svg
    assert 'alt="accuracy by &lt;round&gt;"' in shown
    assert "<figcaption>accuracy by &lt;round&gt;</figcaption>" in shown


def test_rows_are_a_data_frame_if_pandas_is_installed(monkeypatch):
    rows = [{"a": 1}, {"a": 2}]
    assert pytest.importorskip("pandas").DataFrame(rows).equals(frame(rows))
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert frame(rows) is rows


def test_a_table_escapes_all_but_its_cells():
    table = html_table(["<x>", "y"], [["<b>a</b>", "1"]], "title &", "note <")
    assert table == (
        "<p>title &amp;</p><table><thead><tr><th>&lt;x&gt;</th><th>y</th></tr></thead>"
        '<tbody><tr><th style="text-align:left"><b>a</b></th><td>1</td></tr></tbody></table><p>note &lt;</p>'
    )
    assert html_table([], [["a"]]) == '<table><tbody><tr><th style="text-align:left">a</th></tr></tbody></table>'
