"""Small pages on this machine alone: whose host name is local, and a server of one page."""

import ipaddress
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedvl.errors import FedVLError

THIS_MACHINE = "127.0.0.1"
PATIENCE_SECONDS = 10.0  # for a request to arrive


def is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def hostname(host: str) -> str | None:
    """Return the name in a Host header, without its port; None if it is none."""
    found = re.fullmatch(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", host.lower(), re.ASCII)
    return found and (found[1] or found[2])


def page_server(
    port: int, path: str, render: Callable[[], str], kind: str, option: str, headers: dict[str, str] | None = None
) -> ThreadingHTTPServer:
    """Make a server of one page on this machine; ``option`` is the flag that chose the port."""

    class Page(BaseHTTPRequestHandler):
        timeout = PATIENCE_SECONDS

        def do_GET(self) -> None:
            # Any other host name means that a foreign page sent the browser here (DNS rebinding).
            if not is_loopback(hostname(self.headers.get("Host", ""))) or self.path != path:
                self.send_error(404)
                return
            try:
                body = render().encode("utf-8", "replace")
            except (FedVLError, OSError) as error:  # a file that is damaged, or being replaced
                self.send_error(503, explain=str(error))
                return
            self.send_response(200)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        return ThreadingHTTPServer((THIS_MACHINE, port), Page)
    except OSError as error:
        raise FedVLError(
            f"Cannot listen on {THIS_MACHINE}:{port} ({error.strerror}); choose another {option}."
        ) from error


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[ThreadingHTTPServer]:
    """Answer requests in a thread until the work inside is done."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
