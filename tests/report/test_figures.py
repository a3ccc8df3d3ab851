import subprocess
import sys
from xml.etree import ElementTree

import pytest
from PIL import Image

from fedvl.errors import FedVLError
from fedvl.report.figures import accuracy_figure


def test_png_is_a_picture_and_the_same_each_time(sample, tmp_path):
    first = accuracy_figure(sample[0], tmp_path / "a.png")
    second = accuracy_figure(sample[0], tmp_path / "b.png")
    with Image.open(first) as picture:
        assert picture.size == (960, 510)
        colours = picture.convert("RGB").getcolors(1 << 20)
        assert colours is not None
        assert len(colours) > 2
    assert first.read_bytes() == second.read_bytes()


def test_svg_names_method_reference_and_axes_and_is_the_same_each_time(sample, tmp_path):
    first = accuracy_figure(sample[0], tmp_path / "a.svg")
    second = accuracy_figure(sample[0], tmp_path / "b.svg")
    words = {"".join(node.itertext()) for node in ElementTree.parse(first).iter("{http://www.w3.org/2000/svg}text")}
    assert {"fst-cbdg", "zero-shot", "round", "accuracy, %", "fst-cbdg on cifar10-mini"} <= words
    assert first.read_bytes() == second.read_bytes()


def test_dollar_signs_in_names_are_not_mathematics(sample, tmp_path):
    path = accuracy_figure(sample[0] | {"dataset": "a$\\bad$"}, tmp_path / "a.svg")
    assert "a$\\bad$" in path.read_text(encoding="utf-8")


def test_a_result_without_rounds_has_no_curve(sample, tmp_path):
    with pytest.raises(FedVLError, match="no rounds"):
        accuracy_figure(sample[0] | {"per_round": []}, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_pages_and_tables_do_not_load_matplotlib_or_torch():
    modules = "fedvl.report.page, fedvl.report.tables, fedvl.report.figures"
    code = f"import sys, {modules}; print({{'matplotlib', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
