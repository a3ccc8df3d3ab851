"""The page of the contract names every declaration, hook, role and member of a consultation, and nothing else."""

import ast
import inspect
import re
from collections import defaultdict
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from fedvl.methods.base import CHOICES, Batch, Consultation, Method, Task
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


def users() -> dict[str, set[str]]:
    """The files of methods, and of their parts, that define a hook or a declaration, or use a role or a field."""
    found = defaultdict(set)
    own = {"task": {field.name for field in fields(Task)}, "batch": set(Batch._fields)}
    declared = hooks() | inspect.get_annotations(Method).keys()
    methods = Path(inspect.getfile(Method)).parent
    for path in set(methods.rglob("*.py")) - {methods / f"{name}.py" for name in ("base", "roles", "show", "mistakes")}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ClassDef):
                targets = [target for part in node.body if isinstance(part, ast.Assign) for target in part.targets]
                names = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
                names = [name for name in names + [ast.unparse(target) for target in targets] if name in declared]
            elif isinstance(node, ast.Attribute):
                holder = ast.unparse(node.value).rpartition(".")[2]
                names = [f"{holder}.{node.attr}"] if node.attr in own.get(holder, ()) else []
                names += [node.attr] if isinstance(node.ctx, ast.Store) and node.attr in declared else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {role.__name__ for role in ROLES}:
                role = ast.unparse(node.func)
                names = [role, *(f"{role}.{keyword.arg}" for keyword in node.keywords)]
            for name in names:
                found[name].add(path.name)
    return found


def test_each_name_with_one_user_says_why_it_is_there():
    section = PAGE.split("## Names that one method uses\n")[1]
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`@?([\w.]+)", row)
    }
    single = {name for name, files in users().items() if len(files) == 1}
    assert "requires" in single
    assert "start" not in single
    # a field of a role is there with its role
    assert {name for name in single if name not in listed and name.partition(".")[0] not in listed} == set()
