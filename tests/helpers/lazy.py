"""Modules that are slow to load (transformers, Flower, schemathesis, ...) are loaded by the first test that uses them.

Otherwise every process of a test run would load all of them, whichever tests it runs, before the first test.
"""

from importlib import import_module
from typing import Any


class Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks whatever a file has whether it is a test, a mark or a mock
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


def lazily(name: str) -> Any:
    """``transformers = lazily("transformers")``: the module, as far as reading its attributes goes."""
    return Lazy(name)
