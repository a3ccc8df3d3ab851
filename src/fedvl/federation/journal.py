"""What survives a crash: one whole, hashed record a committed round.

A round is two files, tensors and manifest, each written aside, synced and renamed; the manifest
comes last, so a round is there whole or not at all. Manifests stay (they are the run's history),
tensors of older rounds are removed.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from fedvl.errors import FedVLError
from fedvl.files import write_whole
from fedvl.tensors import Tensors, load, save

FORMAT = 1
TENSORS_KEPT = 2  # rounds whose tensors stay: if the newest is damaged the one before it serves


class Journal:
    """The committed rounds of one experiment; those of another are not resumed."""

    def __init__(self, folder: Path, experiment: str = "") -> None:
        self.folder = folder
        self.experiment = experiment
        self.notes: list[str] = []  # what was found damaged, for the report

    def commit(self, round_number: int, tensors: Tensors, record: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        sha256 = save(self._tensors(round_number), tensors)
        body = {**self._stamp(round_number), "tensors_sha256": sha256, "record": record}
        write_whole(self._manifest(round_number), json.dumps({**body, "sha256": sealed(body)}).encode())
        self._tensors(round_number - TENSORS_KEPT).unlink(missing_ok=True)

    def tensors(self, round_number: int) -> Tensors:
        """The tensors of one committed round; nothing is mended."""
        manifest = read_sealed(self._manifest(round_number))
        if manifest is None:
            raise FedVLError(f"{self._manifest(round_number)} is missing or damaged; restore it from a copy.")
        return load(self._tensors(round_number), manifest["tensors_sha256"])

    def latest(self) -> tuple[Tensors, list[dict[str, Any]]] | None:
        """Return the newest whole round and the records up to it; remove damaged newer rounds."""
        unusable: list[Path] = []
        for path in sorted(self.folder.glob("[0-9]*.json"), reverse=True):
            records = self._records_up_to(int(path.stem))
            try:
                if records is not None:
                    tensors = load(self._tensors(int(path.stem)), records[-1]["tensors_sha256"])
                    self._drop(unusable)
                    return tensors, [r["record"] for r in records]
            except FedVLError:
                pass
            unusable.append(path)
        if unusable:
            raise FedVLError(
                f"The rounds in {self.folder} are damaged, of another experiment or of another version of FedVL; "
                "restore that folder from a copy, or delete it to begin again."
            )
        return None

    def _drop(self, manifests: list[Path]) -> None:
        for path in manifests:
            path.unlink()
            self.notes.append(f"Round {int(path.stem)} was found damaged in the journal and was run again.")

    def _records_up_to(self, round_number: int) -> list[dict[str, Any]] | None:
        numbers = range(1, round_number + 1)
        manifests = [read_sealed(self._manifest(number)) or {} for number in numbers]
        own = all(self._stamp(n).items() <= m.items() for n, m in zip(numbers, manifests, strict=True))
        return manifests if own else None

    def _stamp(self, round_number: int) -> dict[str, Any]:
        return {"format": FORMAT, "experiment": self.experiment, "round": round_number}

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
