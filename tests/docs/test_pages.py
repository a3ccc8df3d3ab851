"""The documentation has what it promises: a page or a paragraph for every method, and nothing that is fetched."""

import re
from pathlib import Path

import pytest

from fedvl.methods import method_names

PAGES = Path(__file__).parents[2] / "docs"
OWN_PAGE = ("fed-mp", "fst-cbdg", "fedpp", "cachefl", "fed-prime")


def test_every_method_is_described_once_by_its_own_words():
    described = [
        name
        for page in (PAGES / "methods").glob("*.md")
        for name in re.findall(r"^```\{about\} (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(described) == method_names()


@pytest.mark.parametrize("name", OWN_PAGE)
def test_a_papers_method_has_a_whole_page(name):
    text = (PAGES / "methods" / f"{name}.md").read_text(encoding="utf-8")
    for heading in ("The equations", "Options", "What travels", "What leaks", "Results on the embedded model"):
        assert f"\n## {heading}\n" in text, heading
    assert f"fedvl run --method {name}" in text
    assert "$$" in text


def test_pages_show_no_picture_from_elsewhere():
    for page in PAGES.rglob("*.md"):
        assert not re.search(r"!\[[^]]*\]\(https?:", page.read_text(encoding="utf-8")), page
