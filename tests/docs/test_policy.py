"""The page of the site policy names every line of policy.toml with its default, and every kind of log entry."""

import ast
import re
from pathlib import Path

from fedvl.deployment.policy import Policy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    section = re.split(rf"^## {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]


def logged_kinds() -> set[str]:
    """The first argument of each call of ``append`` on a log of the deployment."""
    kinds = {"torn"}  # which the log itself writes
    for path in (ROOT / "src" / "fedvl" / "deployment").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                log, first = ast.unparse(node.func.value), node.args[0]
                if isinstance(first, ast.Constant) and (
                    log == "self" or log.endswith("log") or log.startswith("log_of(")
                ):
                    kinds.add(str(first.value))
    return kinds


def test_every_line_of_a_policy_is_there_with_its_default():
    shown = {name.strip("`"): default.strip("`") for name, default, _ in rows("What can I limit?")}
    assert list(shown) == list(Policy.model_fields)
    for name, default in Policy().model_dump().items():
        if default is None:
            assert shown[name] == "absent"
        elif isinstance(default, tuple | list):
            assert ast.literal_eval(shown[name]) == list(default)
        elif isinstance(default, bool):
            assert shown[name] == str(default).lower()
        else:
            assert ast.literal_eval(shown[name]) == default


def test_every_kind_of_entry_is_there():
    named = {kind for names, *_ in rows("What is logged?") for kind in re.findall(r"`(\w+)`", names)}
    assert named == logged_kinds()
