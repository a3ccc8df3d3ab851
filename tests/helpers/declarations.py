"""What a method declares, beside a table that was written from the code once, so that no change goes unseen."""

import inspect
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedvl.methods import load_method
from fedvl.methods.base import CHOICES, Method

TABLE = Path(__file__).parents[1] / "methods" / "declarations.toml"
WORDS = ("ge", "gt", "le", "lt")
DECLARED = ("inputs", *CHOICES, "uses_target", "through_encoder", "starts_from_head", "exchanges", "requires")


def declared(name: str) -> dict[str, Any]:
    """Defaults of options, presets, and declarations that are not those of every method, as TOML has them."""
    method = load_method(name)
    flags = {flag: inspect.getattr_static(method, flag) for flag in DECLARED}
    options = method.options_type().model_dump(exclude_none=True)
    own = {flag: value for flag, value in flags.items() if value != getattr(Method, flag)}
    found: dict[str, Any] = plain({**own, "options": options, "presets": method.presets})
    return {**found, "limits": limits} if (limits := limits_of(method.options_type)) else found


def limits_of(kind: type[BaseModel]) -> dict[str, str]:
    """The bounds of each number of a model, such as "ge 0, lt 1"."""
    bounds = {
        name: [f"{word} {getattr(part, word)}" for part in field.metadata for word in WORDS if hasattr(part, word)]
        for name, field in kind.model_fields.items()
    }
    return {name: ", ".join(words) for name, words in bounds.items() if words}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def assert_declared(name: str) -> None:
    assert declared(name) == tomllib.loads(TABLE.read_text(encoding="utf-8"))[name]
