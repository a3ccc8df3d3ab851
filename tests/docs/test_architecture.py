"""The layers of the package hold, and the page and picture of them are what the code says now."""

import ast
from pathlib import Path

import pytest

from tools.import_graph import (
    LAYER_OF,
    PAGE,
    PICTURE,
    Import,
    all_imports,
    cycles,
    files,
    filled,
    imports_in,
    imports_of_later_layers,
    part_of,
    picture,
    summary,
)

AGAIN = "run python tools/import_graph.py and commit what it writes"


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return all_imports()


def test_every_part_of_the_package_has_its_layer():
    assert {part_of(module) for module in files()} == set(LAYER_OF), "name it in LAYERS of tools/import_graph.py"


def test_no_module_imports_a_later_layer(imports):
    assert [str(found) for found in imports_of_later_layers(imports)] == []


def test_no_modules_import_each_other(imports):
    assert cycles(imports) == []


def test_every_module_says_what_it_does():
    assert [str(path) for path in files().values() if not summary(path).endswith(".")] == []


def test_the_page_is_what_the_code_says():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page, AGAIN


def test_the_picture_is_what_the_code_says():
    assert PICTURE.read_text(encoding="utf-8") == picture(), AGAIN


# --- the reader of imports itself


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import fedvl.files", ["fedvl.files"]),
        ("from fedvl.files import read_json", ["fedvl.files"]),
        ("from fedvl import files, errors", ["fedvl.files", "fedvl.errors"]),
        ("from fedvl import __version__", ["fedvl"]),
        ("def f():\n    from fedvl.files import read_json", ["fedvl.files"]),
        ("try:\n    import fedvl.files\nexcept ImportError:\n    import fedvl.errors", ["fedvl.files", "fedvl.errors"]),
        ("if TYPE_CHECKING:\n    import fedvl.files\nelse:\n    import fedvl.errors", ["fedvl.errors"]),
        ("if typing.TYPE_CHECKING:\n    import fedvl.files", []),
        ("import numpy\nfrom pathlib import Path", []),
    ],
)
def test_imports_are_found_wherever_they_are(code, found):
    assert [target for target, _ in imports_in(ast.parse(code), ("fedvl", "fedvl.files", "fedvl.errors"))] == found


def test_a_wrong_import_and_a_cycle_are_found():
    back = Import("fedvl.errors", "fedvl.cli", 1)
    assert imports_of_later_layers([back, Import("fedvl.cli", "fedvl.errors", 1)]) == [back]
    assert str(back) == f"{Path('src/fedvl/errors.py')}:1: fedvl.errors imports fedvl.cli"
    ring = [("fedvl.errors", "fedvl.files"), ("fedvl.files", "fedvl.config"), ("fedvl.config", "fedvl.errors")]
    assert cycles([Import(*pair, 1) for pair in ring]) == [["fedvl.config", "fedvl.errors", "fedvl.files"]]
    within = [Import("fedvl.data", "fedvl.methods.base", 1), Import("fedvl.methods", "fedvl.data", 1)]
    assert cycles(within) == [["fedvl.data", "fedvl.methods"]], "a package is loaded before its modules"
