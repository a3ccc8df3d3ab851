"""What survives a crash: one whole, hashed record a committed round.

A round is two files, tensors and manifest, each written aside, synced and renamed; the manifest comes last, so a round is
there whole or not at all. Manifests stay (they are the run's history), tensors of older rounds are removed.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedvl.errors import FedVLError
from fedvl.tensors import Tensors, load, save, write_whole

TENSORS_KEPT = 2  # rounds whose tensors stay: if the newest is damaged the one before it serves


class Journal:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def commit(self, round_number: int, tensors: Tensors, record: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        sha256 = save(self._tensors(round_number), tensors)
        body = {"round": round_number, "tensors_sha256": sha256, "record": record}
        write_whole(self._manifest(round_number), json.dumps({**body, "sha256": sealed(body)}).encode())
        self._tensors(round_number - TENSORS_KEPT).unlink(missing_ok=True)

    def latest(self) -> tuple[Tensors, list[dict[str, Any]]] | None:
        """The tensors of the newest whole round and the records up to it; later, damaged ones are removed."""
        for path in sorted(self.folder.glob("*.json"), reverse=True):
            records = self._records_up_to(int(path.stem))
            if records is not None:
                try:
                    return load(self._tensors(int(path.stem)), records[-1]["tensors_sha256"]), [
                        r["record"] for r in records
                    ]
                except FedVLError:
                    pass
            path.unlink()
        return None

    def _records_up_to(self, round_number: int) -> list[dict[str, Any]] | None:
        manifests = [read_sealed(self._manifest(number)) for number in range(1, round_number + 1)]
        return [m for m in manifests if m] if all(manifests) else None

    def _tensors(self, round_number: int) -> Path:
        return self.folder / f"{round_number:06d}.safetensors"

    def _manifest(self, round_number: int) -> Path:
        return self.folder / f"{round_number:06d}.json"


def sealed(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_sealed(path: Path) -> dict[str, Any] | None:
    """A manifest whose own hash is right, or None."""
    try:
        manifest = json.loads(path.read_bytes())
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        return body if manifest["sha256"] == sealed(body) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run's folder; a second process is refused. The lock ends with the process, however it ends."""
    with open(folder / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FedVLError(f"Another process is at work in {folder}; wait for it or choose another --out.") from error
        file.write(str(os.getpid()))
        file.flush()
        yield
