"""Measure seconds per round between processes on one machine: ours, Flower's floor and bare Flower.

    python -m benchmarks.deployment [--rounds 5] [--json]

One SuperLink and three SuperNodes each time, on loopback. Ours: FST-CBDG on cifar10-mini with TLS
and node keys. The floor, set by Flower's polling: the same processes, with clients that send an
empty reply. Bare Flower: its default processes and FedAvg over a NumPy model of the same size, no
TLS, no keys; once as it is and once with its task polling at 0.05 s. A round of ours does more
(training on 2,000 images, checks, journal); everything is measured in one run, one after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.link import SWITCHES, flower, most_bytes, opened_link
from fedvl.deployment.membership import create, read_federation
from fedvl.deployment.messages import Header, Message
from fedvl.deployment.supervisor import free_port

NAMES = ["a", "b", "c"]
APP = Path(__file__).parent / "flower_numpy"


@contextmanager
def process(*words: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "ab") as file:
        popen = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, **SWITCHES, **environment})
    try:
        yield popen
    finally:
        popen.terminate()
        try:
            popen.wait(15)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


def describe(began: float, times: list[float], **more: Any) -> dict[str, Any]:
    """Return start-up and round times; ``times`` is when the first round began and each ended."""
    rounds = [later - earlier for earlier, later in pairwise(times)]
    return {"start_up": times[0] - began, "median_round": statistics.median(rounds), "rounds": rounds, **more}


def federation(folder: Path, rounds: int) -> Path:
    settings = {"method": {"name": "fst-cbdg"}, "federation": {"rounds": rounds, "threads": 1}}
    create(folder, NAMES, "127.0.0.1", free_port(), resolve_for_parties(settings, len(NAMES)))
    return folder


def ours(folder: Path, rounds: int) -> dict[str, Any]:
    clinic, run = federation(folder / "ours", rounds), folder / "run"
    began = time.time()
    words = [sys.executable, "-m", "fedvl.cli"]
    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(process(*words, "client", str(clinic / "parties" / name), log=folder / f"{name}.log"))
        server = stack.enter_context(
            process(*words, "server", str(clinic), "--out", str(run), "--quiet", log=folder / "server.log")
        )
        ends: list[float] = []
        while server.poll() is None and len(ends) < rounds:
            committed = len(list(run.glob("journal/*.json")))
            ends += [time.time()] * (committed - len(ends))
            time.sleep(0.02)
        if server.wait():
            raise SystemExit((folder / "server.log").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = ends[0] - records[0]["seconds"]
    traffic = {name: statistics.median(record[name] for record in records) for name in ("bytes_up", "bytes_down")}
    return describe(began, [first, *ends], **traffic)


def echo(party: str, port: str) -> None:
    """Run a client that returns every message unchanged."""
    from fedvl.deployment.supervisor import Supervised

    folder = Path(party)
    secret = folder / "state" / "secret"
    secret.write_text("0" * 64)
    server = json.loads((folder / "party.json").read_bytes())["server"]
    node = Supervised(folder, server, int(port), secret, most_bytes(folder))
    try:
        flower().answer_messages(f"127.0.0.1:{port}", "0" * 64, lambda message: message, node.check)
    finally:
        node.process.stop()


def floor(folder: Path, rounds: int) -> dict[str, Any]:
    clinic = federation(folder / "floor", rounds)
    began = time.time()
    with ExitStack() as stack:
        for name in NAMES:
            words = [sys.executable, "-m", "benchmarks.deployment", "--echo", str(clinic / "parties" / name)]
            stack.enter_context(process(*words, str(free_port()), log=folder / f"floor-{name}.log"))
        known = read_federation(clinic)
        link = stack.enter_context(opened_link(clinic, known))
        nodes = link.nodes
        authority = (clinic / "ca.crt").read_bytes()
        transport = stack.enter_context(flower().flower_run(link.address, authority, link.secret, nodes))
        while len(transport.connected()) < len(NAMES):
            time.sleep(0.1)
        times = [time.time()]
        for _ in range(rounds):
            waiting = set(
                transport.send(
                    {
                        client: Message(
                            Header(run="0", experiment="0", round=0, attempt=0, kind="train", client=client)
                        )
                        for client in nodes
                    },
                    60,
                )
            )
            while waiting:
                waiting -= {ticket for ticket, _, _ in transport.collect(waiting)}
                time.sleep(0.02)
            times.append(time.time())
    return describe(began, times)


def bare(folder: Path, rounds: int, name: str, **environment: str) -> dict[str, Any]:
    home, times = folder / name, folder / f"{name}.times"
    home.mkdir()
    port, scripts = free_port(), Path(sys.executable).parent
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        "FLWR_HOME": str(home),
        "ROUND_TIMES": str(times),
        "PATH": f"{scripts}:{os.environ['PATH']}",
        **environment,
    }
    began = time.time()
    with ExitStack() as stack:
        link = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
        link.append("--disable-runtime-dependency-installation")
        stack.enter_context(process(*link, log=folder / f"{name}.log", **environment))
        for _ in NAMES:
            node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            stack.enter_context(process(*node, log=folder / f"{name}.log", **environment))
        command = ["flwr", "run", str(APP), "here", "--run-config", f"rounds={rounds}"]
        while subprocess.run(command, env={**os.environ, **SWITCHES, **environment}, capture_output=True).returncode:
            time.sleep(0.5)  # until the SuperLink is up
        while not times.exists() or len(times.read_text().splitlines()) <= rounds:
            time.sleep(0.1)
    return describe(began, [float(line) for line in times.read_text().splitlines()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        return echo(*arguments.echo)
    with TemporaryDirectory() as name:
        folder = Path(name)
        measured = {
            "ours": ours(folder, arguments.rounds),
            "floor": floor(folder, arguments.rounds),
            "bare Flower": bare(folder, arguments.rounds, "bare"),
            "bare Flower, polling 0.05 s": bare(
                folder, arguments.rounds, "polling", FLWR_SUPEREXEC_TASK_POLL_INTERVAL="0.05"
            ),
        }
    load = os.getloadavg()
    if arguments.json:
        print(json.dumps({"load": load, **measured}))
        return None
    print(f"load {load[0]:.1f}; seconds")
    for name, figures in measured.items():
        rounds = " ".join(f"{seconds:.2f}" for seconds in figures["rounds"])
        print(
            f"{name:28} start-up {figures['start_up']:6.1f}   median round {figures['median_round']:6.2f}   ({rounds})"
        )
    print(f"bytes a round, ours: {measured['ours']['bytes_up']:.0f} up, {measured['ours']['bytes_down']:.0f} down")
    return None


if __name__ == "__main__":
    main()
