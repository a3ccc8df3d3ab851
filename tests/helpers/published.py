"""What a method declares, beside the table of what it is to declare: the settings of its paper or code."""

import inspect
import tomllib
from pathlib import Path
from typing import Any

from fedvl.methods import load_method
from fedvl.methods.base import CHOICES, Method

TABLE = Path(__file__).parents[1] / "methods" / "published.toml"
DECLARED = ("inputs", *CHOICES, "uses_target", "through_encoder", "starts_from_head", "exchanges", "requires")


def declared(name: str) -> dict[str, Any]:
    """Defaults of options, presets, and declarations that are not those of every method, as TOML has them."""
    method = load_method(name)
    flags = {flag: inspect.getattr_static(method, flag) for flag in DECLARED}
    options = method.options_type().model_dump(exclude_none=True)
    own = {flag: value for flag, value in flags.items() if value != getattr(Method, flag)}
    found: dict[str, Any] = plain({**own, "options": options, "presets": method.presets})
    return found


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def assert_published(name: str) -> None:
    assert declared(name) == tomllib.loads(TABLE.read_text(encoding="utf-8"))[name]
