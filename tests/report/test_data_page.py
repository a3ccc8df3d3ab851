"""A check of images as lines and as a page."""

import pytest

from fedvl.data.check import ClassImages, DataCheck, PropertyCount
from fedvl.data.faults import FAULT_KINDS, Fault, ShownFault
from fedvl.report.data_page import check_lines, passed, shares, write_check_page

NASTY = "<script>alert(1)</script>"


def made_up_check(faults: bool = True) -> DataCheck:
    shown = [
        ShownFault(
            kind=kind,
            title=FAULT_KINDS[kind].title,
            sentence=f"Something about {NASTY}.",
            fix=FAULT_KINDS[kind].fix,
            images=7,
            files=[f"train/{NASTY}/{number}.png" for number in range(7)],
        )
        for kind in ("unreadable", "leak")
    ]
    return DataCheck(
        data="praxis",
        fedvl_version="0.1",
        model="fedvl-tiny",
        images=1234,
        readable=1233,
        classes=[ClassImages(name=name, train=600, test=17, val=0, unmarked=0) for name in ("melanoma", "a" * 60)],
        unlabelled=0,
        sizes=[
            PropertyCount(name="below 32 px", images=0),
            PropertyCount(name="32 to 63 px", images=33),
            PropertyCount(name="more", images=1200),
        ],
        modes=[PropertyCount(name="8-bit colour", images=1233)],
        brightness=[PropertyCount(name=f"{step}", images=step) for step in range(0, 256, 16)],
        orientation=[PropertyCount(name="upright", images=1233), PropertyCount(name="turned by EXIF", images=0)],
        agreement=61.2,
        faults=shown if faults else [],
        doubtful=[f"train/melanoma/{number}.png" for number in range(20)],
        notes=["Nothing else."],
        not_sought=["near-duplicate"],
    )


def test_lines_say_what_and_how_to_fix_it():
    lines = check_lines(made_up_check())
    assert lines[0] == "praxis: 1,234 images, 1,233 readable, 2 classes."
    assert f"  {FAULT_KINDS['leak'].fix}" in lines
    assert any(line.endswith(" and 2 more") for line in lines)
    assert "val" not in " ".join(lines)
    assert lines[-1] == "2 faults were found."
    assert check_lines(made_up_check(faults=False))[-1] == "No fault was found."


@pytest.mark.parametrize("faults", [True, False])
def test_the_page_escapes_names_and_lists_what_was_not_found(tmp_path, faults):
    text = write_check_page(made_up_check(faults), tmp_path / "check.html").read_text()
    assert NASTY not in text
    assert ("&lt;script&gt;" in text) is faults
    assert ('data-kind="leak"' in text) is faults
    assert "http" not in text.replace("http-equiv", "")


def test_bars_begin_and_end_with_images():
    found = shares(
        [PropertyCount(name=name, images=images) for name, images in zip("abcde", (0, 2, 0, 8, 0), strict=True)]
    )
    assert found == [("b", "2", 25.0), ("c", "0", 0.0), ("d", "8", 100.0)]
    assert shares([]) == []


def test_what_was_sought_and_not_found():
    titles = passed(made_up_check())
    assert len(titles) == len(FAULT_KINDS) - 3
    assert FAULT_KINDS["leak"].title not in titles
    assert FAULT_KINDS["near-duplicate"].title not in titles
    assert Fault("leak", "").rows == ()
