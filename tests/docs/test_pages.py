"""The documentation has what it promises: every method and recipe, valid code, paths that exist, nothing that is fetched."""

import ast
import contextlib
import re
from pathlib import Path

import pytest
from click import MissingParameter
from helpers.command_line import parse

from fedvl.methods import method_names

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs"
SOURCE = ROOT / "src" / "fedvl"
EVERY_PAGE = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES.glob("*.md"), *PAGES.glob("methods/*.md")])
USERS_OWN = {"mine.py", "smallest.py", "src/fedvl/methods/my_method.py"}  # files that a reader writes
every_page = pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
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


@every_page
def test_python_in_a_page_is_valid(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(code)


GROUPS = ("Getting started", "User guide", "Deployment", "Privacy and security", "Research", "Development")
TITLES = {
    "performance": "Performance",
    "reliability": "Reliability",
    "security": "Threat model",
    "privacy": "Privacy audit",
    "differential-privacy": "Differential privacy",
    "results": "Results",
    "settings": "Settings",
    "glossary": "Glossary",
    "which-method": "Which method?",
    "architecture": "Architecture",
}
# What plain English does not say, and what belongs to the changelog.
WORDS = (
    *("cut what one unit gives", "in the open or masked", "is none of ours", "beside the point"),
    *(
        "was set right",
        "version before",
        "as they are now",
        "at first it",
        "was said here",
        "has been renamed",
    ),
    *("where this was written", "on which FedVL is developed", "busy with much else"),
)


def groups() -> dict[str, list[str]]:
    """The pages of each group of the contents, in order."""
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```\{toctree\}\n((?::[^\n]*\n)+)\n(.*?)```", text, re.DOTALL)
    return {re.findall(r":caption: (.*)", options)[0]: names.split() for options, names in trees}


def test_pages_are_in_six_groups_and_each_in_one():
    found = groups()
    assert tuple(found) == GROUPS
    named = [name for names in found.values() for name in names]
    assert len(named) == len(set(named))
    pages = [path for end in ("*.md", "*.ipynb", "methods/*.md") for path in PAGES.glob(end)]
    assert {path.relative_to(PAGES).with_suffix("").as_posix() for path in pages} - {"index"} == set(named)


@pytest.mark.parametrize("name", TITLES)
def test_a_page_has_its_standard_title(name):
    assert (PAGES / f"{name}.md").read_text(encoding="utf-8").splitlines()[0] == f"# {TITLES[name]}"


@every_page
def test_a_page_has_one_title_and_describes_the_present(page):
    generated = r"```.*?```|<!-- modules: .*?<!-- end of modules -->"
    text = re.sub(generated, "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert [word for word in WORDS if word.lower() in text.lower()] == []


def test_the_glossary_defines_each_word_once():
    words = re.findall(r"^\| ([^|]+?) \|", (PAGES / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = [word for row in words if row not in ("word", "---") for word in row.split(", ")]
    assert len(words) == len(set(words))
    assert {"participant", "client", "server", "operator", "user", "round", "update", "zero-shot", "epsilon"} <= set(
        words
    )


PATH = ["data", "models", "compare", "federate", "serve"]
COMMANDS = re.compile(r"`(fedvl [^`]+)`|^(fedvl .+)$", re.MULTILINE)


@pytest.mark.parametrize("name", ["which-method", "quick-start", "questions", "troubleshooting", "reports", *PATH])
def test_every_command_of_a_page_is_one(name):
    """As far as the command line can say without running it; text may name a command without all that it needs."""
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    found = [inline or line for inline, line in COMMANDS.findall(text)]
    assert found
    for command in found:
        if "..." not in command:
            with contextlib.suppress(MissingParameter):
                parse(command)


def test_the_path_leads_from_photos_to_a_service():
    """Each step says which it is, how long it takes, and which is the next."""
    start = (PAGES / "quick-start.md").read_text(encoding="utf-8")
    for number, name in enumerate(PATH, 1):
        assert re.search(rf"^\| {number}\. .*\({name}\.md\)", start, re.MULTILINE)
        head = (PAGES / f"{name}.md").read_text(encoding="utf-8").split("\n## ")[0]
        assert f"*Step {number} of 5" in head
        assert re.search(r"\b(second|minute)s?\b", head)
        assert number == len(PATH) or f"({PATH[number]}.md).*" in head


def test_every_thread_of_a_question_has_its_address():
    rows = [line for line in (PAGES / "questions.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    asked = [row.split(" | ") for row in rows if "asked in" not in row and "---" not in row]
    assert len(asked) >= 12
    for _, threads, answer in asked:
        assert (
            re.sub(r"\[[^]]+\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", "", threads).strip(" ,") == ""
        )
        assert "`fedvl " in answer or "`federation." in answer


@every_page
def test_modules_named_in_a_page_exist(page):
    """Most are named relative to the package."""
    named = set(re.findall(r"`([\w/-]+\.py)`", page.read_text(encoding="utf-8"))) - USERS_OWN
    places = (ROOT, SOURCE, SOURCE / "methods", ROOT / "tests" / "data")
    assert [path for path in sorted(named) if not any((place / path).is_file() for place in places)] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_exist(name):
    """Those of the pages are checked when the documentation is built."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_part_of_the_package_is_in_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for path in SOURCE.iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            assert f"`{path.name}`" in text
        elif (path / "__init__.py").is_file():
            assert f"`{path.name}/`" in text
