"""The page of the contract names every declaration, hook, role and member of a consultation, and nothing else."""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from fedvl.methods.base import CHOICES, Consultation, Method
from fedvl.methods.roles import Given, Private, Remembered, Sent, Server, Shared, Statistic

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
ADD_A_METHOD = (Path(__file__).parents[2] / "docs" / "add-a-method.md").read_text(encoding="utf-8")
ROLES = (Shared, Private, Sent, Statistic, Given, Server, Remembered)


def rows(heading: str) -> dict[str, str]:
    """The table below a heading: what its first column names, and the rest of the row."""
    section = re.split(rf"^## {heading}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)[^`]*` (\|.*)$", section, re.MULTILINE))


def hooks() -> set[str]:
    """What a method may define: the functions of the base class that are not final."""
    functions = {name: getattr(value, "__func__", value) for name, value in vars(Method).items() if name[0] != "_"}
    return {
        name
        for name, value in functions.items()
        if inspect.isfunction(value) and not getattr(value, "__final__", False)
    }


def test_every_hook_is_there():
    assert rows("Hooks").keys() == hooks()
    assert len(hooks()) == 19


def test_every_declaration_is_there():
    declared = inspect.get_annotations(Method).keys() - {"options_type"}
    assert rows("Declarations").keys() == declared
    assert len(declared) == 12


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_of_a_declaration_is_there(name):
    assert set(re.findall(r'`"(\w+)"`', rows("Declarations")[name])) == set(CHOICES[name])


def test_every_role_is_there():
    assert list(rows("Roles of tensors")) == [role.__name__ for role in ROLES]


def test_every_field_of_a_role_is_there_with_its_default():
    section = re.split("^## Fields of a role$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    cells = [[cell.strip(' `"') for cell in line.split("|")] for line in section.splitlines() if line.startswith("| `")]
    assert [(role, field, default) for _, role, field, default, *_ in cells] == [
        (role.__name__, field.name, "" if field.default is MISSING else str(field.default))
        for role in ROLES
        for field in fields(role)
    ]


def test_every_member_of_a_consultation_is_there():
    assert rows("The consultation").keys() == {name for name in vars(Consultation) if name[0] != "_"}


def test_the_guide_names_only_what_there_is():
    """Hooks and declarations in the second column of "you want to ... write ..."."""
    known = hooks() | inspect.get_annotations(Method).keys()
    for line in re.findall(r"^\| [a-z].* \| (.*) \|$", ADD_A_METHOD, re.MULTILINE):
        for name in re.findall(r"`([a-z_]+)(?: = [^`]*)?`", line):
            assert name in known | {"label_loss"}, line
