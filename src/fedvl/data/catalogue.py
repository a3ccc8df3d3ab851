"""The catalogue: class names, prompt templates, splits and sources of the papers' datasets."""

import difflib
import os
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from fedvl.errors import FedVLError


class CatalogueEntry(BaseModel):
    """One dataset of `catalogue.toml`, whose first comments explain the fields."""

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
    class_lists: dict[str, tuple[str, ...]] = {}
    groups: dict[str, tuple[str, ...]] = {}
    templates: dict[str, tuple[str, ...]]
    source: str
    licence: str
    embedded: bool = False
    fetchable: bool = False
    text: bool = False
    domains: tuple[str, ...] = ()
    methods: dict[str, dict[str, float]] = {}  # options that a method's paper sets for this dataset
    data: dict[str, float] = {}  # settings of [data] that a paper sets for it: alpha and beta of CPL


def class_key(name: str) -> str:
    """Return a name in lower case without spaces and punctuation, to match spellings."""
    return "".join(character for character in name.casefold() if character.isalnum())


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "catalogue.toml").read_text(encoding="utf-8"))


def listed(name: str) -> dict[str, Any]:
    """Return class names and raw names of a dataset that has a file in `class_names`."""
    path = Path(__file__).parent / "class_names" / f"{name}.txt"
    if not path.exists():
        return {}
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pairs = [(raw, class_name or raw) for raw, _, class_name in (line.partition("\t") for line in lines)]
    return {"class_names": [class_name for _, class_name in pairs], "rename": dict(pairs)}


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Return all entries by name, in the order of the file."""
    general = _content()["templates"]
    return {
        name: CatalogueEntry.model_validate(
            {"name": name, **listed(name), **fields, "templates": {**general, **fields.get("templates", {})}}
        )
        for name, fields in _content()["dataset"].items()
    }


def numbered_groups(name: str, class_names: Sequence[str]) -> list[int] | None:
    """Return the number of each class's group, or None where the catalogue does not group them."""
    entry = lookup(name)
    groups = enumerate(entry.groups.values()) if entry else ()
    number = {class_key(class_name): group for group, names in groups for class_name in names}
    found = [number.get(class_key(class_name)) for class_name in class_names]
    known = [group for group in found if group is not None]
    return known if known and len(known) == len(found) else None


def general_templates() -> dict[str, tuple[str, ...]]:
    """Return the prompt templates for a dataset without an entry."""
    return {key: tuple(texts) for key, texts in _content()["templates"].items()}


def lookup(name: str) -> CatalogueEntry | None:
    """Return the entry of that name in any spelling (`OxfordPets`, `oxford_pets`), or None."""
    return {class_key(known): entry for known, entry in catalogue().items()}.get(class_key(name))


def is_own(name: str) -> bool:
    """Whether a dataset is a user's own: a folder or file that the catalogue does not know."""
    return lookup(Path(name).stem) is None and "\0" not in name and os.path.exists(os.path.expanduser(name))


def find(name: str) -> CatalogueEntry:
    """Return the entry of that name, or raise an error that suggests the nearest names."""
    entry = lookup(name)
    if entry is None:
        raise FedVLError(f"There is no dataset {name!r} in the catalogue{suggestion(name)}")
    return entry


def suggestion(name: str) -> str:
    """Return the end of an error message about an unknown name, with the nearest known ones."""
    close = difflib.get_close_matches(name.casefold(), list(catalogue()), n=3, cutoff=0.6)
    meant = f"; did you mean {' or '.join(close)}?" if close else ";"
    return f"{meant} `fedvl data list` shows all names."
