"""Keep a client's SuperNode running: restart it when it ends, and explain why it cannot connect."""

import re
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

from fedvl.deployment.link import Process, flower
from fedvl.deployment.membership import KEY
from fedvl.deployment.state import state_of
from fedvl.errors import FedVLError

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 40.0  # before a SuperNode that ended is started again
SHORT_SECONDS, MOST_SHORT = 60.0, 10  # give up after this many lives in a row, each shorter than this
MOST_REFUSALS = 2  # the first may come from a server that is just starting


class Supervised:
    """The SuperNode of this machine, restarted when it ends, as the server may have been."""

    def __init__(self, folder: Path, server: str, port: int, secret_file: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.options = [
            *("--superlink", server, "--port", str(port), "--isolation", "process"),
            *("--root-certificates", str(folder / "ca.crt")),
            *("--auth-supernode-private-key", str(state_of(folder) / KEY)),
            *("--superexec-auth-secret-file", str(secret_file)),
        ]
        self.short_lives, self.not_before = 0, 0.0
        self._start()

    def _start(self) -> None:
        limits = flower().node_settings(self.most_bytes)
        self.process = Process("supernode", self.options, state_of(self.folder) / "flower", **limits)
        self.began = time.monotonic()

    def connected(self) -> None:
        """Forget earlier exits, so that a server between two runs does not count as a failure."""
        self.short_lives = 0

    def check(self) -> bool:
        """Restart a SuperNode that ended, with exponential backoff."""
        if self.process.ended and time.monotonic() >= self.not_before:
            self.short_lives = self.short_lives + 1 if time.monotonic() - self.began < SHORT_SECONDS else 0
            reason = refusal_in_log(self.process.log.read_text(encoding="utf-8", errors="replace"))
            if self.short_lives >= (MOST_REFUSALS if reason else MOST_SHORT):
                raise FedVLError(f"{reason or 'It cannot stay connected.'} {self.process.log} has the details.")
            self._start()
            self.not_before = self.began + min(PAUSE_SECONDS * 2**self.short_lives, LONGEST_PAUSE_SECONDS)
        return True


def refusal_in_log(log: str) -> str | None:
    """Return why the server refused a SuperNode, from the end of its log."""
    last = log[-3000:]
    if "CERTIFICATE_VERIFY_FAILED" in last:
        return "The server's certificate is not one of this federation; check the address, and ca.crt."
    if clock := re.findall(r"This party's clock is \d+ seconds (?:behind|ahead of) the server's\.", last):
        return f"{clock[-1]} Set this machine's clock."
    if "[code: 401]" in last:
        return (
            "The server does not know this party's key; ask its operator to admit the request of fedvl federation join."
        )
    return None


def free_port() -> int:
    """Return a port that is free, and stays so until it is bound: systems give out higher ones."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
