"""What lies between hospitals and servers: a proxy that asks for a password, and reverse proxies as processes."""

import asyncio
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.machines import HOST, Wire, ended, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"


class Proxy(Wire):
    """An HTTP proxy that lets those with a password CONNECT to one name.

    ``forgets``: a firewall in it drops what comes over a connection that was idle for so many seconds.
    """

    def __init__(self, port: int, target: int, password: str = "", forgets: float = float("inf")) -> None:
        super().__init__(port, target)
        self.expected = f"Basic {b64encode(password.encode()).decode()}" if password else ""
        self.allowed, self.forgets = f"localhost:{target}", forgets
        self.statuses: list[int] = []  # of the answers to CONNECT
        self.lost = 0  # pieces of connections that the firewall had forgotten

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            status, words = 200, "Connection established"
            if fields.get("proxy-authorization", "") != self.expected:
                status, words = 407, "Proxy Authentication Required"
            elif first.split(" ")[:2] != ["CONNECT", self.allowed]:
                status, words = 403, "Forbidden"
            else:
                try:
                    far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
                except OSError:
                    status, words = 502, "Bad Gateway"
            self.statuses.append(status)
            writer.write(f"HTTP/1.1 {status} {words}\r\n\r\n".encode())
            await writer.drain()
            if status != 200:
                writer.close()
                return
            heard = [time.monotonic()]  # when something came last, in either direction
            await asyncio.gather(self._pass_on(reader, far_writer, heard), self._pass_on(far_reader, writer, heard))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, heard: list[float]) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                if time.monotonic() - heard[0] > self.forgets:
                    self.lost += 1
                    continue
                heard[0] = time.monotonic()
                sink.write(data)
                await sink.drain()
        sink.close()


def configured(name: str, folder: Path, port: int, target: int, other: int = 1) -> str:
    """The example of the documentation with this machine's name, ports and files in place of its own."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    for old, new in {
        "fed.example.org": "localhost",
        "listen 443": f"listen {HOST}:{port}",
        ":443": f":{port}",
        "127.0.0.1:9443": f"{HOST}:{target}",
        "127.0.0.1:8443": f"{HOST}:{other}",
        "/etc/fedvl": str(folder),
    }.items():
        text = text.replace(old, new)
    return text


@contextmanager
def reverse_proxy(name: str, text: str, place: Path, port: int) -> Iterator[None]:
    """nginx or Caddy with this configuration, until it listens on its port."""
    place.mkdir()
    path = place / name
    path.write_text(text, encoding="utf-8")
    commands = {
        "nginx.conf": ["nginx", "-c", path, "-e", place / "error.log", "-g", f"pid {place}/pid; daemon off;"],
        "Caddyfile": ["caddy", "run", "--config", path, "--adapter", "caddyfile"],
    }
    with open(place / "log", "ab") as log:
        environment = {"PATH": "/usr/sbin:/usr/bin:/bin", "HOME": str(place)}
        process = subprocess.Popen(list(map(str, commands[name])), stdout=log, stderr=log, env=environment)
    with ended([process]):
        wait_until(lambda: listens(port), process)
        yield


def listens(port: int) -> bool:
    import socket

    with suppress(OSError), socket.create_connection((HOST, port), 1):
        return True
    return False
