"""A hostile web page or user of the service: what each tries is refused, and the next honest query gets the same answer.

Requests go to a real server over sockets. ``CASES`` lists all of them.
"""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn
from helpers.finished import running, serving
from helpers.hostile import UPLOADS, good
from helpers.lazy import lazily
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.requests import Request
from starlette.responses import Response

from fedvl.report.loopback import HEADERS
from fedvl.serve.app import make_app
from fedvl.serve.connections import make_query_server, read_tls
from fedvl.serve.guard import LIMITS

schemathesis = lazily("schemathesis")

MODES = ["positive", "negative"]
SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
TOKEN = "The-Right-token-of-all"
# Small, so that what goes beyond them is small too; all else is as a user has it.
SMALL = replace(
    LIMITS,
    sessions=8,
    request_bytes=8_000_000,
    text_bytes=200_000,
    connections=16,
    head_seconds=0.5,
    upload_seconds=0.5,
)


class Service(NamedTuple):
    """A service under attack; one that needs a token if the case says so."""

    client: httpx.Client
    port: int
    answer: list[Any]  # to the honest query, when nothing had happened

    def send(self, request: bytes) -> int:
        """Return the status of a request sent byte by byte as given; 0 if there is no answer but the end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(request)
            return status_of(connection)

    def ask(self) -> list[Any]:
        """Return the answer to an honest query in a session of its own."""
        made = self.client.post("/sessions", json={"classes": ["cat", "ship"], "templates": ["{}"]})
        assert made.status_code == 201, made.text
        path = f"/sessions/{made.json()['id']}"
        answer = self.client.post(f"{path}/images", files=[("files", good())])
        assert self.client.delete(path).status_code == 204
        return [json.loads(line) for line in answer.text.splitlines()]

    def counts(self) -> dict[str, str]:
        lines = self.client.get("/metrics").text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def status_of(connection: socket.socket) -> int:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in answer and (part := connection.recv(65536)):
            answer += part
    if answer:
        head = answer.split(b"\r\n\r\n")[0].decode("latin-1").lower()
        assert all(f"{name}: {value}".lower() in head for name, value in HEADERS.items()), head
    return int(answer.split()[1]) if answer else 0


@contextlib.contextmanager
def attacked(app, **headers):
    alone = httpx.Limits(max_keepalive_connections=0)  # a connection that is kept may be ended while a case is made
    with serving(app) as address, httpx.Client(base_url=address, headers=headers, timeout=60, limits=alone) as client:
        service = Service(client, int(address.rsplit(":", 1)[1]), [])
        service.answer.extend(service.ask())
        assert "ranked" in service.answer[0]
        yield service


@pytest.fixture(scope="module")
def local(fed_mp):
    with attacked(make_app(fed_mp, limits=SMALL)) as service:
        yield service


@pytest.fixture(scope="module")
def shared(fed_mp):
    with attacked(make_app(fed_mp, token=TOKEN, limits=SMALL), authorization=f"Bearer {TOKEN}") as service:
        yield service


# --- requests, line by line: PORT stands for the port of the service


def request(*lines: str, status: int, start: str = "GET /run HTTP/1.1", body: str = "", host: str = "127.0.0.1:PORT"):
    """A request of these header lines that is answered by this status."""
    heads = [start, *([f"Host: {host}"] if host else []), *lines, "Connection: close", "", body]
    whole = "\r\n".join(heads).encode("latin-1")

    def attack(service: Service) -> None:
        assert service.send(whole.replace(b"PORT", b"%d" % service.port)) == status

    return attack


def raw(content: bytes, status: int):
    def attack(service: Service) -> None:
        assert service.send(content) == status

    return attack


POST = "POST /sessions HTTP/1.1"
JSON = "Content-Type: application/json"
HEAD = b"GET /run HTTP/1.1\r\nHost: 127.0.0.1\r\n"
UNFINISHED = (
    b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
)
SECOND = "{}\r\n\r\nDELETE /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HOSTS = {
    "another name": "evil.example",
    "another name, our port": "evil.example:PORT",
    "a name that begins like ours": "localhost.evil.example",
    "a name that contains our address": "127.0.0.1.nip.io",
    "a user before our address": "evil@127.0.0.1",
    "a path behind our address": "127.0.0.1/evil.example",
    "our address as one number": "2130706433",
    "all addresses": "0.0.0.0",
    "a bracket": "[",
    "half an IPv6 address": "[::1",
    "an empty name": " ",
}
ORIGINS = {
    "another site": "http://evil.example",
    "another port of this machine": "http://127.0.0.1:1",
    "another name of this machine": "http://localhost:PORT",
    "no page": "null",
    "a file": "file://",
    "a bracket": "http://[",
    "our address as a user": "http://127.0.0.1:PORT@evil.example",
    "our address and more": "http://127.0.0.1:PORT.evil.example",
    "nothing": "",
    "odd letters": "http://\xff\xfe",
}
PAGES: dict[str, Callable[[Service], None]] = {
    **{f"host: {name}": request(status=421, host=host) for name, host in HOSTS.items()},
    **{f"origin: {name}": request(f"Origin: {origin}", status=403) for name, origin in ORIGINS.items()},
    "host: twice": request("Host: evil.example", status=400),
    "host: none": request(status=400, host=""),
    "host: none in HTTP/1.0": request(status=421, start="GET /run HTTP/1.0", host=""),
    "origin: ours and another": request("Origin: http://127.0.0.1:PORT", "Origin: http://evil.example", status=403),
    "a script of another site": request("Sec-Fetch-Site: cross-site", status=403),
    "a script of another port": request("Sec-Fetch-Site: same-site", status=403),
    "a session by another site": request(
        JSON, "Content-Length: 2", "Origin: http://evil.example", start=POST, body="{}", status=403
    ),
    "leave for another site": request(
        "Origin: http://evil.example", "Access-Control-Request-Method: POST", start="OPTIONS /run HTTP/1.1", status=403
    ),
}
FRAMES: dict[str, Callable[[Service], None]] = {
    "length beside chunks": request(
        "Content-Length: 2", "Transfer-Encoding: chunked", start=POST, body="2\r\n{}\r\n0\r\n\r\n", status=400
    ),
    "chunks beside length": request(
        "Transfer-Encoding: chunked", "Content-Length: 2", start=POST, body="2\r\n{}\r\n0\r\n\r\n", status=400
    ),
    "chunks alone": request("Transfer-Encoding: chunked", start=POST, body="2\r\n{}\r\n0\r\n\r\n", status=411),
    "endless chunks": request("Transfer-Encoding: chunked", start=POST, body="5\r\naaaaa\r\n" * 100, status=411),
    "chunks in a GET": request("Transfer-Encoding: chunked", body="0\r\n\r\n", status=411),
    "another coding": request("Transfer-Encoding: gzip, chunked", start=POST, status=400),
    "a coding that hides": request("Transfer-Encoding: xchunked", start=POST, status=400),
    "no length": request(JSON, start=POST, status=411),
    "two lengths": request("Content-Length: 2", "Content-Length: 3", start=POST, body="{}x", status=400),
    "a length below zero": request("Content-Length: -1", start=POST, status=400),
    "a length with a sign": request("Content-Length: +2", start=POST, body="{}", status=400),
    "a length in hex": request("Content-Length: 0x2", start=POST, body="{}", status=400),
    "a length of a thousand digits": request("Content-Length: " + "9" * 1000, start=POST, status=400),
    "a length of a petabyte": request("Content-Length: 1000000000000000", start=POST, status=413),
    "a length just too large": request("Content-Length: 200001", start=POST, status=413),
    "a length of images elsewhere": request("Content-Length: 7000000", start="POST /run HTTP/1.1", status=413),
    "a large GET": request("Content-Length: 1000000000", status=413),
    "a head without an end": raw(HEAD + b"X: " + b"a" * 60_000, 400),
    "head lines without an end": raw(HEAD + b"X: a\r\n" * 10_000, 400),
    "a path without an end": raw(b"GET /" + b"a" * 60_000, 400),
    "a zero in a head line": request("X: a\0b", status=400),
    "a line without a colon": request("nonsense", status=400),
    "a space before the colon": request("Content-Length : 2", start=POST, body="{}", status=400),
    "an odd method": request(start="G<>T /run HTTP/1.1", status=400),
    "a program's method": request(start="TRACE /run HTTP/1.1", status=411),
    "a proxy's method": request(start="CONNECT evil.example:443 HTTP/1.1", status=411),
    "an address of elsewhere": request(start="GET http://evil.example/run HTTP/1.1", status=404),
    "a path upwards": request(start="GET /../../../../etc/passwd HTTP/1.1", status=404),
    "a hidden path upwards": request(start="GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1", status=404),
    "a path into the package": request(start="GET /page/../app.py HTTP/1.1", status=404),
    "a zero in the path": request(start="GET /page.css%00.html HTTP/1.1", status=404),
    "a websocket": request(
        "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", start="GET /ws HTTP/1.1", status=404
    ),
    "HTTP/2": raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 421),
    "HTTP/0.9": raw(b"GET /run\r\n\r\n", 400),
    "TLS": raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", 400),
    "another language": raw(b"EHLO evil.example\r\n\r\n", 400),
    "random bytes": raw(bytes(range(256)) * 4 + b"\r\n\r\n", 400),
    "a second request in the body": request(
        JSON, f"Content-Length: {len(SECOND)}", start=POST, body=SECOND, status=422
    ),
}
TOKENS: dict[str, Callable[[Service], None]] = {
    "none": request(status=401),
    "wrong": request("Authorization: Bearer a-wrong-token-of-all-x", status=401),
    "empty": request("Authorization: Bearer ", status=401),
    "only the kind": request("Authorization: Bearer", status=401),
    "its beginning": request(f"Authorization: Bearer {TOKEN[:-1]}", status=401),
    "more than it": request(f"Authorization: Bearer {TOKEN}x", status=401),
    "in small letters": request(f"Authorization: Bearer {TOKEN.lower()}", status=401),
    "another kind": request(f"Authorization: Basic {TOKEN}", status=401),
    "odd letters": request("Authorization: Bearer \xff\xfe", status=401),
    "a wrong one first": request("Authorization: Bearer x", f"Authorization: Bearer {TOKEN}", status=401),
    "in the address": request(start=f"GET /run?token={TOKEN} HTTP/1.1", status=401),
    "in the address, as a header": request(start=f"GET /run?authorization=Bearer%20{TOKEN} HTTP/1.1", status=401),
    "in a cookie": request(f"Cookie: token={TOKEN}; authorization=Bearer {TOKEN}", status=401),
    "in the place of the user": request(host=f"{TOKEN}@127.0.0.1:PORT", status=401),
    "a path that looks open": request(start="GET /health/../run HTTP/1.1", status=401),
    "an open path with more": request(start="GET //run HTTP/1.1", status=401),
    "right, but of another site": request(f"Authorization: Bearer {TOKEN}", "Origin: http://evil.example", status=403),
    "a session": request(JSON, "Content-Length: 2", start=POST, body="{}", status=401),
    "counts": request(start="GET /metrics HTTP/1.1", status=401),
}


# --- class names, forms and files


def session(content: bytes | str, status: int = 422, kind: str = "application/json"):
    def attack(service: Service) -> None:
        response = service.client.post("/sessions", content=content, headers={"content-type": kind})
        assert response.status_code == status, response.text[:200]
        assert len(response.text) < 1000

    return attack


def names(**asked: Any) -> str:
    return json.dumps(asked)


SESSIONS: dict[str, Callable[[Service], None]] = {
    "sixty thousand numbers": session('{"classes": [' + "0," * 60_000 + "0]}"),
    "twenty thousand fields": session("{" + ",".join(f'"{n}":0' for n in range(15_000)) + "}"),
    "an unknown field": session(names(admin=True)),
    "depth": session("[" * 100_000, 400),
    "depth in a field": session('{"classes":' * 5_000, 400),
    "half a character": session('{"classes": ["\\ud800"]}'),
    "half a character in a field": session('{"\\ud800": 1}'),
    "infinity": session('{"classes": [1e999]}'),
    "not a number": session('{"top": NaN}'),
    "a number of 5,000 digits": session('{"top": ' + "9" * 5_000 + "}", 400),
    "no JSON": session("<classes/>"),
    "no text": session(b"\xff\xfe\x00", 400),
    "a form": session("classes=cat", kind="application/x-www-form-urlencoded"),
    "a list": session("[]"),
    "a text for a list": session(names(classes="cat")),
    "a name twice": session(names(classes=["cat", "cat"])),
    "an empty name": session(names(classes=["cat", ""])),
    "2,001 names": session(names(classes=[str(n) for n in range(2_001)])),
    "a name of 201 characters": session(names(classes=["x" * 201])),
    "21 templates": session(names(templates=[f"{n} {{}}" for n in range(21)])),
    "names times templates": session(names(classes=[str(n) for n in range(2_000)], templates=["{}", "a {}", "b {}"])),
    "a template without a name": session(names(templates=["{0}"])),
    "a template that looks inside": session(names(templates=["{0.__class__}"])),
    "no results": session(names(top=0)),
    "many results": session(names(top=101)),
    "a client below zero": session(names(client=-1)),
    "a client of a run without": session(names(client=1)),
    "a path as a client": session(names(client="../1")),
    "a body beyond the limit": session(" " * 200_001, 413),
}


def form(body: bytes, status: int = 400, kind: str = "multipart/form-data; boundary=x"):
    def attack(service: Service) -> None:
        path = f"/sessions/{service.client.post('/sessions', json={}).json()['id']}"
        response = service.client.post(f"{path}/images", content=body, headers={"content-type": kind})
        assert response.status_code == status, response.text[:200]
        assert service.client.delete(path).status_code == 204

    return attack


FILE = b'--x\r\nContent-Disposition: form-data; name="files"; filename='
FORMS: dict[str, Callable[[Service], None]] = {
    "no boundary": form(b"--x--", kind="multipart/form-data"),
    "a boundary of 500 letters": form(b"--b", kind="multipart/form-data; boundary=" + "b" * 500),
    "nothing": form(b""),
    "no part": form(b"--x--\r\n"),
    "another boundary": form(b"--y\r\n\r\n--y--"),
    "a part without a head": form(b"--x\r\n\r\nno header\r\n--x--"),
    "an open quote": form(FILE + b'"a\r\n\r\n\r\n--x--', status=200),
    "a name of 70,000 letters": form(FILE + b'"' + b"a" * 70_000 + b'"\r\n\r\nx\r\n--x--'),
    "a head of a megabyte": form(b"--x\r\nX: " + b"a" * 1_000_000),
    "many head lines": form(b"--x\r\n" + b"X: a\r\n" * 10_000),
    "zeros": form(b"\x00" * 1000),
    "line ends": form(b"\r\n" * 100_000),
    "501 files": form((FILE + b'"a"\r\n\r\nx\r\n') * 501 + b"--x--"),
    "501 fields": form(b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n' * 501 + b"--x--"),
    "a field of two megabytes": form(b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\n' + bytes(2_000_000)),
    "an end that never comes": form(FILE + b'"a"\r\n\r\n' + bytes(1000)),
    "a field as a file": form(b'--x\r\nContent-Disposition: form-data; name="files"\r\n\r\nx\r\n--x--'),
    "no form": form(b'{"files": []}', kind="application/json"),
    "more than the limit": form(bytes(8_000_001), status=413),
}


def upload(name: str):
    def attack(service: Service) -> None:
        file, refusal = UPLOADS[name]()
        path = f"/sessions/{service.client.post('/sessions', json={'classes': ['cat', 'ship']}).json()['id']}"
        response = service.client.post(f"{path}/images", files=[("files", file), ("files", good())])
        bad, other = (json.loads(line) for line in response.text.splitlines())
        assert "ranked" in other
        assert "ranked" in bad if refusal is None else refusal in bad["refused"]
        assert service.client.delete(path).status_code == 204

    return attack


# --- what is wrong only in time or number


def silent_connections(service: Service) -> None:
    """Four times as many as there may be at all; who asks meanwhile is answered."""
    with contextlib.ExitStack() as stack:
        for _ in range(4 * SMALL.connections):
            stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=30))
        assert service.ask() == service.answer


def half_requests(service: Service) -> None:
    """As many uploads as there may be connections, none of which goes on."""
    head = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        for _ in range(2 * SMALL.connections):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=30))
            connection.sendall(head)
        assert service.ask() == service.answer


def slow(head: bytes, status: int):
    """Who sends something and then nothing, and reads nothing, is not waited for."""

    def attack(service: Service) -> None:
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(head)
            assert status_of(connection) == status

    return attack


def trickle(service: Service) -> None:
    """A head that arrives byte by byte is not waited for, though something comes all the time."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"X")
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(100) == b""
                    return
            raise AssertionError("it was waited for")


def one_who_leaves(service: Service) -> None:
    """In the middle of a request, and before the answer."""
    path = f"/sessions/{service.client.post('/sessions', json={}).json()['id']}"
    head = f"POST {path}/images HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    whole = FILE + b'"a"\r\n\r\n' + good()[1] + b"\r\n--x--"
    for part in (whole[:50], whole):
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(whole)}\r\n\r\n".encode() + part)
    while service.counts()["fedvl_images_pending"] != "0":  # until what was sent whole is dropped or done
        time.sleep(0.01)
    assert service.client.delete(path).status_code == 204


def all_sessions(service: Service) -> None:
    """One address gets half; another is served."""
    taken = []
    while (made := service.client.post("/sessions", json={"classes": ["a"], "templates": ["{}"]})).status_code == 201:
        taken.append(made.json()["id"])
    assert (made.status_code, len(taken)) == (503, SMALL.sessions // 2)
    assert "busy" in made.json()["detail"]
    other = httpx.HTTPTransport(local_address="127.0.0.9")
    with httpx.Client(base_url=service.client.base_url, transport=other, timeout=60) as neighbour:
        made = neighbour.post("/sessions", json={"classes": ["a"], "templates": ["{}"]})
        assert made.status_code == 201
        assert neighbour.delete(f"/sessions/{made.json()['id']}").status_code == 204
    for each in taken:
        assert service.client.delete(f"/sessions/{each}").status_code == 204


def forged_addresses(service: Service) -> None:
    """Without a token there is no proxy: what claims to be from one is not believed."""
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(
                lambda n: service.client.post(
                    "/sessions",
                    json={"classes": ["a"], "templates": ["{}"]},
                    headers={"x-forwarded-for": f"10.0.0.{n}"},
                ),
                range(SMALL.sessions // 2 + 4),
            )
        )
    assert sorted(each.status_code for each in made) == [201] * (SMALL.sessions // 2) + [503] * 4
    for each in made:
        if each.status_code == 201:
            service.client.delete(f"/sessions/{each.json()['id']}")


def guessed_sessions(service: Service) -> None:
    path = service.client.post("/sessions", json={}).json()["id"]
    for guess in ("0", "*", "%00", path[:-1], path + "x", path.swapcase(), "x" * 22, "%2e%2e%2frun"):
        for method in ("GET", "DELETE"):
            assert service.client.request(method, f"/sessions/{guess}").status_code == 404
        assert service.client.post(f"/sessions/{guess}/images", files=[("files", good())]).status_code == 404
    assert service.client.delete(f"/sessions/{path}").status_code == 204


def names_of_metrics(service: Service) -> None:
    """What askers send is not in the metrics: no name, no path, no address."""
    before = service.counts()
    for n in range(5):
        service.client.get(f"/evil-{n}", headers={"user-agent": f"evil-{n}"})
        service.client.post("/sessions", json={"classes": [f"evil-{n}", ""]})
    assert service.counts().keys() == before.keys()
    assert "evil" not in service.client.get("/metrics").text


TIMES: dict[str, Callable[[Service], None]] = {
    "silent connections": silent_connections,
    "requests that do not go on": half_requests,
    "a connection without a request": slow(b"", 0),
    "a head without an end": slow(b"GET /run HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", 0),
    "a head that trickles": trickle,
    "names that do not arrive": slow(UNFINISHED, 408),
    "one who leaves": one_who_leaves,
    "all sessions": all_sessions,
    "forged addresses": forged_addresses,
    "guessed sessions": guessed_sessions,
    "names for the metrics": names_of_metrics,
}
CASES = [
    *(pytest.param("local", attack, id=f"page: {name}") for name, attack in PAGES.items()),
    *(pytest.param("local", attack, id=f"frame: {name}") for name, attack in FRAMES.items()),
    *(pytest.param("shared", attack, id=f"token: {name}") for name, attack in TOKENS.items()),
    *(pytest.param("local", attack, id=f"session: {name}") for name, attack in SESSIONS.items()),
    *(pytest.param("local", attack, id=f"form: {name}") for name, attack in FORMS.items()),
    *(pytest.param("local", upload(name), id=f"file: {name}") for name in UPLOADS),
    *(pytest.param("local", attack, id=f"time: {name}") for name, attack in TIMES.items()),
]


@pytest.fixture
def logged(caplog):
    """What the service logs as an error; uvicorn keeps its own from pytest."""

    @contextlib.contextmanager
    def listening():
        logging.getLogger("uvicorn").addHandler(caplog.handler)
        try:
            yield
        finally:
            logging.getLogger("uvicorn").removeHandler(caplog.handler)
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []

    return listening


@pytest.mark.parametrize("kind, attack", CASES)
def test_what_is_hostile_is_refused_and_nothing_changes(kind, attack, request, logged):
    service = request.getfixturevalue(kind)
    before = service.counts()
    with logged():
        attack(service)
        after = service.counts()
        assert after.keys() == before.keys()
        assert (after["fedvl_sessions"], after["fedvl_images_pending"]) == (before["fedvl_sessions"], "0")
        assert service.ask() == service.answer


def test_framing_is_refused_with_the_other_parser_too(fed_mp):
    """Who serves the app with uvicorn and httptools is protected by the guard."""
    pytest.importorskip("httptools")
    app = make_app(fed_mp, limits=SMALL)
    with running(uvicorn.Server(uvicorn.Config(app, http="httptools", ws="none", log_level="critical"))) as port:
        head = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        for more, status in ((b"Content-Length: 2\r\n", b"400"), (b"", b"411")):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(head + more + b"\r\n2\r\n{}\r\n0\r\n\r\n")
                assert connection.recv(100).split()[1] == status


@pytest.mark.parametrize("begun", [b"", HEAD, UNFINISHED])
def test_those_who_wait_longest_make_room_for_others(fed_mp, begun):
    """Half of the connections are for one address: of forty that do not go on, the last eight are left."""
    patient = replace(LIMITS, connections=16, head_seconds=600, upload_seconds=600)
    server = make_query_server(make_app(fed_mp, limits=patient))
    with running(server) as port, contextlib.ExitStack() as stack:
        opened = []
        for _ in range(40):
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)))
            opened[-1].sendall(begun)
        for connection in opened[:32]:
            assert status_of(connection) == 0
        assert len(server.server_state.connections) == 8
        for connection in opened[32:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
        assert httpx.get(f"http://127.0.0.1:{port}/run", timeout=60).status_code == 200


class Held:
    """A service whose requests to /held wait until they are let go."""

    def __init__(self, run: Any, **settings: Any) -> None:
        limits = replace(LIMITS, requests=16, retry_seconds=0)
        self.app, self.go, self.waiting = (
            make_app(run, limits=limits, **settings),
            threading.Event(),
            threading.Semaphore(0),
        )
        self.app.add_api_route("/held", self.held, methods=["POST"])

    async def held(self, request: Request) -> str:
        size = len(await request.body())
        self.waiting.release()
        while not self.go.is_set():
            await asyncio.sleep(0.01)
        return str(size)

    def post(self, port: int, *headers: str) -> tuple[int, str]:
        """Return the status and head of an answer to a request with a body, over a connection of its own."""
        lines = ["POST /held HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 300000", "Connection: close", *headers]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + bytes(300_000))
            answer = b""
            while part := connection.recv(65536):
                answer += part
        return int(answer.split()[1]), answer.split(b"\r\n\r\n")[0].decode().lower()


def test_of_two_hundred_queries_at_once_each_is_answered_and_those_who_try_again_succeed(fed_mp):
    held, queries = Held(fed_mp), 200
    with running(make_query_server(held.app)) as port, ThreadPoolExecutor(queries) as users:
        asked = [users.submit(held.post, port) for _ in range(queries)]
        first = [each.result() for each in islice(as_completed(asked), queries - 8)]
        assert {status for status, _ in first} == {503}  # half of sixteen is for one address, and waits
        assert all("retry-after: 0" in head for _, head in first)
        held.go.set()
        assert [each.result()[0] for each in asked].count(200) == 8

        def persist() -> int:
            while (status := held.post(port)[0]) == 503:
                time.sleep(0.01)
            return status

        assert {each.result() for each in [users.submit(persist) for _ in first]} == {200}


def test_users_behind_a_proxy_have_limits_of_their_own(fed_mp):
    """And their connections, which all come from the proxy, are not taken for those of one user."""
    held = Held(fed_mp, token=TOKEN)
    held.app.state.limits = replace(held.app.state.limits, connections=16)
    with running(make_query_server(held.app)) as port, ThreadPoolExecutor(16) as users:

        def ask(user: int) -> tuple[int, str]:
            return held.post(port, f"X-Forwarded-For: 192.0.2.{user}", f"Authorization: Bearer {TOKEN}")

        asked = [users.submit(ask, 1) for _ in range(8)]
        for _ in asked:
            assert held.waiting.acquire(timeout=60)
        assert ask(1)[0] == 503
        asked += [users.submit(ask, 2) for _ in range(4)]
        for _ in range(4):
            assert held.waiting.acquire(timeout=60)
        held.go.set()
        assert {each.result()[0] for each in asked} == {200}


def test_a_connection_that_does_not_shake_hands_counts_and_is_ended(fed_mp, tmp_path):
    """With TLS, whoever only connects takes part in the limits before a handshake: of forty, eight are left, and these end."""
    keys = pytest.importorskip("fedvl.deployment.keys")
    keys.make_authority(tmp_path)
    keys.make_server_certificate(tmp_path, "127.0.0.1")
    tls = read_tls(tmp_path / "server.crt", tmp_path / "server.key")
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    server = make_query_server(make_app(fed_mp, limits=replace(SMALL, head_seconds=3)), tls)
    with running(server) as port, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(40)]
        for connection in opened[:32]:
            assert status_of(connection) == 0
        while len(server.server_state.connections) > 8:
            time.sleep(0.01)
        assert httpx.get(f"https://127.0.0.1:{port}/run", timeout=60, verify=trusting).status_code == 200
        assert hasty_answer(port, trusting).startswith(b"HTTP/1.1 200 OK")
        for connection in opened[32:]:
            assert status_of(connection) == 0
        while server.server_state.connections:
            time.sleep(0.01)


def hasty_answer(port: int, trusting: ssl.SSLContext) -> bytes:
    """Return the answer to a request that is sent in one piece with the end of the handshake."""
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusting.wrap_bio(received, to_send, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:

        def until_done(step: Callable[[], Any]) -> Any:
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    connection.sendall(to_send.read())
                    received.write(connection.recv(65536))

        until_done(tls.do_handshake)
        tls.write(b"GET /run HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        return bytes(until_done(lambda: tls.read(15)))


def test_who_does_not_read_the_answer_is_not_waited_for(fed_mp):
    app = make_app(fed_mp, limits=SMALL)
    app.add_api_route("/large", lambda: Response(bytes(50_000_000)))
    server = make_query_server(app)
    with running(server) as port, socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        while server.server_state.connections:  # until it is given up
            time.sleep(0.01)


def test_a_failure_of_the_service_is_said_and_not_shown(fed_mp):
    app = make_app(fed_mp, limits=SMALL)
    app.add_api_route("/fail", lambda: 1 / 0)
    with serving(app) as address:
        response = httpx.get(f"{address}/fail")
    assert (response.status_code, response.json()) == (500, {"detail": "The service failed; see its log."})
    assert HEADERS.items() <= response.headers.items()


@pytest.mark.parametrize(
    "path, status", [("/", 200), ("/page.js", 200), ("/health", 200), ("/run", 200), ("/none", 404)]
)
def test_every_answer_has_strict_headers(local, path, status):
    response = local.client.get(path)
    assert response.status_code == status
    assert HEADERS.items() <= response.headers.items()
    assert "server" not in response.headers


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "[::1]", "127.0.0.1:1"])
def test_all_names_of_this_machine_are_served(local, host):
    """127.0.0.2 is an address of this machine; another port is that of a tunnel."""
    assert local.client.get("/run", headers={"host": host}).status_code == 200


def test_a_proxy_with_tls_is_served_and_its_users_are_told_apart(shared):
    """The headers that the proxies of docs/serve.md send."""
    proxied = {"host": "models.example.org", "origin": "https://models.example.org", "x-forwarded-proto": "https"}
    asked = {"classes": ["a"], "templates": ["{}"]}
    made = [
        shared.client.post("/sessions", json=asked, headers={**proxied, "x-forwarded-for": f"192.0.2.{n // 4}"})
        for n in range(8)
    ]
    assert [each.status_code for each in made] == [201] * 8
    for each in made:
        shared.client.delete(f"/sessions/{each.json()['id']}")


def test_each_session_has_an_id_of_its_own_that_nobody_guesses(local):
    made = [local.client.post("/sessions", json={"classes": ["a"], "templates": ["{}"]}).json()["id"] for _ in range(4)]
    assert len(set(made)) == 4
    assert all(len(each) == 22 for each in made)  # 128 random bits
    for each in made:
        local.client.delete(f"/sessions/{each}")


@pytest.fixture(scope="module")
def roomy(fed_mp):
    """With room for the many sessions that are begun and never ended here."""
    with serving(make_app(fed_mp, limits=replace(LIMITS, sessions=100_000, names_in_all=10**9))) as url:
        yield url


@pytest.mark.parametrize("mode", MODES)
def test_nothing_made_from_the_description_makes_it_fail(roomy, mode):
    """Every operation, with requests that fit its description and with ones that do not."""
    operations = [found.ok() for found in schemathesis.openapi.from_url(f"{roomy}/openapi.json").get_all_operations()]
    assert len(operations) == 11
    assert {each.value for each in schemathesis.GenerationMode} == set(MODES)
    seen: set[int] = set()
    for operation in operations:

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def check(case):
            response = case.call()
            seen.add(response.status_code)
            assert response.status_code < 500, f"{case.as_curl_command()}: {response.text}"

        with contextlib.suppress(Unsatisfiable):  # an operation without parameters has nothing to be wrong in
            check()
    assert seen & {200, 201, 422}
