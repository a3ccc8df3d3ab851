"""Files: written whole or not at all; read only if regular, not too large and not damaged."""

import hashlib
import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedvl.errors import FedVLError

MOST_JSON = 2**26  # bytes
LONGEST_INTEGER = 19  # digits; what is longer is no count


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
    return int(digits) if len(digits) <= LONGEST_INTEGER else float(digits)


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Read a JSON file; None where there is none."""
    try:
        return parse_json(read_file(path, most))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} cannot be read ({error}): run the experiment again to make it anew.") from None
