"""Kill the processes of a federation between machines, and cut a connection, on this machine.

``benchmarks.faults`` calls it. Three parties with TLS and keys, FST-CBDG, whose clients keep private
tensors. Each run is killed several times, always the same kind of process: the server, Flower's
SuperLink, a party, or a party's SuperNode. A server is resumed and a party started again, as its
operator would; nothing else is done. Then the run's tensors are compared with those of the same
experiment in one process, without the clients that the run's record says were dropped.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedvl.commands.federation import status
from fedvl.config import Experiment
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.supervisor import free_port
from fedvl.errors import FedVLError
from fedvl.tensors import digest, load
from tests.helpers.kills import draw_images
from tests.helpers.machines import (
    Wire,
    alone,
    clients_at_work,
    committed,
    dropped,
    kill,
    make_federation,
    of_folder,
    redirect,
    resume,
    start_client,
    start_server,
    wait_until,
)

NAMES = ["north", "south", "west"]
ROUNDS, KILLS_A_RUN = 5, 4
DEADLINE = 15  # seconds
AGAIN_SECONDS = 15.0  # between two starts of the same party
LINK_SECONDS = 3.0  # that a server waits for its own SuperLink, 30 for users
METHOD = "fst-cbdg"
VICTIMS = ("server", "link", "party", "SuperNode")


@dataclass
class Outcome:
    """What became of the runs in which one kind of process was killed."""

    kills: int = 0
    runs: int = 0
    same: int = 0  # runs with the bits of the undisturbed run
    dropped: int = 0  # other runs with the bits of a run without the clients that the record names
    resumed: int = 0  # times that a server was started again
    restarted: int = 0  # times that a party was started again


def small_experiment(images: Path, **federation: Any) -> Experiment:
    """Clients train one in a kernel, as between machines, so that the bits are the same."""
    settings = {
        "device": "cpu",
        "method": {"name": METHOD},
        "data": {"dataset": str(images), "partition": "iid"},
        "federation": {"rounds": ROUNDS, "threads": 1, "chunk": 1, "deadline": DEADLINE, **federation},
    }
    return resolve_for_parties(settings, len(NAMES))


class Operators:
    """Start again what was killed, and what ended because of it, until the run is over."""

    def __init__(self, place: SimpleNamespace, run: Path, outcome: Outcome) -> None:
        self.place, self.run, self.outcome = place, run, outcome
        self.server = start_server(place, METHOD, run, LINK_SECONDS=LINK_SECONDS)
        self.started = dict.fromkeys(NAMES, 0.0)

    @property
    def over(self) -> bool:
        return (self.run / "result.json").is_file() and self.server.poll() is not None

    def look(self) -> None:
        if self.server.poll() is not None and not (self.run / "result.json").is_file():
            self.server = resume(self.run, LINK_SECONDS=LINK_SECONDS)
            self.outcome.resumed += 1
        for name, client in self.place.clients.items():
            if client.poll() is not None and time.monotonic() - self.started[name] > AGAIN_SECONDS:
                start_client(self.place, name)
                self.started[name] = time.monotonic()
                self.outcome.restarted += 1

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.over:
            self.look()
            time.sleep(0.1)

    def victims(self, kind: str, generator: random.Random) -> list[int]:
        """The processes of one machine of this kind that run now."""
        name = generator.choice(NAMES)
        if kind == "server":
            return [self.server.pid] if self.server.poll() is None else []
        if kind == "link":
            return of_folder(self.place.folder, "superlink")
        if kind == "party":
            return [self.place.clients[name].pid] if self.place.clients[name].poll() is None else []
        return of_folder(self.place.folder / "parties" / name, "supernode")


def kill_machines(kills: int, work: Path) -> dict[str, Outcome]:
    """Split kills among the kinds of processes and return the outcome of each."""
    os.environ["FEDVL_CACHE"] = str(work / "cache")
    experiment = small_experiment(draw_images(work))
    folder = make_federation(work / "clinic", {name: [experiment] for name in NAMES})
    undisturbed = digest(alone(experiment).shared)
    outcomes = {victim: Outcome() for victim in VICTIMS}
    most = kills // len(VICTIMS)
    with clients_at_work(folder, NAMES) as place:
        while (outcome := min(outcomes.values(), key=lambda outcome: outcome.kills)).kills < most:
            kind = next(kind for kind, found in outcomes.items() if found is outcome)
            run = work / f"{kind}-{outcome.runs}"
            kill_one_run(place, run, kind, min(KILLS_A_RUN, most - outcome.kills), outcome)
            expected = digest(alone(experiment, dropped(run)).shared)
            equal = digest(load(run / "model.safetensors")) == expected
            outcome.runs += 1
            outcome.same += equal and expected == undisturbed
            outcome.dropped += equal and expected != undisturbed
            print(f"{kind}: {outcome}; dropped {dropped(run)}", file=sys.stderr, flush=True)
    return outcomes


def kill_one_run(place: SimpleNamespace, run: Path, kind: str, most: int, outcome: Outcome) -> None:
    generator = random.Random(str(run.name))
    operators = Operators(place, run, outcome)
    try:
        wait_until(lambda: (run / "config.toml").is_file(), operators.server)
        for _ in range(most):
            operators.wait(generator.uniform(2, 9))
            found = operators.victims(kind, generator)
            if operators.over or not found:
                continue
            kill(*found)
            outcome.kills += 1
        operators.wait(600)
        assert operators.over, f"{run} does not end"
    finally:
        if operators.server.poll() is None:
            operators.server.send_signal(signal.SIGTERM)
            operators.server.wait()


def cut_for_a_minute(work: Path) -> dict[str, Any]:
    """Cut one party's connection for a minute in the middle of a run that waits for it."""
    os.environ["FEDVL_CACHE"] = str(work / "cache")
    experiment = small_experiment(draw_images(work), deadline=300, quorum=len(NAMES))
    folder = make_federation(work / "cut", {name: [experiment] for name in NAMES})
    run, port = work / "minute", free_port()
    with Wire(port, redirect(folder, NAMES[1], port)) as wire, clients_at_work(folder, NAMES) as place:
        operators = Operators(place, run, Outcome())
        while not committed(run):
            operators.wait(0.5)
        wire.cut()
        operators.wait(60)
        wire.mend()
        operators.wait(600)
    left = dropped(run)
    expected = digest(alone(experiment, left).shared)
    return {
        "ended": operators.over,
        "dropped": left,
        "same": digest(load(run / "model.safetensors")) == expected,
        "resumed": operators.outcome.resumed,
        "restarted": operators.outcome.restarted,
    }


@contextmanager
def watched(work: Path) -> Iterator[dict[str, Any]]:
    """Ask for the status of the newest runs in a loop meanwhile, in a process of its own."""
    told: dict[str, Any] = {}
    command = [sys.executable, "-m", "benchmarks.machine_faults", str(work)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield told
    finally:
        process.send_signal(signal.SIGTERM)
        polls, failures, *reasons = process.communicate()[0].splitlines()
        told.update(polls=int(polls), failures=int(failures), reasons=reasons)


def watch(work: Path) -> None:
    """Poll until SIGTERM; print the number of polls, of failures, and what these were."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    polls, failures = 0, list[str]()
    try:
        while True:
            for run in sorted((path.parent for path in work.glob("*/.lock")), key=lambda path: path.stat().st_mtime)[
                -2:
            ]:
                described = (run / "config.toml").is_file()  # before that, it says that there is no run yet
                try:
                    with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
                        status(run)
                except Exception as error:
                    if described or not isinstance(error, FedVLError):
                        failures.append(f"{type(error).__name__}: {error}")
                polls += 1
            time.sleep(0.05)
    finally:
        print(polls, len(failures), *sorted(set(failures))[:5], sep="\n")


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
