"""A federation of real processes on this machine: its folders, its commands, and what lies between client and server."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import torch

from fedvl.config import Experiment
from fedvl.deployment.files import add_experiment
from fedvl.deployment.membership import approve_experiment, create
from fedvl.deployment.supervisor import free_port
from fedvl.display import Silent
from fedvl.federation.round import Federation
from fedvl.federation.stacks import Trained
from fedvl.runs.experiment import local_engine
from fedvl.runs.preparation import prepare
from fedvl.seeding import torch_generator
from helpers.forker import Forked

Process = Forked | subprocess.Popen[bytes]
HOST = "127.0.0.1"
LATEST = (
    540  # seconds: no more than a guard, below the tests' own time-outs, on a machine that is busy with other tests
)


# --- folders and processes


def make_federation(folder: Path, experiments: dict[str, list[Experiment]], port: int | None = None) -> Path:
    """Make the folder of a federation whose parties each agreed to experiments of their own; the first is everyone's."""
    every = {experiment.method.label: experiment for agreed in experiments.values() for experiment in agreed}
    create(folder, list(experiments), HOST, port or free_port(), next(iter(every.values())))
    for experiment in every.values():
        add_experiment(folder, experiment)
    for name, agreed in experiments.items():
        for experiment in agreed:
            add_experiment(folder / "parties" / name, experiment)
            approve_experiment(folder / "parties" / name, experiment)
    return folder


def redirect(folder: Path, name: str, port: int) -> int:
    """Let a party reach the server by another port; return the server's own."""
    path = folder / "parties" / name / "party.json"
    told = json.loads(path.read_bytes())
    path.write_text(json.dumps({**told, "server": f"{HOST}:{port}"}), encoding="utf-8")
    return int(told["server"].rpartition(":")[2])


def fedvl(*words: object, log: Path, **constants: float) -> Forked:
    """Start a command; ``constants``, such as ``flower__LINK_SECONDS``, are other than they are for users."""
    with open(log, "ab") as file:
        return Forked([sys.executable, "-m", "fedvl.cli", *words], file, constants=constants)


def as_users_start(*words: object, log: Path) -> "subprocess.Popen[bytes]":
    """Start a command in a process that loads everything by itself."""
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "fedvl.cli", *map(str, words)],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


@contextmanager
def ended(processes: Sequence[Process]) -> Iterator[None]:
    """Whatever happens, each of these processes is gone afterwards; their children end with them."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def clients_at_work(folder: Path, names: list[str]) -> Iterator[SimpleNamespace]:
    """The clients of a federation as processes that stay; nothing is left of them afterwards."""
    place = SimpleNamespace(folder=folder, logs=folder.parent, clients={}, metrics={})
    for name in names:
        start_client(place, name)
    try:
        yield place
    finally:
        with ended(list(place.clients.values())):
            pass
    wait_until(lambda: not of_folder(folder / "parties"))


def start_client(place: SimpleNamespace, name: str) -> None:
    party = place.folder / "parties" / name
    port = place.metrics[name] = free_port()
    place.clients[name] = fedvl("client", party, "--stay", "--metrics", port, log=place.logs / f"{name}.log")


def of_folder(folder: Path, command: str = "") -> list[int]:
    """The processes, ours and Flower's, whose arguments name this folder, and this command if one is given."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_text().split("\0")
            here = any(str(folder) in word for word in words) and (not command or command in words)
            found += [int(path.parent.name)] * here
    return found


def kill(*processes: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait_until(condition: Callable[[], Any], *processes: Process) -> None:
    end = time.monotonic() + LATEST
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        assert all(process.poll() is None for process in processes), "a process ended"
        time.sleep(0.1)


def start_server(place: SimpleNamespace, experiment: str, run: Path, **constants: float) -> Forked:
    words = ("server", place.folder, "--experiment", experiment, "--out", run, "--quiet")
    return fedvl(*words, log=run.with_suffix(".log"), **constants)


def resume(run: Path, **constants: float) -> Forked:
    return fedvl("resume", run, "--quiet", log=run.with_suffix(".log"), **constants)


def committed(run: Path) -> int:
    return len(list(run.glob("journal/[0-9]*.json")))


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes())["record"] for path in sorted(run.glob("journal/[0-9]*.json"))]


def dropped(run: Path) -> list[tuple[int, int]]:
    """The clients that a run's record says were left out, each with the round (from 0)."""
    return [(client, record["round"] - 1) for record in records(run) for client in record["dropped"]]


def alone(experiment: Experiment, missing: Sequence[tuple[int, int]] = ()) -> Federation:
    """Run the same experiment in this process, without these clients in these rounds."""
    torch.set_num_threads(experiment.federation.threads)  # before texts are encoded, as runs do
    prepared = prepare(experiment, Silent())
    engine = local_engine(prepared)
    train = engine.train

    def answering(round_index: int, cohort: Sequence[int], *tensors: Any) -> Sequence[Trained]:
        return train(round_index, [client for client in cohort if (client, round_index) not in missing], *tensors)

    engine.train = answering  # type: ignore[method-assign, assignment]
    start = prepared.method.start(torch_generator(experiment.seed, "start"))
    federation = Federation(prepared.method, engine, experiment.federation, experiment.seed, start)
    federation.run()
    return federation


# --- what lies between a client and its server


class Request(NamedTuple):
    """A client's HTTP request, decrypted."""

    path: str
    size: int  # of all of it, head and body
    body: bytes


class Wire:
    """What carries a client's bytes to the server: it can be cut, and with the server's own key it reads them."""

    def __init__(self, port: int, target: int, certificates: Path | None = None) -> None:
        self.port, self.target = port, target
        self.said: list[bytearray] = []  # by connection: what the client sent
        self.outer = self.inner = None  # TLS towards the client, and towards the server
        if certificates is not None:
            self.outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self.outer.load_cert_chain(certificates / "server.crt", certificates / "server.key")
            self.inner = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        self.whole = asyncio.Event()
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        self.whole.set()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        started = asyncio.start_server(self._carry, HOST, self.port, ssl=self.outer)
        self.server = asyncio.run_coroutine_threadsafe(started, self.loop).result()
        return self

    def __exit__(self, *ignored: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def _end(self) -> None:
        self.server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self) -> None:
        """Carry nothing, as if packets were lost; what comes meanwhile is carried afterwards."""
        self.loop.call_soon_threadsafe(self.whole.clear)

    def mend(self) -> None:
        self.loop.call_soon_threadsafe(self.whole.set)

    def requests(self) -> list[Request]:
        """The HTTP requests that clients have sent whole."""
        found = []
        for said in self.said:
            left = bytes(said)
            while b"\r\n\r\n" in left:
                head, _, rest = left.partition(b"\r\n\r\n")
                first, *lines = head.decode("ascii").split("\r\n")
                fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                length = int(fields.get("content-length", 0))
                assert "transfer-encoding" not in fields, "its length is not known"
                found.append(Request(first.split(" ")[1], len(left) - len(rest) + length, rest[:length]))
                left = rest[length:]
        return found

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = bytearray()
        self.said.append(said)
        with suppress(asyncio.CancelledError):
            far_reader, far_writer = await self._reach()
            await asyncio.gather(self._pump(reader, far_writer, said), self._pump(far_reader, writer))

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            await self.whole.wait()
            try:
                return await asyncio.open_connection(HOST, self.target, ssl=self.inner)
            except OSError:  # no server yet: as if the first packet were lost
                await asyncio.sleep(0.2)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, said: bytearray | None = None
    ) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                await self.whole.wait()
                if said is not None:
                    said += data
                sink.write(data)
                await sink.drain()
        sink.close()
