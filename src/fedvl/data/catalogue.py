"""What is known about the datasets of the papers: class names, prompt templates, splits, and where to get them."""

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedvl.errors import FedVLError


class Entry(BaseModel):
    """One dataset of `catalogue.toml`; the comments at the top of that file say what each field is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str
    classes: int
    images: int
    splits: dict[str, int] = {}
    papers: str = ""
    class_names: tuple[str, ...] = ()
    rename: dict[str, str] = {}
    ignore: tuple[str, ...] = ()
    templates: dict[str, tuple[str, ...]]
    source: str
    licence: str
    embedded: bool = False
    fetchable: bool = False
    text: bool = False
    methods: dict[str, dict[str, float]] = {}  # options as a method's paper sets them for this dataset


def class_key(name: str) -> str:
    """A name without case, spaces and punctuation: `HandstandPushups` is `handstand pushups`."""
    return "".join(character for character in name.casefold() if character.isalnum())


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "catalogue.toml").read_text(encoding="utf-8"))


@cache
def catalogue() -> dict[str, Entry]:
    """All entries by name, in the order of the file."""
    general = _content()["templates"]
    return {
        name: Entry.model_validate({"name": name, **fields, "templates": {**general, **fields.get("templates", {})}})
        for name, fields in _content()["dataset"].items()
    }


def general_templates() -> dict[str, tuple[str, ...]]:
    """The templates of a dataset that has no entry."""
    return {key: tuple(texts) for key, texts in _content()["templates"].items()}


def lookup(name: str) -> Entry | None:
    """The entry of that name, however it is spelled (`OxfordPets`, `oxford_pets`), or None."""
    return {class_key(known): entry for known, entry in catalogue().items()}.get(class_key(name))


def find(name: str) -> Entry:
    """The entry of that name; a plain error with the nearest names where there is none."""
    entry = lookup(name)
    if entry is None:
        raise FedVLError(f"There is no dataset {name!r} in the catalogue{suggestion(name)}")
    return entry


def suggestion(name: str) -> str:
    """The end of a sentence about an unknown name."""
    close = difflib.get_close_matches(name.casefold(), list(catalogue()), n=3, cutoff=0.6)
    meant = f"; did you mean {' or '.join(close)}?" if close else ";"
    return f"{meant} `fedvl data list` shows all names."
