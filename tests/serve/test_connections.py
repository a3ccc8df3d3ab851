"""The server of the service: connections that are idle, slow, malformed or too many are ended, over TLS too."""

import contextlib
import logging
import resource
import socket
import ssl
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from helpers.finished import running

from fedvl.deployment.keys import make_authority, make_server_certificate
from fedvl.errors import FedVLError
from fedvl.report.loopback import HEADERS
from fedvl.serve.connections import MIN_CONNECTIONS, SPARE_FILES, make_query_server, make_room, may_open, read_tls
from fedvl.serve.guard import LIMITS

HASTY = replace(LIMITS, head_seconds=0.3)


def service(limits: Any = HASTY, token: str | None = None) -> FastAPI:
    app = FastAPI()
    app.state.limits, app.state.token = limits, token
    app.add_api_route("/ok", lambda: PlainTextResponse("ok"))
    app.add_api_route("/large", lambda: PlainTextResponse("x" * 50_000_000))
    return app


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            answer += part
    return answer


GET = b"GET /ok HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", b"GET /ok HTTP/1.1\r\n", GET])
def test_a_connection_that_does_not_go_on_is_ended(begun):
    with running(make_query_server(service())) as port, connect(port) as connection:
        connection.sendall(begun)
        answer = rest_of(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK") if begun == GET else answer == b""


def test_who_does_not_read_the_answer_is_not_waited_for():
    server = make_query_server(service())
    with running(server) as port, connect(port) as connection:
        connection.sendall(GET.replace(b"/ok", b"/large"))
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        while server.server_state.connections:
            time.sleep(0.01)


def test_a_malformed_request_is_refused_with_the_headers_of_every_answer():
    with running(make_query_server(service())) as port, connect(port) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        head = rest_of(connection).split(b"\r\n\r\n")[0].decode().lower()
    assert head.startswith("http/1.1 400")
    assert all(f"{name}: {value}".lower() in head for name, value in HEADERS.items())
    assert "connection: close" in head


@pytest.mark.parametrize("token, left", [(None, 8), ("a-token-of-enough-letters", 16)])
def test_half_of_the_connections_are_for_one_address_but_all_for_a_proxy(token, left):
    """Behind a proxy of a service with a token are many users; of twenty connections the oldest are ended."""
    server = make_query_server(service(replace(LIMITS, connections=16, head_seconds=600.0), token))
    with running(server) as port, contextlib.ExitStack() as stack:
        opened = [stack.enter_context(connect(port)) for _ in range(20)]
        assert all(rest_of(connection) == b"" for connection in opened[: 20 - left])
        assert len(server.server_state.connections) == left
        assert httpx.get(f"http://127.0.0.1:{port}/ok", timeout=60).text == "ok"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder)
    make_server_certificate(folder, "127.0.0.1")
    return folder


def test_over_tls_requests_are_answered_and_who_does_not_shake_hands_is_ended(certificate):
    tls = read_tls(certificate / "server.crt", certificate / "server.key")
    trusting = ssl.create_default_context(cafile=certificate / "ca.crt")
    server = make_query_server(service(replace(HASTY, head_seconds=2.0)), tls)
    with running(server) as port, connect(port) as silent, connect(port) as plain:
        plain.sendall(GET)
        assert not rest_of(plain).startswith(b"HTTP")
        assert httpx.get(f"https://127.0.0.1:{port}/ok", timeout=60, verify=trusting).text == "ok"
        assert rest_of(silent) == b""
        while server.server_state.connections:
            time.sleep(0.01)


def test_tls_needs_a_certificate_and_its_own_key(certificate, tmp_path):
    crt, key = certificate / "server.crt", certificate / "server.key"
    assert read_tls(None, None) is None
    assert isinstance(read_tls(crt, key), ssl.SSLContext)
    for files in ((crt, None), (None, key)):
        with pytest.raises(FedVLError, match="TLS needs both files"):
            read_tls(*files)
    for files in ((crt, certificate / "ca.key"), (key, crt), (tmp_path / "absent", key)):
        with pytest.raises(FedVLError, match="are not a PEM certificate and its key without a password"):
            read_tls(*files)


class Held(SimpleNamespace):
    """A connection as it is seen when room is made."""

    def __init__(self, since: float, idle: bool = True, more: bool = False, closing: bool = False) -> None:
        self.ended = False
        transport = SimpleNamespace(is_closing=lambda: closing, abort=lambda: setattr(self, "ended", True))
        super().__init__(since=since, idle=idle, cycle=SimpleNamespace(more_body=more), transport=transport)


def ended(most: int, *connections: Any) -> list[int]:
    make_room(list(connections), most)
    return [place for place, each in enumerate(connections) if each.ended]


def test_room_is_made_only_if_there_are_too_many_that_are_not_closing():
    assert ended(2, Held(1), Held(2)) == []
    assert ended(2, Held(1), Held(2), Held(3)) == [0]
    assert ended(2, Held(1, closing=True), Held(2), Held(3)) == []


def test_the_one_that_kept_the_service_waiting_longest_ends_and_none_whose_answer_is_made():
    at_work = Held(0, idle=False)
    assert ended(2, at_work, Held(5), Held(4)) == [2]
    assert ended(2, at_work, Held(5), Held(3, idle=False, more=True)) == [2]


@pytest.mark.parametrize(
    "soft, hard, wanted, expected, raised",
    [
        (100, 1000, 500, 500, 500),
        (100, 300, 500, 300, 300),
        (600, 1000, 500, 500, None),
        (100, resource.RLIM_INFINITY, 500, 500, 500),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 500, 500, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows(
    soft, hard, wanted, expected, raised, monkeypatch
):
    calls: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: calls.append(limits))
    assert may_open(wanted) == expected
    assert calls == ([] if raised is None else [(raised, hard)])


def test_where_the_limit_cannot_be_raised_it_stays(monkeypatch):
    def refuse(kind, limits):
        raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 1000))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert may_open(500) == 100


@pytest.mark.parametrize(
    "files, expected", [(10_000, 1024), (SPARE_FILES + 200, 200), (SPARE_FILES + 3, MIN_CONNECTIONS)]
)
def test_connections_are_as_many_as_files_allow_but_a_few_at_least(files, expected, monkeypatch):
    monkeypatch.setattr("fedvl.serve.connections.may_open", lambda wanted: files)
    app = service(replace(LIMITS, connections=1024))
    make_query_server(app)
    assert app.state.limits.connections == expected


def test_only_a_service_with_a_token_believes_a_proxy():
    assert not make_query_server(service()).config.proxy_headers
    config = make_query_server(service(token="a-token-of-enough-letters")).config
    assert config.proxy_headers
    assert config.forwarded_allow_ips == ["127.0.0.1", "::1"]
    assert not config.server_header


def test_a_server_closes_no_log_handler_of_its_process():
    """absl, which the accountant imports, closes the stream of its handler with it: pytest's own, in a test."""
    closed: list[bool] = []

    class Handler(logging.NullHandler):
        def close(self) -> None:
            closed.append(True)

    handler = Handler()
    make_query_server(service())
    assert closed == []
    del handler
