"""What survives a crash: one whole, hashed record a committed round.

A round is two files, tensors and manifest, each written aside, synced and renamed; the manifest
comes last, so a round is there whole or not at all. Manifests stay (they are the run's history),
tensors of older rounds are removed once no round that may be resumed needs them.

A round may have written the private tensors of those clients alone that took part since the round
before. Its manifest then names the ``earlier`` rounds whose files have those of the others.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fedvl.config import MAX_ROUNDS
from fedvl.errors import FedVLError
from fedvl.federation.records import Manifest, Record
from fedvl.files import MAX_JSON, fitting, no_link, parse_json, read_file, write_whole
from fedvl.tensors import ByClient, Tensors, load, save, unflatten
from fedvl.version import __version__

JOURNAL_FORMAT = 1
MAX_ROUND_FILES = 16  # that the tensors of a round are read from


class Journal:
    """The committed rounds of one experiment; those of another are not resumed."""

    def __init__(self, folder: Path, experiment: str = "") -> None:
        self.folder = folder
        self.experiment = experiment
        self.notes: list[str] = []  # what was found damaged, for the report

    def commit(self, round_number: int, tensors: Tensors, record: Record, adds: bool = False) -> None:
        """Write a round; ``adds``: clients not in ``tensors`` are as in the round before."""
        self.folder.mkdir(exist_ok=True)
        before = self._files(round_number - 1) if round_number > 1 else []
        earlier = before if adds else []
        sha256 = save(self._tensors(round_number), tensors)
        body = {**self._stamp(round_number), "tensors_sha256": sha256, "earlier": earlier, "record": record.to_dict()}
        body["fedvl_version"] = __version__
        write_whole(self._manifest(round_number), json.dumps({**body, "sha256": sealed(body)}).encode())
        needed = {*earlier, *before, round_number}
        for old in self.folder.glob("[0-9]" * 6 + ".safetensors"):
            if int(old.stem) < round_number and int(old.stem) not in needed:
                old.unlink(missing_ok=True)

    def can_add(self, round_number: int) -> bool:
        """Whether a round may write what changed alone: not if it would need too many files."""
        before = self._files(round_number - 1) if round_number > 1 else []
        return 0 < len(before) < MAX_ROUND_FILES

    def _files(self, round_number: int) -> list[int]:
        """Return the rounds whose files hold the tensors of a round, itself the last."""
        manifest = read_sealed(self._manifest(round_number))
        return [*manifest.earlier, round_number] if manifest else []

    def tensors(self, round_number: int) -> Tensors:
        """The tensors of one committed round; nothing is mended."""
        manifest = read_sealed(self._manifest(round_number))
        if manifest is None:
            raise FedVLError(f"{self._manifest(round_number)} is missing or damaged; restore it from a copy.")
        return self._load(round_number, manifest)

    def latest(self) -> tuple[Tensors, list[Record]] | None:
        """Return the newest whole round and the records up to it; remove damaged newer rounds."""
        committed = self._committed()
        unusable = sorted(self.folder.glob("[0-9]" * 6 + ".json"), reverse=True)
        for number in range(len(committed), 0, -1):
            try:
                tensors = self._load(number, committed[number - 1])
            except FedVLError:
                continue
            self._drop([path for path in unusable if int(path.stem) > number])
            return tensors, [manifest.record for manifest in committed[:number]]
        if unusable:
            if (theirs := written_by(self.folder)) not in ("", __version__):
                raise FedVLError(
                    f"FedVL {theirs} wrote the rounds in {self.folder}, and {__version__} here cannot read them: resume the run "
                    f"with FedVL {theirs}, or delete that folder to begin again."
                )
            raise FedVLError(
                f"The rounds in {self.folder} are damaged, of another experiment or of another version of FedVL; "
                "restore that folder from a copy, or delete it to begin again."
            )
        return None

    def _load(self, round_number: int, manifest: Manifest) -> Tensors:
        """Read the tensors of a round, and of earlier ones those of clients that it has none of."""
        tensors = self._read(round_number, manifest)
        known = {owner_of(name) for name in tensors}
        for number in reversed(manifest.earlier):
            older = read_sealed(self._manifest(number))
            if older is None or number >= round_number:
                raise FedVLError(f"{self._manifest(number)} is missing or damaged; restore it from a copy.")
            found = {
                name: tensor
                for name, tensor in self._read(number, older).items()
                if owner_of(name).isdigit() and owner_of(name) not in known
            }
            tensors |= found
            known |= {owner_of(name) for name in found}
        return tensors

    def _read(self, round_number: int, manifest: Manifest) -> Tensors:
        path = self._tensors(round_number)
        tensors = load(path, manifest.tensors_sha256)
        if not all("/" in name for name in tensors):
            raise FedVLError(f"{path} holds tensors of no owner; restore it from a copy.")
        return tensors

    def _drop(self, manifests: list[Path]) -> None:
        for path in manifests:
            path.unlink()
            self.notes.append(f"Round {int(path.stem)} was found damaged in the journal and was run again.")

    def _committed(self) -> list[Manifest]:
        """Return the manifests from the first round on, up to one that is missing or damaged."""
        found = list[Manifest]()
        for number in range(1, MAX_ROUNDS + 1):
            manifest = read_sealed(self._manifest(number))
            if manifest is None or not self._stamp(number).items() <= manifest.to_dict().items():
                break
            found.append(manifest)
        return found

    def _stamp(self, round_number: int) -> dict[str, str | int]:
        return {"format": JOURNAL_FORMAT, "experiment": self.experiment, "round": round_number}

    def _tensors(self, round_number: int) -> Path:
        return no_link(self.folder / f"{round_number:06d}.safetensors")

    def _manifest(self, round_number: int) -> Path:
        return no_link(self.folder / f"{round_number:06d}.json")


def owner_of(name: str) -> str:
    """Return whose a tensor is: a client's number, ``shared``, ``server``, ``kept`` or ``best``."""
    return name.partition("/")[0]


def written_by(folder: Path) -> str:
    """Return the version of FedVL that wrote the newest round; "" if it is not known."""
    manifests = (read_sealed(no_link(path)) for path in sorted(folder.glob("[0-9]" * 6 + ".json"), reverse=True))
    return next((each.fedvl_version for each in manifests if each), "")


def sealed(body: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_sealed(path: Path) -> Manifest | None:
    """A manifest whose own hash is right, or None."""
    try:
        manifest = parse_json(read_file(path, MAX_JSON))
    except (OSError, ValueError, FedVLError):
        return None
    found = fitting(Manifest, manifest)
    if found is None:
        return None
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return found if manifest.get("sha256") == sealed(body) else None


BEST = "best/"  # before the names of the best round's tensors, in the journal of a later round
SERVER = "server/"  # before the names of tensors that stay on the server


def best_round(records: Sequence[Record]) -> int | None:
    """Return the first round with the highest accuracy on validation images; None without them."""
    known = [record for record in records if record.validation is not None]
    return max(known, key=lambda record: record.validation or 0.0).round if known else None


def chosen_round(tensors: Tensors) -> Tensors:
    """Return the tensors of the best round of a journal's newest round, which may be the newest."""
    older = {name.removeprefix(BEST): tensor for name, tensor in tensors.items() if name.startswith(BEST)}
    return older or tensors


class RoundState(NamedTuple):
    """What the journal holds of a round."""

    shared: Tensors
    last: ByClient
    private: ByClient
    server: Tensors


def read_state(tensors: Tensors, device: torch.device | str) -> RoundState:
    """Sort the tensors of a round by owner, and place them."""
    owners: dict[str, Tensors] = {"shared": {}, "server": {}, "kept": {}, "": {}}
    for key, tensor in tensors.items():
        owner, name = key.split("/", 1)
        known = owner in owners
        owners[owner if known else ""][name if known else key] = tensor.to(device)
    return RoundState(owners["shared"], unflatten(owners["kept"]), unflatten(owners[""]), owners["server"])
