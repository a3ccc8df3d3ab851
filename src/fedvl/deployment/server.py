"""What runs on the server's machine: the rounds, with clients on other machines."""

import fcntl
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

import torch

from fedvl.deployment.audit_log import LOG_FILE, AuditLog, participation_of
from fedvl.deployment.extras import check_extras
from fedvl.deployment.files import FederationFile, experiment_id
from fedvl.deployment.keys import days_left
from fedvl.deployment.link import flower, opened_link
from fedvl.deployment.membership import absence_explained, read_federation
from fedvl.deployment.remote import WAITING, Identity, RemoteEngine
from fedvl.display import Display
from fedvl.errors import FedVLError
from fedvl.methods.mistakes import explained
from fedvl.runs.contents import Federation, Result, Status
from fedvl.runs.experiment import run_rounds
from fedvl.runs.folder import RunFolder
from fedvl.runs.preparation import Prepared, prepare

RETURN_SECONDS = 60.0  # for parties to come, whatever the deadline: a SuperNode returns within 30 to a new SuperLink


def federation_summary(folder: Path) -> Federation:
    """Say which federation runs an experiment, and the name that its messages carry."""
    return Federation(federation=str(folder.absolute()), run=secrets.token_hex(16))


def complete_with_machines(folder: RunFolder, display: Display) -> Result:
    """Return the result of a run between machines; first bring it to its end and tell all."""
    assert folder.federation is not None
    place, experiment = Path(folder.federation.federation), folder.experiment
    if folder.finished and not place.is_dir():  # the federation was given up; the run is what it is
        return folder.result
    federation = read_federation(place)
    told = set(folder.federation.told)
    if folder.finished and told >= federation.admitted.keys():
        return folder.result
    with connected(folder, display) as (engine, prepared):
        names = list(engine.names)
        if folder.finished:  # it ended before all had heard of it
            wait_for_parties(engine, names, federation.admitted.keys() - told, RETURN_SECONDS, quorum=0)
        else:
            wait_for_all(engine, federation)
            participants = partial(participation_of, place, folder, names)
            run_rounds(folder, prepared, engine, display, secrets.randbits(256), participants)
        told |= engine.finish(folder.tensors()[0], experiment.federation.rounds, told)
        folder.write_federation(folder.federation.model_copy(update={"told": sorted(told)}))
    return folder.result


@contextmanager
def connected(folder: RunFolder, display: Display, notes: str = "sums.json") -> Iterator[tuple[RemoteEngine, Prepared]]:
    """Connect to the clients of a run; ``notes``: the file of the state of its secure sums."""
    assert folder.federation is not None
    place, experiment = Path(folder.federation.federation), folder.experiment
    federation = read_federation(place)
    if not federation.admitted:
        raise FedVLError(
            "No party has been admitted; each runs fedvl federation join, and you fedvl federation admit its request."
        )
    check_extras(experiment, experiment.data.dataset)
    with ExitStack() as stack:
        if experiment.federation.secure_sum:
            stack.enter_context(absence_explained(place))
        tried = stack.enter_context(explained(experiment.method.name))
        prepared = prepare_server(folder, display)
        tried.method, tried.samples = prepared.method, prepared.test.samples
        identity = Identity(folder.federation.run, experiment_id(experiment, prepared.method.task.encoder))
        log = AuditLog(place / LOG_FILE)
        log.append("run", run=identity.run, experiment=identity.experiment)
        names = [member.name for member in federation.parties]
        shown = Status(
            parties=names,
            certificate_days=days_left(place / "server.crt"),
            test_images=len(prepared.test.samples),
        )

        def notify(status: Status) -> None:
            folder.write_status(shown.joined(status))
            if status.phase == WAITING:
                display.waiting(f"Waiting for {', '.join(names[number] for number in status.waiting_for)}.")

        link = stack.enter_context(opened_link(place, federation))
        with held(place / ".begin"):
            authority = (place / "ca.crt").read_bytes()
            transport = stack.enter_context(flower().flower_run(link.address, authority, link.secret, link.nodes))
        engine = RemoteEngine(
            transport,
            prepared.method,
            experiment.federation,
            len(names),
            identity,
            prepared.device,
            notify,
            folder.path / notes,
            {number: member.certificate for number, member in federation.admitted.items()},
            log,
            names,
        )
        stack.callback(note_rounds, log, identity.run, folder)
        yield engine, prepared


def wait_for_all(engine: RemoteEngine, federation: FederationFile) -> None:
    """Wait for all admitted clients; after the deadline, a quorum is enough."""
    seconds = max(engine.config.deadline, RETURN_SECONDS)
    wait_for_parties(engine, list(engine.names), federation.admitted, seconds, engine.quorum)


def note_rounds(log: AuditLog, run: str, folder: RunFolder) -> None:
    """Write the committed rounds into the log that it lacks: who was refused, what was spent."""
    noted = {entry["round"] for entry in log.entries("round") if entry["run"] == run}
    for record in folder.rounds:
        if record.round not in noted:
            spent = {"budget": record.privacy.to_dict()} if record.privacy else {}
            refused = [each.to_dict() for each in record.refused]
            log.append("round", run=run, round=record.round, refused=refused, **spent)


def prepare_server(folder: RunFolder, display: Display) -> Prepared:
    """Prepare the classes, the method and the test; training images are the parties'."""
    torch.set_num_threads(folder.experiment.federation.threads)  # text features depend on it too
    prepared = prepare(folder.experiment, display, splits=("test",))
    note = "The parties hold their images; the server knows nothing of them."
    notes = prepared.notes
    if prepared.method.role.trained_private:
        kept = "Accuracy is that of the shared tensors alone: what clients train for themselves stays there."
        notes = [*notes, kept]
    return replace(prepared, notes=notes, training=replace(prepared.training, note=note))


def wait_for_parties(
    engine: RemoteEngine, names: list[str], awaited: Collection[int], seconds: float, quorum: int
) -> None:
    """Wait until these parties are connected, or time is up and there is a quorum."""
    end, told = time.monotonic() + seconds, None
    while missing := sorted(set(awaited) - (there := engine.transport.connected())):
        if missing != told:
            engine.notify(Status(phase=WAITING, waiting_for=missing, connected=sorted(there)))
            told = missing
        if time.monotonic() >= end:
            if len(awaited) - len(missing) >= quorum:
                return
            absent = ", ".join(names[number] for number in missing)
            raise FedVLError(
                f"Too few clients came in {seconds:g} seconds; start those that are missing ({absent}), then resume."
            )
        time.sleep(0.2)


@contextmanager
def held(path: Path) -> Iterator[IO[str]]:
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
