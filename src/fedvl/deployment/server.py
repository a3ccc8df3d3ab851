"""What runs on the server's machine: the rounds, with clients on other machines."""

import fcntl
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from fedvl.deployment.files import FederationFile, experiment_id, read_file
from fedvl.deployment.link import flower, opened_link
from fedvl.deployment.remote import Identity, RemoteEngine
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.experiment import run_rounds
from fedvl.preparation import Prepared, prepare
from fedvl.run_folder import RunFolder


def describe_federation(folder: Path) -> dict[str, str]:
    """Say which federation runs an experiment, and the name that its messages carry."""
    return {"federation": str(folder.absolute()), "run": secrets.token_hex(16)}


def complete_with_machines(folder: RunFolder, display: Display) -> dict[str, Any]:
    """Return the result of a run between machines; bring it to its end first."""
    if folder.finished:
        return folder.result
    assert folder.federation is not None
    place, experiment = Path(folder.federation["federation"]), folder.experiment
    federation = read_file(place / "federation.json", FederationFile, "make it with fedvl federation init.")
    prepared = prepare_server(folder, display)
    identity = Identity(folder.federation["run"], experiment_id(experiment, prepared.method.task.encoder))
    names = [member.name for member in federation.parties]
    with opened_link(place, federation) as link, ExitStack() as stack:
        with held(place / ".begin"):
            authority = (place / "ca.crt").read_bytes()
            transport = stack.enter_context(
                flower().flower_run(link.address, authority, link.secret, dict(enumerate(link.nodes)))
            )
        engine = RemoteEngine(
            transport,
            prepared.method,
            experiment.federation,
            len(names),
            identity,
            prepared.device,
            lambda status: folder.write_status({**status, "parties": names}),
        )
        wait_for_parties(engine, names, display)
        result = run_rounds(folder, prepared, engine, display)
        engine.finish(folder.tensors()[0], experiment.federation.rounds)
    return result


def prepare_server(folder: RunFolder, display: Display) -> Prepared:
    """Prepare the classes, the method and the test; training images are the parties'."""
    prepared = prepare(folder.experiment, display, splits=("test",))
    note = "The parties hold their images; the server knows nothing of them."
    notes = prepared.notes
    if prepared.method.role.trained_private:
        kept = "Accuracy is that of the shared tensors alone: what clients train for themselves stays there."
        notes = [*notes, kept]
    return replace(prepared, notes=notes, training=replace(prepared.training, note=note))


def wait_for_parties(engine: RemoteEngine, names: list[str], display: Display) -> None:
    """Wait until all parties are connected, or the deadline is over and there is a quorum."""
    show = display.stage("Clients")
    end = time.monotonic() + engine.config.deadline
    while len(there := engine.transport.connected()) < len(names):
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


@contextmanager
def held(path: Path) -> Iterator[IO[str]]:
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
