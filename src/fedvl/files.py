"""Files: written whole or not at all; read only if regular, not too large and not damaged."""

import hashlib
import json
import os
import re
import reprlib
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedvl.errors import FedVLError

MAX_JSON = 2**26  # bytes
MAX_INTEGER = 19  # digits; what is longer is no count

SHORTENED = reprlib.Repr()  # of values from a file, in a sentence
SHORTENED.maxstring = SHORTENED.maxother = 100
MAX_NAMES = 100_000
Number = Annotated[float, Field(allow_inf_nan=True)]  # a loss may have overflown
Finite = Annotated[float, Field(ge=-1e15, le=1e15)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Names = Annotated[list[str], Field(max_length=MAX_NAMES)]
Bounds = Annotated[list[Finite], Field(min_length=2, max_length=2)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Scalar = str | int | float | bool | None


class Content(BaseModel):
    """Content of a file: known keys have their type, others are not used."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    def joined(self, *parts: "Content") -> Self:
        """Return this content with the keys of further ones; the last one wins."""
        contents: list[Content] = [self, *parts]
        found = {name: getattr(part, name) for part in contents for name in part.model_fields_set}
        return type(self).model_validate(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that were set, in the order of the model's fields."""
        return self.model_dump(exclude_unset=True)

    def to_json(self, indent: int | None = None) -> str:
        """Return the JSON to write: the keys that were set, in the order of the fields."""
        return json.dumps(self.to_dict(), indent=indent)


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file aside, sync it, rename it and sync its folder."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.unlink(missing_ok=True)
    try:
        # never through a link that somebody put there
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_parts(folder: Path) -> None:
    """Remove what killed processes left of files that they wrote aside."""
    for path in folder.glob(".*.part"):
        number = re.fullmatch(r"\..+\.([0-9]{1,9})\.part", path.name)
        if number and not running(int(number[1])):
            with suppress(OSError):  # a folder, which no process of ours made
                path.unlink(missing_ok=True)


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's process
        return True
    return True


def no_link(path: Path) -> Path:
    """Return the path; refuse a link, which could lead out of its folder."""
    if path.is_symlink():
        raise FedVLError(f"{path} is a link, which a run folder does not have; remove it.")
    return path


def regular(path: Path, most: int) -> Path:
    """Return the path of a regular file of at most so many bytes; a pipe or device has no end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FedVLError(f"{path} is a folder, pipe or device where a file is expected; remove it.")
    if found.st_size > most:
        raise FedVLError(f"{path} has {found.st_size:,} bytes, more than the {most:,} that FedVL reads; remove it.")
    return path


def read_file(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes."""
    return regular(path, most).read_bytes()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(content: bytes | str) -> Any:
    """Parse JSON; raise ValueError also if it is nested too deeply or an integer is endless."""
    try:
        return json.loads(content, parse_int=bounded_integer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def bounded_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_INTEGER else float(digits)


def read_json(path: Path, most: int = MAX_JSON) -> Any:
    """Read a JSON file; None where there is none."""
    try:
        return parse_json(read_file(path, most))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} cannot be read ({error}): run the experiment again to make it anew.") from None


ContentModel = TypeVar("ContentModel", bound=Content)


def same_lengths(**lists: list[Any] | None) -> None:
    """Refuse lists of different lengths; one that is None is left out."""
    lengths = {name: len(values) for name, values in lists.items() if values is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(" and ".join(lengths) + " have different lengths")


def square(rows: list[list[int]] | None, width: int, name: str) -> None:
    if any(len(row) != width for row in rows or ()):
        raise ValueError(f"a row of {name} has not {width} values")


def fitting(kind: type[ContentModel], content: object) -> ContentModel | None:
    """Return a content as a model; None if it is not of this kind."""
    try:
        return kind.model_validate(content)
    except ValidationError:
        return None


def validated(kind: type[ContentModel], content: Any, path: Path) -> ContentModel:
    """Return the content of a file as a model; refuse one that is not of this kind."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        location = ".".join(str(part) for part in problem["loc"])[:100]
        found = f"its '{location}' is {SHORTENED.repr(problem['input'])}" if location else "what it holds"
        reason = problem["msg"][0].lower() + problem["msg"][1:]
        raise FedVLError(f"{path} is not as FedVL writes it ({found}: {reason}); get a whole copy of it.") from None
