"""Flower's own processes, and the SuperLink that the runs of one federation share."""

import fcntl
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

from fedvl.config import FederationConfig, read_toml
from fedvl.deployment.files import THIS_MACHINE, FederationFile
from fedvl.deployment.keys import days_left, write_private
from fedvl.errors import FedVLError

# Read by Flower when it is imported or started: nothing phones home, nothing is installed.
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
ENVELOPE_BYTES = 2**16  # Flower's, and our header
ENDING_SECONDS = 10
STARTING_SECONDS = 60.0  # for the SuperLink's port to open


def flower() -> ModuleType:
    """Import the one module that imports flwr, with Flower's switches set.

    What Flower's processes say to each other on this machine goes through no proxy.
    """
    os.environ.update(SWITCHES)
    direct = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if THIS_MACHINE not in direct.split(","):
        os.environ["no_proxy"] = f"{direct},{THIS_MACHINE}".lstrip(",")
    from fedvl.deployment import flower

    return flower


class Process:
    """One of Flower's own processes, which ends with this one however it ends."""

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
            self.popen.wait(ENDING_SECONDS)  # a SuperLink waits for connections that clients keep open
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Link(BaseModel):
    """How to reach the SuperLink of a federation, for the server's processes only."""

    address: str
    secret: str
    nodes: dict[int, int]  # by client, of those who are admitted


@contextmanager
def opened_link(folder: Path, federation: FederationFile) -> Iterator[Link]:
    """Share the SuperLink of a folder: the first run starts it and ends it after the last."""
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
    if days_left(folder / "server.crt") < 0:
        raise FedVLError(f"The server's certificate has expired; make it anew with fedvl federation renew {folder}.")
    secret = secrets.token_hex(32)
    (folder / "secret").unlink(missing_ok=True)
    write_private(folder / "secret", secret.encode())
    options = [
        *("--host", federation.listen, "--port", str(federation.listen_port), "--isolation", "process"),
        *("--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")),
        *("--ssl-keyfile", str(folder / "server.key"), "--superexec-auth-secret-file", str(folder / "secret")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]
    check_port_free(federation.listen, federation.listen_port)
    process = Process(
        "superlink", options, folder / "flower", **flower().door_settings(folder, secret, most_bytes(folder))
    )
    try:
        wait_for_port(federation.listen_port, process)
        address = f"{THIS_MACHINE}:{federation.listen_port}"
        keys = [member.public_key.encode() for member in federation.admitted.values()]
        nodes = flower().register(address, (folder / "ca.crt").read_bytes(), secret, keys)
        yield Link(address=address, secret=secret, nodes=dict(zip(federation.admitted, nodes, strict=True)))
    finally:
        process.stop()


def most_bytes(folder: Path) -> int:
    """Return what a message may have in any of the federation's experiments, with its envelope."""
    settings = [read_toml(path) for path in folder.glob("experiments/*.toml")]
    return ENVELOPE_BYTES + max(FederationConfig(**found["federation"]).max_message_bytes for found in settings)


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
