"""A run on disk, and the one way in which every command creates, locks, reads and writes it.

config.toml        settings, enough to run again    metrics.jsonl     a line per committed round
journal/           committed rounds, hashed         result.json       final figures, written last
model.safetensors  the server's tensors             kept.safetensors  clients' last updates
examples.json      test images for the report       report.html       what a person opens
federation.json    which federation runs it         status.json       how such a run stands
withdrawals.json   clients that withdrew, and what the run without each differs by
contributions.json what each client contributes to the accuracy
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvl.config import MAX_TOML, Experiment, Settings, read_toml, resolve
from fedvl.data.catalogue import is_own
from fedvl.errors import FedVLError
from fedvl.evaluation.shapley import Contributions
from fedvl.federation.records import Record
from fedvl.files import (
    ContentModel,
    file_sha256,
    fitting,
    no_link,
    parse_json,
    read_file,
    read_json,
    regular,
    remove_parts,
    running,
    validated,
    write_whole,
)
from fedvl.runs.contents import (
    Examples,
    Federation,
    Figures,
    Result,
    Status,
    TensorFile,
    Withdrawal,
    Withdrawals,
)
from fedvl.version import __version__

if TYPE_CHECKING:
    from fedvl.federation.journal import Journal, RoundState
    from fedvl.tensors import ByClient, Tensors

MAX_METRICS = 2**28  # bytes of metrics.jsonl
MAX_LOCK = 100
PARTY, STATE = "party.json", "state"  # in the folder of a client, whose runs are in state/runs/


class RunFolder:
    """A run folder; what is read of it is read once."""

    def __init__(self, path: Path, trust_method: bool = False, queried: bool = False) -> None:
        self.path = path
        self.trust_method = trust_method  # run a method's file that lies in the folder
        self.queried = queried  # the model answers, and the dataset is not opened

    def file(self, name: str) -> Path:
        """Return a file of the run; refuse a link, which could lead out of the folder."""
        return no_link(self.path / name)

    @classmethod
    def open(cls, path: Path, trust_method: bool = False) -> "RunFolder":
        """Return the run in a folder, to query it; of a client's folder, the last that finished."""
        if not no_link(path / PARTY).is_file():
            return cls(path, trust_method, queried=True)
        state = no_link(path / STATE)
        runs = [run for each in sorted((state / "runs").glob("*")) if (run := cls(each, trust_method, True)).finished]
        if not runs:
            raise FedVLError(f"The client in {path} has no finished run yet; fedvl client says when one is over.")
        return max(runs, key=lambda run: str(run.result.finished))

    # --- create and lock

    @classmethod
    @contextmanager
    def create(
        cls, out: Path | None, experiment: Experiment, federation: Federation | None = None
    ) -> Iterator["RunFolder"]:
        """Make and lock a run folder; remove it if the run fails before its first round."""
        path, made = claim(out, experiment)
        folder = cls(path)
        folder.experiment = experiment
        with folder.lock(new=True):
            if taken(path):  # by a run that began and ended in between
                raise FedVLError(exists_already(path))
            try:
                folder.describe(experiment)
                if federation is not None:
                    folder.write_federation(federation)
                yield folder
            except (FedVLError, OSError):
                # no round to go on from: leave no half-written run; but parties may come to one between machines
                if federation is None and not any((path / "journal").glob("*.json")):
                    remove(path, made)
                raise

    def describe(self, experiment: Experiment) -> None:
        """Write the settings, and a copy of the method where it is the user's own file."""
        if experiment.method.name.endswith(".py"):
            shutil.copyfile(experiment.method.name, self.file(Path(experiment.method.name).name))
        write_whole(self.file("config.toml"), located(experiment).to_toml().encode())

    @contextmanager
    def lock(self, new: bool = False, waits: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the folder against other processes; the lock ends with this one.

        If another process holds it, wait for the lock after a call of ``waits`` that names the
        process; without ``waits`` refuse the folder.
        """
        path = self.file(".lock")
        if path.exists():
            regular(path, MAX_LOCK)
        with open(path, "a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = file.read().partition(" ")[0] or "just started"
                if waits is None:
                    exists = f"{self.path} exists already: another process" if new else "Another process"
                    raise FedVLError(
                        f"{exists} ({holder}) is at work in {self.path}; wait for it or choose another --out."
                    ) from error
                waits(f"waiting for process {holder}")
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(f"{os.getpid()} {process_start(os.getpid())}")
            file.flush()
            try:
                remove_parts(self.path)
                remove_parts(self.file("journal"))
                yield
            finally:
                file.truncate(0)

    @property
    def at_work(self) -> bool:
        """Whether a process of this machine holds the run; asking takes no lock."""
        try:
            process, _, started = read_file(self.file(".lock"), MAX_LOCK).decode().partition(" ")
            return running(int(process)) and process_start(int(process)) == started
        except (OSError, ValueError):
            return False

    # --- settings

    @property
    def exists(self) -> bool:
        return self.file("config.toml").is_file()

    @property
    def settings_sha256(self) -> str:
        """The SHA-256 of config.toml, which names that of a method's file."""
        return hashlib.sha256(read_file(self.file("config.toml"), MAX_TOML)).hexdigest()

    @cached_property
    def settings(self) -> Settings:
        """The settings as config.toml has them, checked; the method is not loaded."""
        if not self.exists:
            raise FedVLError(f"There is no run in {self.path}; give the folder of one, such as runs/NAME.")
        found = read_toml(self.file("config.toml"))
        try:
            resolve([found])
        except FedVLError as error:
            raise FedVLError(f"{error}{self._other_version()}") from error
        return found

    def _other_version(self) -> str:
        """Name both versions of FedVL if another one wrote this run."""
        from fedvl.federation.journal import written_by

        if (theirs := written_by(self.file("journal"))) in ("", __version__):
            return ""
        return f" FedVL {theirs} wrote this run, and this is {__version__}: use {theirs} for it."

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment; a method's file is the folder's own copy."""
        from fedvl.runs.settings import resolve_experiment

        settings = {**self.settings, "method": dict(self.settings.get("method", {}))}
        name = settings["method"].get("name", "")
        if name.endswith(".py"):
            settings["method"]["name"] = str(self._method_file(Path(name)))
        experiment = resolve_experiment(settings)
        self._check_downloads(experiment)
        return experiment

    def _method_file(self, original: Path) -> Path:
        """Return the folder's copy of a method, if it is trusted or the user's own file."""
        copy = self.file(original.name)
        if not copy.is_file():
            raise FedVLError(f"The run in {self.path} needs its method's file {copy}, which is not there; put it back.")
        elsewhere = not original.resolve().is_relative_to(self.path.resolve())
        known = elsewhere and original.is_file() and file_sha256(original) == file_sha256(copy)
        if not (self.trust_method or known):
            raise FedVLError(f"{copy} is code that this run would execute; read it, then say --trust-method.")
        return copy

    def _check_downloads(self, experiment: Experiment) -> None:
        """Refuse a model or dataset of the hub that is not here, if the folder is not trusted."""
        if self.trust_method:
            return
        if absent := downloads_of(experiment, dataset=not self.queried):
            raise FedVLError(
                f"The run in {self.path} would download the {absent[0]} from the hub; if you want that, say --trust-method."
            )

    @cached_property
    def federation(self) -> Federation | None:
        """Which federation runs it, if one does, and which clients were told of its end."""
        return self._read(Federation, "federation.json")

    def _read(self, kind: type[ContentModel], name: str) -> ContentModel | None:
        """Read a file of the run as a model; None if the file does not exist."""
        path = self.file(name)
        found = read_json(path)
        return None if found is None else validated(kind, found, path)

    def write_federation(self, federation: Federation) -> None:
        write_whole(self.file("federation.json"), federation.to_json().encode())
        self.federation = federation

    # --- rounds

    @property
    def journal(self) -> "Journal":
        from fedvl.federation.journal import Journal
        from fedvl.runs.settings import resume_key

        return Journal(self.file("journal"), resume_key(self.experiment))

    def state(self, device: Any = "cpu") -> "RoundState":
        """Return the tensors of the last round, with private ones of simulated clients."""
        from fedvl.federation.journal import Journal, chosen_round, read_state

        rounds = self.result.rounds
        tensors = Journal(self.file("journal")).tensors(rounds) if rounds else {}
        return read_state(chosen_round(tensors), device)

    def write_rounds(self, records: Iterable[Record]) -> None:
        """Write the rounds as the journal has them; drop lines of uncommitted rounds."""
        write_whole(self.file("metrics.jsonl"), "".join(record.to_json() + "\n" for record in records).encode())

    def append_round(self, record: Record) -> None:
        with open(self.file("metrics.jsonl"), "a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")

    @cached_property
    def rounds(self) -> list[Record]:
        return self._rounds[0]

    @cached_property
    def unreadable_lines(self) -> int:
        return self._rounds[1]

    @cached_property
    def _rounds(self) -> tuple[list[Record], int]:
        return read_rounds(self.file("metrics.jsonl"))

    # --- result

    @property
    def finished(self) -> bool:
        return self.file("result.json").is_file()

    @cached_property
    def result(self) -> Result:
        path = self.file("result.json")
        result = read_json(path)
        if result is None and not self.exists:
            raise FedVLError(f"There is no run in {self.path}; give the folder of one, such as runs/NAME.")
        if result is None:
            raise FedVLError(f"The run in {self.path} is not finished; go on with it by fedvl resume {self.path}.")
        if not isinstance(result, dict) or "method" not in result:
            raise FedVLError(f"{path} is not a result of fedvl: it names no method; give the folder of a finished run.")
        return validated(Result, result, path)

    @cached_property
    def examples(self) -> Examples:
        """Test images that training set right or wrong."""
        return self._read(Examples, "examples.json") or Examples()

    def finish(
        self,
        result: Result,
        examples: Examples,
        shared: "Tensors",
        last: "ByClient",
        server: "Tensors | None" = None,
    ) -> None:
        """Write the model and the result, which names the hashes of its files and comes last."""
        from fedvl.federation.journal import SERVER
        from fedvl.tensors import flatten, save

        if examples.gained or examples.lost:
            write_whole(self.file("examples.json"), examples.to_json().encode())
        described = {"fedvl": json.dumps(result.config), "method": result.method}
        model = {**shared, **{f"{SERVER}{name}": tensor for name, tensor in (server or {}).items()}}
        files: dict[TensorFile, str] = {"model.safetensors": save(self.file("model.safetensors"), model, described)}
        if last:
            files["kept.safetensors"] = save(self.file("kept.safetensors"), flatten(last), {"method": result.method})
        self.result = result.joined(Figures(files_sha256=files))
        write_whole(self.file("result.json"), self.result.to_json().encode())

    def tensors(self) -> "tuple[Tensors, ByClient]":
        """Return the shared tensors and clients' last updates, their hashes verified.

        Tensors that stay on the server are left out: nothing but a further round needs them.
        """
        from fedvl.federation.journal import SERVER
        from fedvl.tensors import load, unflatten

        hashes, result = self.result.files_sha256, self.result
        if "model.safetensors" not in hashes or not (
            result.class_names and result.templates and result.model_fingerprint
        ):
            raise FedVLError(f"The run in {self.path} was made by an older FedVL, without hashes; run it again.")
        found = {name: load(self.file(name), sha256) for name, sha256 in hashes.items()}
        for name, tensors in found.items():
            if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
                raise FedVLError(f"{self.path / name} holds numbers that are not finite; run the experiment again.")
        shared = {name: t for name, t in found["model.safetensors"].items() if not name.startswith(SERVER)}
        return shared, unflatten(found.get("kept.safetensors", {}))

    # --- withdrawals

    @property
    def withdrawals(self) -> list[Withdrawal]:
        """Clients that withdrew, from this run or from the one that it was made from."""
        found = self._read(Withdrawals, "withdrawals.json")
        return found.withdrawals if found else []

    def note_withdrawal(self, withdrawal: Withdrawal) -> None:
        """Add a record; one of the same client and runs that was measured before is replaced."""
        kept = [each for each in self.withdrawals if each.compared != withdrawal.compared]
        noted = Withdrawals(withdrawals=[*kept, withdrawal])
        write_whole(self.file("withdrawals.json"), noted.to_json().encode())

    # --- contributions

    @property
    def contributions(self) -> Contributions | None:
        """What each client contributes, where it was measured."""
        return self._read(Contributions, "contributions.json")

    def write_contributions(self, found: Contributions) -> None:
        write_whole(self.file("contributions.json"), found.to_json().encode())

    # --- status

    def write_status(self, status: Status) -> None:
        write_whole(self.file("status.json"), status.to_json().encode())

    @property
    def status(self) -> Status:
        """How a run between machines stands; nothing if that is not known."""
        try:
            return self._read(Status, "status.json") or Status()
        except FedVLError:
            return Status()


def located(experiment: Experiment) -> Experiment:
    """Return the experiment with absolute paths to the user's own data, for use from any folder."""
    data = experiment.data
    paths = {"dataset": data.dataset if is_own(data.dataset) else None, "corrections": data.corrections}
    found = {name: os.path.abspath(os.path.expanduser(path)) for name, path in paths.items() if path}
    return experiment.model_copy(update={"data": data.model_copy(update=found)})


def downloads_of(experiment: Experiment, dataset: bool) -> list[str]:
    """Return the model and datasets that an experiment would download; the hub is not contacted."""
    from fedvl.data.fetch import HUB, downloaded
    from fedvl.models.checkpoint import is_hub_name, stored

    model = experiment.model.name
    parts = experiment.data.dataset.split("+") if dataset else []
    absent = [f"model {model}"] if is_hub_name(model) and stored(model) is None else []
    return absent + [f"dataset {name}" for name in parts if name.startswith(HUB) and downloaded(name) is None]


def exists_already(path: Path) -> str:
    return f"{path} exists already; go on with it by fedvl resume {path}, or choose another --out."


def claim(out: Path | None, experiment: Experiment) -> tuple[Path, bool]:
    """Make the folder of a new run; return it, and whether it was not there before."""
    if out is not None:
        new = make_folder(out)
        if not new and (not out.is_dir() or taken(out)):
            raise FedVLError(exists_already(out))
        return out, new
    stem = f"{experiment.method.label}-{Path(experiment.data.dataset).stem or 'images'}"
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if make_folder(folder):
            return folder, True
    raise FedVLError("runs/ holds ten thousand runs of this name; choose a name with --out.")


def make_folder(folder: Path) -> bool:
    """Make a folder; return False if there is something of its name."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir()
            return True
        return False
    except OSError as error:
        raise FedVLError(f"Cannot make the folder {folder}: {error.strerror}; choose another --out.") from error


def taken(folder: Path) -> bool:
    """Whether a folder holds anything but the lock of a run that was killed before it began."""
    return any(item.name != ".lock" for item in folder.iterdir())


def remove(path: Path, made: bool) -> None:
    """Remove a run that never began; a folder that was there before stays, empty as it was."""
    for item in path.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)
    if made:
        path.rmdir()


def process_start(process: int) -> str:
    """Return when a process started, to tell it from a later one of its number."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def read_rounds(path: Path) -> tuple[list[Record], int]:
    """Return the records by round, and how many lines were torn."""
    by_round: dict[int, Record] = {}
    unreadable = 0
    lines = read_file(path, MAX_METRICS).decode(errors="replace").splitlines() if path.exists() else []
    for line in filter(str.strip, lines):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if found := fitting(Record, record):
            # A round that was run again after a crash appears twice: the later line is the one that was committed.
            by_round[found.round] = found
        else:
            unreadable += 1
    return [by_round[index] for index in sorted(by_round)], unreadable
