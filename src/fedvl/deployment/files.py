"""The folders of a federation between machines.

    DIR/federation.json   who takes part, the address, the classes
    DIR/server.crt .key   of the server; ca.key signs, keep it safe
    DIR/experiments/      NAME.toml: what may be run
    DIR/parties/NAME/     a folder to hand to each party

A client's folder has the authority's certificate, party.json and the experiments: it takes part in
these and no other. Its key, private tensors, log and runs are in ``state/`` there (``state.py``).
"""

import hashlib
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedvl.config import Experiment, Settings
from fedvl.data.imported import ImportedEncoder
from fedvl.errors import FedVLError
from fedvl.files import MAX_JSON
from fedvl.files import read_file as read_regular
from fedvl.methods import load_method
from fedvl.models.clip import DualEncoder
from fedvl.models.vilt import FusedEncoder
from fedvl.runs.requirements import rule_between_machines
from fedvl.runs.settings import resolve_experiment

THIS_MACHINE = "127.0.0.1"
LOOPBACK = (THIS_MACHINE, "localhost")
Model = TypeVar("Model", bound=BaseModel)
ParticipantName = Annotated[
    str, Field(pattern=r"^\w[\w.-]{0,63}$")
]  # of a client: a folder's name, and that of a certificate


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Participant(Frozen):
    name: ParticipantName
    public_key: str = ""  # as one line of OpenSSH; empty until the party is admitted, and once it is revoked
    certificate: str = ""  # of this key, by the federation's authority


class FederationFile(Frozen):
    host: str  # by which clients reach the server, as is the port
    port: int
    listens: Annotated[str, Field(pattern=r"^((127\.0\.0\.1:)?[0-9]{1,5})?$")] = (
        ""  # behind another's port; "": on its own
    )
    parties: tuple[Participant, ...]
    class_names: tuple[str, ...]
    templates: dict[str, tuple[str, ...]]

    @property
    def admitted(self) -> dict[int, Participant]:
        """The parties that may take part, by their number."""
        return {number: member for number, member in enumerate(self.parties) if member.public_key}

    @property
    def listen(self) -> str:
        """The address to listen on: all of the machine's, unless the federation is within it."""
        return THIS_MACHINE if self.host in LOOPBACK or ":" in self.listens else "0.0.0.0"

    @property
    def listen_port(self) -> int:
        return int(self.listens.rpartition(":")[2] or self.port)


class PartyFile(Frozen):
    name: ParticipantName
    number: Annotated[int, Field(ge=0)]
    names: tuple[ParticipantName, ...]  # of all clients, by number
    server: Annotated[str, Field(pattern=r"^[\w\[][\w.:\[\]-]*:[0-9]{1,5}$")]  # host:port
    class_names: tuple[str, ...]
    templates: dict[str, tuple[str, ...]]

    @model_validator(mode="after")
    def check_names(self) -> "PartyFile":
        if self.names[self.number : self.number + 1] != (self.name,) or len(set(self.names)) < len(self.names):
            raise ValueError("the client's name is not at its number in the list of names")
        return self

    @property
    def on_this_machine(self) -> bool:
        """Whether the server is on the loopback, as the clients of a rehearsal are."""
        return self.server.rpartition(":")[0] in LOOPBACK


def add_experiment(folder: Path, experiment: Experiment) -> None:
    (folder / "experiments").mkdir(exist_ok=True)
    path = folder / "experiments" / f"{experiment.method.label}.toml"
    path.write_bytes(experiment.to_toml().encode())


def choose_experiment(folder: Path, name: str | None) -> Path:
    found = {path.stem: path for path in sorted((folder / "experiments").glob("*.toml"))}
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise FedVLError(f"There is no federation in {folder}; make one with fedvl federation init {folder}.")
    if name not in found:
        raise FedVLError(f"Say which experiment with --experiment: {', '.join(found)}.")
    return found[name]


def resolve_for_parties(settings: Settings, clients: int) -> Experiment:
    """Resolve settings as parties can run them that do not see each other's data."""
    refuse_method_file(settings)
    experiment = resolve_experiment({**settings, "data": {**settings.get("data", {}), "clients": clients}})
    method = load_method(experiment.method.name)
    if method.scope == "pooled":
        raise FedVLError(f"Method '{experiment.method.name}' pools all data in one place; it is for fedvl run only.")
    if experiment.federation.attack is not None:
        raise FedVLError("Attacks are simulated in one process, by fedvl run; leave --attack out.")
    if experiment.data.newcomers:
        raise FedVLError("Newcomers are simulated in one process, by fedvl run; leave data.newcomers out.")
    if experiment.data.label_noise is not None:
        raise FedVLError("Wrong labels are simulated in one process, by fedvl run; leave data.label_noise out.")
    if experiment.training.start_from is not None:
        raise FedVLError(
            "A start from a finished run is of one machine, by fedvl run, and parties do not have it; leave "
            "training.start_from out."
        )
    if experiment.federation.robust == "root":
        raise FedVLError("Between machines the server has no training images for --robust root; use another rule.")
    if experiment.data.labels == "cps":
        raise FedVLError(
            "data.labels=cps needs all clients at once; use --method fedpp, which does it by messages, or fpl."
        )
    if experiment.evaluation.protocol in ("open", "base-to-new", "leave-one-domain-out"):
        what = "domains" if experiment.evaluation.protocol == "leave-one-domain-out" else "classes"
        raise FedVLError(
            f"The {experiment.evaluation.protocol} protocol assigns {what} to clients, which real parties bring along; "
            "use --protocol closed."
        )
    if experiment.evaluation.protocol == "personal":  # its private tensors stay home, and so does that query
        experiment = experiment.model_copy(
            update={"evaluation": experiment.evaluation.model_copy(update={"protocol": "closed"})}
        )
    if "robust" not in settings.get("federation", {}):
        rule = {"robust": rule_between_machines(method, experiment)}
        experiment = experiment.model_copy(update={"federation": experiment.federation.model_copy(update=rule)})
    return experiment


def refuse_method_file(settings: Settings) -> None:
    """Refuse a method that is a file before it is loaded: folders from others run no code."""
    if str(settings.get("method", {}).get("name", "")).endswith(".py"):
        raise FedVLError(
            "A federation between machines runs methods that all parties have installed, never a file; "
            "put it into the package."
        )


def experiment_id(experiment: Experiment, encoder: DualEncoder | FusedEncoder | ImportedEncoder) -> str:
    """Hash what all parties must share: every setting and the frozen model's weights."""
    return hashlib.sha256((experiment.to_toml() + encoder.fingerprint).encode()).hexdigest()


def read_model(path: Path, model: type[Model], hint: str) -> Model:
    try:
        return model.model_validate_json(read_regular(path, MAX_JSON))
    except (OSError, ValueError) as error:
        raise FedVLError(f"{path} is not there or damaged; {hint}") from error
