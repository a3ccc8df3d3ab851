"""Kinds of faults: each says what it is and what to do."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedvl.data import faults
from fedvl.data.check import shown_fault
from fedvl.data.faults import FAULT_KINDS, NAMES, Fault

SOURCE = Path(faults.__file__).parents[1]


def test_every_kind_has_a_title_and_a_sentence_of_what_to_do():
    for kind in FAULT_KINDS.values():
        assert kind.title[0].islower()
        assert kind.fix[0].isupper()
        assert kind.fix.endswith(".")
    assert len({kind.title for kind in FAULT_KINDS.values()}) == len(NAMES)


def test_every_kind_is_found_by_a_check():
    named = {
        node.value
        for path in [*(SOURCE / "data").glob("*.py"), *(SOURCE / "deployment").glob("*.py")]
        if path.name != "faults.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(NAMES) <= named


def test_of_a_fault_fifty_files_are_named():
    images: Any = SimpleNamespace(name=lambda row: f"{row}.png")
    shown = shown_fault(Fault("blank", "60 images are blank.", tuple(range(60))), images)
    assert shown.files == [f"{row}.png" for row in range(50)]
    assert (shown.images, shown.title) == (60, "images of one colour")
