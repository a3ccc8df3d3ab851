"""Processes without the seconds of imports: each is a fork of one that has loaded FedVL and Flower, and has one thread.

A process is as real as one that was started: its own folder of work, variables, session, signals and end. What it runs has the
arguments, variables and log that its caller gave to ``subprocess.Popen``; ``/proc`` shows the arguments.

    python -m helpers.forker SOCKET FILLER

listens on the socket until its standard input ends. The filler is room for the arguments of the processes.
"""

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

LOADED = (  # by clients, servers and Flower's processes
    "fedvl.cli",
    "fedvl.runs.experiment",
    "fedvl.runs.evaluation",
    "fedvl.report.page",
    "fedvl.report.evaluation_page",
    "fedvl.federation.steps",
    "fedvl.deployment.client",
    "fedvl.deployment.server",
    "fedvl.deployment.flower",
    "flwr.supernode.start_client_internal",
    "flwr.supernode.cli",
    "flwr.superlink.extensions",
    "flwr.superlink.cli.flower_superlink",
    "flwr.superlink.grid.http_grid",
    "sklearn.metrics",
)
ROOM = 4000  # characters of arguments
SOCKET = "FEDVL_TEST_FORKER"


class Forked:
    """A process, with what is used here of ``subprocess.Popen``."""

    def __init__(
        self,
        words: list[Any],
        stdout: IO[bytes],
        env: dict[str, str] | None = None,
        constants: dict[str, float] | None = None,
        **ignored: Any,
    ) -> None:
        self.words = list(map(str, words))
        self.returncode: int | None = None
        self.link = socket.socket(socket.AF_UNIX)
        self.link.connect(os.environ.get(SOCKET) or forker())
        request = {
            "words": self.words,
            "log": stdout.name,
            "env": dict(env or os.environ),
            "folder": os.getcwd(),
            "constants": constants or {},
        }
        self.link.sendall(json.dumps(request).encode() + b"\n")
        self.pid = int(b"".join(iter(lambda: self.link.recv(1), b"\n")))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.link.settimeout(timeout)
            try:
                code = self.link.recv(100)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.words, timeout or 0) from None
            self.returncode = int(code)
            self.link.close()
        return self.returncode

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@cache
def forker() -> str:
    """Return the socket of this process's forker, which ends with this process."""
    folder = tempfile.TemporaryDirectory()
    path = str(Path(folder.name) / "socket")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.forker", path, "x" * ROOM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()  # it listens
    atexit.register(folder.cleanup)
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return path


# --- the process that forks


def serve(path: str) -> dict[str, Any]:
    """Fork for each request, and return it in the fork."""
    import select

    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(100)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, reap)
    while True:
        readable, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in readable:
            sys.exit()
        link, _ = server.accept()
        if os.fork() == 0:
            server.close()
            if (request := guarded(link)) is not None:
                return request
            os._exit(0)
        link.close()


def reap(*ignored: object) -> None:
    """Wait for guards that ended, so that their processor time counts as this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def guarded(link: socket.socket) -> dict[str, Any] | None:
    """Return the request in the process that was asked for; its parent tells the caller how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request: dict[str, Any] = json.loads(link.makefile().readline())
    process = os.fork()
    if process == 0:
        link.close()
        return request
    with suppress(OSError):  # the caller may be gone
        link.sendall(b"%d\n" % process)
    _, status = os.waitpid(process, 0)
    with suppress(OSError):
        link.sendall(b"%d" % os.waitstatus_to_exitcode(status))
    return None


def become(words: list[str], log: str, env: dict[str, str], folder: str, constants: dict[str, float]) -> None:
    """Make this process what ``python -m MODULE ARGUMENTS`` would be, and run it.

    ``constants`` are of modules of ``fedvl.deployment``, as MODULE__CONSTANT.
    """
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY), (2, log, os.O_WRONLY)):
        os.dup2(os.open(path, mode | os.O_APPEND), number)
    show(words)
    _, _, module, *arguments = words
    sys.argv = [module, *arguments]
    if module == "fedvl.deployment.flower":
        command, parent, *options = arguments
        import_module(module).start_process(command, int(parent), options)
        return
    for each, value in constants.items():
        part, _, constant = each.partition("__")
        vars(import_module(f"fedvl.deployment.{part}"))[constant] = value
    # what a command starts of Flower is forked too
    vars(import_module("fedvl.deployment.link"))["subprocess"] = SimpleNamespace(
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    import_module(module).main()


def show(words: list[str]) -> None:
    """Let ``/proc/PID/cmdline`` be these words."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    content = "\0".join([sys.executable, *words[1:], ""]).encode()
    assert len(content) <= end - begin, "give ROOM more characters"
    ctypes.memmove(begin, content.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    for name in LOADED:
        if name == "fedvl.deployment.flower":
            import_module("fedvl.deployment.link").flower()  # with Flower's switches
        import_module(name)
    os.environ[SOCKET] = sys.argv[1]
    gc.freeze()
    asked = serve(sys.argv[1])
    asked["env"][SOCKET] = os.environ[SOCKET]
    become(**asked)
