"""Files that are whole or not there: write aside, sync, rename; read JSON that may be damaged."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fedvl.errors import FedVLError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside, sync it, rename it and sync its folder."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    aside.unlink(missing_ok=True)
    try:
        with open(aside, "xb") as file:  # never through a link that somebody put there
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


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file; None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} cannot be read ({error}): run the experiment again to make it anew.") from None
