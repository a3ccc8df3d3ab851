"""Numbers of a model's configuration: a value that no model has is refused by its key."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from fedvl.errors import FedVLError
from fedvl.files import SHORTENED

MAX_SIDE = 4096  # pixels of an image that an encoder reads
CHANNELS = 3


def refused_number(key: str, value: Any, expected: str) -> FedVLError:
    return FedVLError(
        f"The model's {key} is {SHORTENED.repr(value)}, but it must be {expected}: fetch the model again."
    )


def whole(value: Any, key: str, most: int) -> int:
    """Return a whole number from 1 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise refused_number(key, value, f"a whole number from 1 to {most:,}")
    return value


def real(value: Any, key: str, above: float, most: float) -> float:
    """Return a number above a limit, up to another."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= most:
        raise refused_number(key, value, f"a number above {above:g}, up to {most:g}")
    return float(value)


def heads(config: Mapping[str, Any], width: int, key: str = "num_attention_heads") -> int:
    """Return the number of attention heads, which divides the width of a tower."""
    value = config.get(key, max(width // 64, 1))
    if width % whole(value, key, width):
        raise refused_number(key, value, f"a divisor of the width {width}")
    return int(value)


def side(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a side of an image in pixels, as old and new preprocessor_config.json have it."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("shortest_edge", value.get("height"))
    return whole(default if value is None else value, key, MAX_SIDE)


def colour_numbers(
    config: Mapping[str, Any], key: str, default: tuple[float, ...], positive: bool
) -> tuple[float, ...]:
    """Return one finite number for each colour."""
    values = config.get(key, default)
    known = isinstance(values, list | tuple) and len(values) == CHANNELS
    if not known or not all(
        isinstance(each, int | float) and isfinite(each) and abs(each) <= 255 and (each > 0 or not positive)
        for each in values
    ):
        raise refused_number(key, values, f"{CHANNELS} {'positive ' if positive else ''}numbers up to 255")
    return tuple(map(float, values))
