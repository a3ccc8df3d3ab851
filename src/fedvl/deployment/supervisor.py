"""Keep a client's SuperNode running: restart it when it ends, and say why it cannot connect."""

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from fedvl.deployment.connection import UnreachableError, reach, read_authorities
from fedvl.deployment.link import Process, flower
from fedvl.deployment.membership import KEY
from fedvl.deployment.state import state_folder
from fedvl.errors import FedVLError
from fedvl.files import write_whole

PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 40.0  # before a SuperNode that ended is started again
SHORT_SECONDS, MAX_SHORT = 60.0, 10  # give up after this many lives in a row, each shorter than this
WATCH_SECONDS = 8.0  # between looks at the server; with the time of one look, a person hears of a problem within 15
AUTHORITIES = "authorities.crt"


class Watch(Thread):
    """Look at the server as long as the client runs: say what is wrong with the connection, once.

    A SuperNode waits without a word, and a client that encodes or trains does not look at its
    SuperNode. The first look is made before anything else; it raises a problem that waiting does
    not mend.
    """

    def __init__(
        self, folder: Path, address: str, say: Callable[[str], None] = print, bundle: Path | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.folder, self.address, self.say = folder, address, say
        self.key, self.certificates = state_folder(folder) / KEY, folder / "ca.crt"
        self.authorities = read_authorities(self.certificates)
        if bundle is not None:
            self.authorities += read_authorities(bundle)
            self.certificates = state_folder(folder) / AUTHORITIES
            write_whole(self.certificates, self.authorities.encode())
        self.lasting: UnreachableError | None = None  # a problem that waiting does not mend
        self.version = ""  # of FedVL at the server
        self.told = ""
        self.over = Event()

    def __enter__(self) -> "Watch":
        sentence = self._look()
        if self.lasting is not None:
            raise self.lasting
        self._tell(sentence)
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()

    def run(self) -> None:
        while self.lasting is None and not self.over.wait(WATCH_SECONDS):
            self._tell(self._look())

    def _look(self) -> str:
        try:
            reached = reach(self.address, self.authorities, self.key)
        except UnreachableError as error:
            self.lasting = error if error.lasting else None
            return str(error) if error.lasting else f"{error} Trying again."
        self.version = reached.version
        return f"Connected through the proxy {reached.proxy}." if reached.proxy else "Connected."

    def _tell(self, sentence: str) -> None:
        if sentence != self.told and not self.over.is_set():
            self.say(sentence)
            self.told = sentence


class Supervised:
    """The SuperNode of this machine, restarted when it ends, as the server may have been."""

    def __init__(self, watch: Watch, port: int, secret_file: Path, most_bytes: int) -> None:
        self.watch, self.most_bytes = watch, most_bytes
        self.options = [
            *("--superlink", watch.address, "--port", str(port), "--isolation", "process"),
            *("--root-certificates", str(watch.certificates)),
            *("--auth-supernode-private-key", str(watch.key)),
            *("--superexec-auth-secret-file", str(secret_file)),
        ]
        self.short_lives, self.not_before = 0, 0.0
        self._start()

    def _start(self) -> None:
        limits = flower().node_settings(self.most_bytes)
        self.process = Process("supernode", self.options, state_folder(self.watch.folder) / "flower", **limits)
        self.began = time.monotonic()

    def connected(self) -> None:
        """Forget earlier exits, so that a server between two runs does not count as a failure."""
        self.short_lives = 0

    def check(self) -> bool:
        """Restart a SuperNode that ended, with exponential backoff; raise a lasting problem."""
        if self.watch.lasting is not None:
            raise self.watch.lasting
        if self.process.ended and time.monotonic() >= self.not_before:
            self.short_lives = self.short_lives + 1 if time.monotonic() - self.began < SHORT_SECONDS else 0
            if self.short_lives >= MAX_SHORT:
                raise FedVLError(f"It cannot stay connected. {self.process.log} has the details.")
            self._start()
            self.not_before = self.began + min(PAUSE_SECONDS * 2**self.short_lives, MAX_PAUSE_SECONDS)
        return True

    def stop(self) -> None:
        self.process.stop()


def free_port() -> int:
    """Return a port that is free, and stays so until it is bound: systems give out higher ones."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
