"""A federation between machines: its folders, and what runs on the server's machine and on each client's.

    DIR/federation.json   who takes part, the address, the classes      DIR/experiments/NAME.toml   what may be run
    DIR/server.crt .key   of the server; ca.key signs, keep it safe     DIR/parties/NAME/           a folder to hand to each party

A party's folder has its key, the authority's certificate, party.json and the experiments: it takes part in these and no other.
What it keeps for itself (private tensors, logs, the final model) lies there too.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ConfigDict

from fedvl.config import Experiment
from fedvl.data.sources import open_dataset
from fedvl.data.stores import Dataset
from fedvl.deployment.keys import make_certificates, make_party_key, write_private
from fedvl.deployment.remote import Identity, RemoteEngine
from fedvl.errors import FedVLError
from fedvl.experiment import read_experiment, resolve_experiment, run_prepared
from fedvl.methods import load_method
from fedvl.models.checkpoint import load_model
from fedvl.preparation import Display, Opener, Prepared, prepare
from fedvl.tensors import load, write_whole

# Read by Flower when it is imported or started: nothing phones home, nothing is installed.
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
THIS_MACHINE = "127.0.0.1"
STARTING_SECONDS = 60.0  # for the SuperLink's port to open
Model = TypeVar("Model", bound=BaseModel)


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Member(Frozen):
    name: str
    public_key: str


class FederationFile(Frozen):
    host: str
    port: int
    parties: tuple[Member, ...]
    class_names: tuple[str, ...]
    templates: dict[str, tuple[str, ...]]

    @property
    def listen(self) -> str:
        """The address that the server listens on: all of the machine's, unless the federation is within it."""
        return THIS_MACHINE if self.host in (THIS_MACHINE, "localhost") else "0.0.0.0"


class PartyFile(Frozen):
    name: str
    number: int
    parties: int
    server: str  # host:port
    class_names: tuple[str, ...]
    templates: dict[str, tuple[str, ...]]


def flower() -> ModuleType:
    os.environ.update(SWITCHES)
    from fedvl.deployment import flower

    return flower


# --- folders


def create(folder: Path, names: list[str], host: str, port: int, experiment: Experiment) -> None:
    """Make the folder of a federation, with one to hand to each party."""
    dataset = open_dataset(experiment.data.dataset, Path(experiment.data.root) if experiment.data.root else None)
    for taken in folder, *(folder / "parties" / name for name in names):
        taken.mkdir(parents=True, mode=0o700)
    make_certificates(folder, host)
    keys = {name: make_party_key(folder / "parties" / name / "key") for name in names}
    common: dict[str, Any] = {"class_names": dataset.class_names, "templates": dataset.templates}
    members = tuple(Member(name=name, public_key=key) for name, key in keys.items())
    whole = FederationFile(host=host, port=port, parties=members, **common)
    (folder / "federation.json").write_text(whole.model_dump_json(indent=1), encoding="utf-8")
    add_experiment(folder, experiment)
    for number, name in enumerate(names):
        place = folder / "parties" / name
        party = PartyFile(name=name, number=number, parties=len(names), server=f"{host}:{port}", **common)
        (place / "party.json").write_text(party.model_dump_json(indent=1), encoding="utf-8")
        shutil.copyfile(folder / "ca.crt", place / "ca.crt")
        shutil.copytree(folder / "experiments", place / "experiments")


def add_experiment(folder: Path, experiment: Experiment) -> None:
    (folder / "experiments").mkdir(exist_ok=True)
    path = folder / "experiments" / f"{experiment.method.label}.toml"
    path.write_bytes(experiment.to_toml().encode())


def fitting(settings: dict[str, Any], clients: int) -> Experiment:
    """The experiment that settings describe, as parties can run it that do not see each other's data."""
    experiment = resolve_experiment({**settings, "data": {**settings.get("data", {}), "clients": clients}})
    method = load_method(experiment.method.name)
    if experiment.method.name.endswith(".py"):
        raise FedVLError(
            "A federation between machines runs methods that all parties have; put yours into the package."
        )
    if method.scope == "pooled":
        raise FedVLError(f"Method '{experiment.method.name}' pools all data in one place; it is for fedvl run only.")
    if experiment.data.labels == "cps":
        raise FedVLError(
            "data.labels=cps needs all clients at once; use --method fedpp, which does it by messages, or fpl."
        )
    if experiment.evaluation.protocol == "open":
        raise FedVLError("The open protocol deals out classes, which real parties bring along; use --protocol closed.")
    if experiment.evaluation.protocol == "personal":  # its private tensors stay home, and so does that question
        experiment = experiment.model_copy(
            update={"evaluation": experiment.evaluation.model_copy(update={"protocol": "closed"})}
        )
    return experiment


def experiment_id(path: Path, prepared: Prepared) -> str:
    """What server and client must have alike: every setting, and every weight of the frozen model."""
    return hashlib.sha256(path.read_bytes() + prepared.method.task.encoder.fingerprint.encode()).hexdigest()


def choose_experiment(folder: Path, name: str | None) -> Path:
    found = {path.stem: path for path in sorted((folder / "experiments").glob("*.toml"))}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        raise FedVLError(f"Say which experiment with --experiment: {', '.join(found) or 'there is none'}.")
    return found[name]


def read_json(path: Path, model: type[Model], hint: str) -> Model:
    try:
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} is not there or damaged; {hint}") from error


# --- processes


class Process:
    """One of Flower's own processes, ended with this one however it ends."""

    def __init__(self, command: str, options: list[str], folder: Path, **environment: str) -> None:
        folder.mkdir(exist_ok=True, mode=0o700)
        self.log = folder / f"{command}.log"
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "fedvl.deployment.flower", command, str(os.getpid()), *options],
                env={**os.environ, "FLWR_HOME": str(folder.absolute()), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C of the terminal is for us; we end it
            )

    @property
    def ended(self) -> bool:
        return self.popen.poll() is not None

    def stop(self) -> None:
        self.popen.terminate()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Link(BaseModel):
    """How to reach the SuperLink of a federation, for the server's processes only."""

    address: str
    secret: str
    nodes: tuple[int, ...]  # by client


@contextmanager
def opened_link(folder: Path, federation: FederationFile) -> Iterator[Link]:
    """The SuperLink of this folder: started by the first run that needs it, and ended by that run after the last."""
    with open(folder / ".link", "w", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                fcntl.flock(lock, fcntl.LOCK_SH)  # another run has it, or is starting it
                if (folder / "link.json").is_file():
                    yield Link.model_validate_json((folder / "link.json").read_bytes())
                    return
                fcntl.flock(lock, fcntl.LOCK_UN)
        (folder / "link.json").unlink(missing_ok=True)
        with started_link(folder, federation) as link:
            write_private(folder / "link.json", link.model_dump_json().encode())
            fcntl.flock(lock, fcntl.LOCK_SH)
            try:
                yield link
            finally:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until no other run uses it
                (folder / "link.json").unlink()


@contextmanager
def started_link(folder: Path, federation: FederationFile) -> Iterator[Link]:
    secret = secrets.token_hex(32)
    (folder / "secret").unlink(missing_ok=True)
    write_private(folder / "secret", secret.encode())
    options = [
        *("--host", federation.listen, "--port", str(federation.port), "--isolation", "process"),
        *("--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")),
        *("--ssl-keyfile", str(folder / "server.key"), "--superexec-auth-secret-file", str(folder / "secret")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]
    check_port_free(federation.listen, federation.port)
    process = Process("superlink", options, folder / "flower", **{flower().SECRET_VARIABLE: secret})
    try:
        wait_for_port(federation.port, process)
        address = f"{THIS_MACHINE}:{federation.port}"
        keys = [member.public_key.encode() for member in federation.parties]
        nodes = flower().register(address, (folder / "ca.crt").read_bytes(), secret, keys)
        yield Link(address=address, secret=secret, nodes=tuple(nodes))
    finally:
        process.stop()


def check_port_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise FedVLError(
                f"Cannot listen on {host}:{port} ({error.strerror}); end what does, or init with --port."
            ) from error


def wait_for_port(port: int, process: Process) -> None:
    end = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < end and not process.ended:
        try:
            socket.create_connection((THIS_MACHINE, port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise FedVLError(f"Flower's SuperLink did not start; {process.log} says why.")


@contextmanager
def held(path: Path) -> Iterator[IO[str]]:
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


# --- the server's machine


def begin_run(run_folder: Path, folder: Path, experiment: Path) -> None:
    """The experiment as all parties have it, the federation that runs it, and the name that its letters carry for good."""
    write_whole(run_folder / "config.toml", experiment.read_bytes())
    note = {"federation": str(folder.absolute()), "run": secrets.token_hex(16)}
    write_whole(run_folder / "federation.json", json.dumps(note).encode())


def complete_with_machines(run_folder: Path, display: Display) -> dict[str, Any]:
    """The result of a run between machines: read if it is finished, and else brought to its end."""
    if (run_folder / "result.json").is_file():
        return dict(json.loads((run_folder / "result.json").read_bytes()))
    note = json.loads((run_folder / "federation.json").read_bytes())
    folder = Path(note["federation"])
    federation = read_json(folder / "federation.json", FederationFile, "make it with fedvl federation init.")
    experiment = read_experiment(run_folder)
    prepared = prepare_test(experiment, display)
    prepared.engine.rows = [prepared.engine.rows[0][:0]] * len(federation.parties)  # nobody's data is here
    prepared.counts[:] = 0
    prepared.partition_note = "The parties hold their images; the server knows nothing of them."
    if prepared.method.role.trained_private:
        prepared.notes.append(
            "Accuracy is that of the shared tensors alone: what clients train for themselves stays there."
        )
    identity = Identity(note["run"], experiment_id(run_folder / "config.toml", prepared))
    names = [member.name for member in federation.parties]
    with opened_link(folder, federation) as link, ExitStack() as stack:
        with held(folder / ".begin"):
            authority = (folder / "ca.crt").read_bytes()
            post = stack.enter_context(
                flower().flower_run(link.address, authority, link.secret, dict(enumerate(link.nodes)))
            )
        engine = RemoteEngine(
            post,
            prepared.method,
            experiment.federation,
            len(names),
            identity,
            prepared.test.labels.device,
            lambda status: write_status(run_folder, {**status, "parties": names}),
        )
        wait_for_parties(engine, names, display)
        result = run_prepared(prepared, engine, run_folder, display)
        engine.finish(load(run_folder / "model.safetensors"), experiment.federation.rounds)
    return result


def prepare_test(experiment: Experiment, display: Display) -> Prepared:
    """All that the server needs: the classes, and images to test with. Its dataset's training images are not read."""

    def test_alone(name: str, root: Path | None) -> Dataset:
        dataset = open_dataset(name, root)
        return replace(dataset, splits={"train": dataset.splits["test"], "test": dataset.splits["test"]})

    whole = experiment.data.model_copy(update={"partition": "only:0"})
    opener = Opener(dataset=test_alone, model=load_model)
    return replace(prepare(experiment.model_copy(update={"data": whole}), display, opener), experiment=experiment)


def wait_for_parties(engine: RemoteEngine, names: list[str], display: Display) -> None:
    """Until all parties are connected, or the deadline is over and those that are make a quorum."""
    show = display.stage("Clients")
    end = time.monotonic() + engine.config.deadline
    while len(there := engine.post.connected()) < len(names):
        show(len(there), len(names))
        if time.monotonic() >= end:
            if len(there) >= engine.config.quorum:
                break
            missing = ", ".join(name for number, name in enumerate(names) if number not in there)
            raise FedVLError(
                f"Too few clients came in {engine.config.deadline:g} seconds; start those that are missing ({missing}), then resume."
            )
        time.sleep(0.2)
    show(len(there), len(names))


def write_status(run_folder: Path, status: dict[str, Any]) -> None:
    aside = run_folder / ".status.json.part"
    aside.write_text(json.dumps(status), encoding="utf-8")
    os.replace(aside, run_folder / "status.json")
