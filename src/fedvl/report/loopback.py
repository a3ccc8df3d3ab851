"""Small pages on this machine alone: whose host name is local, and a server of one page."""

import ipaddress
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedvl.errors import FedVLError
from fedvl.files import parse_json

THIS_MACHINE = "127.0.0.1"
PATIENCE_SECONDS = 10.0  # for a request to arrive
MAX_GIVEN = 2**24  # bytes of a request: a roster is the largest thing that is given
# A page loads nothing from elsewhere and makes no markup of text; no other site may frame or embed any of it.
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def hostname(host: str) -> str | None:
    """Return the name in a Host header, without its port; None if it is none."""
    found = re.fullmatch(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d{1,5})?", host.lower(), re.ASCII)
    return found and (found[1] or found[2])


class QuietHandler(BaseHTTPRequestHandler):
    """Answers with whole bodies, and writes no log."""

    timeout = PATIENCE_SECONDS

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def page_server(
    port: int, path: str, render: Callable[[], str], kind: str, option: str, headers: dict[str, str] | None = None
) -> ThreadingHTTPServer:
    """Make a server of one page on this machine; ``option`` is the flag that chose the port."""

    class Page(QuietHandler):
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
            self.send(200, body, {"Content-Type": kind, **(headers or {})})

    return bound(port, Page, option)


Answer = Callable[[str, str, dict[str, Any]], Any]  # of method, path and given values


def local_page(
    port: int, files: Mapping[str, tuple[bytes, str]], answer: Answer, token: str, option: str
) -> ThreadingHTTPServer:
    """Make a server of a page on this machine that also acts for the person who holds its token.

    ``files`` (content and type) are open and reveal nothing. All else needs the token, comes from
    this page and not another site's, and is JSON both ways.
    """

    class Page(QuietHandler):
        def do_GET(self) -> None:
            if self.path in files and is_loopback(hostname(self.headers.get("Host", ""))):
                self._send(200, *files[self.path])
                return
            self._act({})

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or len(length) > 9 or int(length) > MAX_GIVEN:
                self._refuse(413, f"Send the length of the request; it has {MAX_GIVEN:,} bytes at most.")
                return
            if self.headers.get_content_type() != "application/json":
                self._refuse(415, "Send JSON.")
                return
            try:
                given = parse_json(self.rfile.read(int(length)))
            except ValueError:
                given = None
            if isinstance(given, dict):
                self._act(given)
            else:
                self._refuse(400, "Send an object of JSON.")

        def _act(self, given: dict[str, Any]) -> None:
            if refusal := self._refusal():
                self._refuse(*refusal)
                return
            try:
                body = json.dumps(answer(self.command, self.path, given)).encode()
            except (FedVLError, OSError) as error:
                self._refuse(422, str(error))
                return
            self._send(200, body, "application/json")

        def _refusal(self) -> tuple[int, str] | None:
            host = self.headers.get("Host", "")
            if not is_loopback(hostname(host)):  # a foreign name that leads here (DNS rebinding)
                return 421, "This page is on localhost only."
            origins = self.headers.get_all("Origin") or []
            foreign = any(origin != f"http://{host}" for origin in origins)
            if foreign or self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
                return 403, "A page of another site may not use this one."
            kind, _, given = self.headers.get("Authorization", "").partition(" ")
            if kind != "Bearer" or not secrets.compare_digest(given.encode(), token.encode()):
                return 401, "Open the whole address that fedvl printed: its end is the token."
            return None

        def _refuse(self, status: int, sentence: str) -> None:
            self._send(status, json.dumps({"detail": sentence}).encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send(status, body, {**HEADERS, "content-type": kind})

    return bound(port, Page, option)


def bound(port: int, handler: type[BaseHTTPRequestHandler], option: str) -> ThreadingHTTPServer:
    try:
        return ThreadingHTTPServer((THIS_MACHINE, port), handler)
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
