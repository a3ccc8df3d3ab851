"""Pages on this machine alone: who may read one, and what happens when it cannot be made."""

import socket
from http.client import HTTPConnection
from typing import Any

import pytest

from fedvl.errors import FedVLError
from fedvl.report.loopback import HEADERS, hostname, is_loopback, local_page, page_server, served


def ask(port, host="127.0.0.1", path="/page", method="GET"):
    connection = HTTPConnection("127.0.0.1", port)
    connection.request(method, path, headers={"Host": f"{host}:{port}"})
    response = connection.getresponse()
    found = response.status, response.getheader("Content-Type"), response.read().decode()
    connection.close()
    return found


def test_only_this_machine_is_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "example.org", "", None)))


def test_names_of_hosts():
    known = {"LocalHost:80": "localhost", "127.0.0.2": "127.0.0.2", "[::1]:8000": "::1", "a.example": "a.example"}
    assert {host: hostname(host) for host in known} == known
    for host in ("", "[", "[::1", "x@127.0.0.1", "127.0.0.1/x", "127.0.0.1:80:80", "localhost:", "a b", "löcalhost"):
        assert hostname(host) is None, host


def test_a_page_is_read_from_this_machine_under_its_own_name_and_path():
    with served(page_server(0, "/page", lambda: "café", "text/plain", "--port", {"X-Extra": "1"})) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        assert ask(port) == (200, "text/plain", "café")
        assert ask(port, "localhost")[0] == 200
        assert [ask(port, "evil.example")[0], ask(port, path="/")[0], ask(port, method="POST")[0]] == [404, 404, 501]
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_a_page_that_cannot_be_made_now_can_be_made_later():
    answers = iter([FedVLError("It is damaged."), OSError(5, "broken"), "whole"])

    def render():
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    with served(page_server(0, "/page", render, "text/plain", "--port")) as server:
        assert [ask(server.server_port)[0] for _ in range(3)] == [503, 503, 200]


def test_a_port_that_is_taken_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(FedVLError, match=r"Cannot listen on 127.0.0.1:\d+ .* choose another --metrics\."):
            page_server(taken.getsockname()[1], "/", str, "text/plain", "--metrics")


# --- a page that acts

TOKEN = "t" * 22


@pytest.fixture
def acting():
    """A page that acts, and what it was asked to do."""
    done: list[tuple[str, str, dict[str, Any]]] = []

    def answer(method: str, path: str, given: dict[str, Any]) -> Any:
        done.append((method, path, given))
        if path == "/wrong":
            raise FedVLError("It is wrong.")
        return {"done": len(done)}

    with served(local_page(0, {"/": (b"<p>page</p>", "text/html")}, answer, TOKEN, "--port")) as server:
        yield server.server_port, done


def act_as(port: int, method: str = "GET", path: str = "/state", body: str = "{}", **headers: str | None) -> Any:
    """Ask as the page does; headers change or (None) leave out some."""
    usual: dict[str, str | None] = {"Host": f"127.0.0.1:{port}", "Authorization": f"Bearer {TOKEN}"}
    if method == "POST":
        usual |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    usual |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in usual.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body.encode() if method == "POST" else None)
    response = connection.getresponse()
    return response.status, response.read().decode(), response.headers


def test_a_page_acts_for_whoever_has_its_token(acting):
    port, done = acting
    assert act_as(port)[:2] == (200, '{"done": 1}')
    assert (
        act_as(port, "POST", "/go", '{"a": 1}', Origin=f"http://127.0.0.1:{port}", Sec_Fetch_Site="same-origin")[0]
        == 200
    )
    assert done == [("GET", "/state", {}), ("POST", "/go", {"a": 1})]
    assert act_as(port, "POST", "/wrong")[:2] == (422, '{"detail": "It is wrong."}')


def test_its_file_is_open_and_every_answer_has_strict_headers(acting):
    port, done = acting
    for status, _, headers in (
        act_as(port, path="/", Authorization=None),
        act_as(port),
        act_as(port, Authorization=None),
    ):
        assert status in (200, 401)
        for name, value in HEADERS.items():
            assert headers[name] == value
    assert len(done) == 1


@pytest.mark.parametrize(
    "status, headers",
    [
        (401, {"Authorization": None}),
        (401, {"Authorization": "Bearer " + "u" * 22}),
        (401, {"Authorization": f"Basic {TOKEN}"}),
        (421, {"Host": "attacker.example"}),
        (421, {"Host": "attacker.example:80"}),
        (421, {"Host": None}),
        (403, {"Origin": "http://attacker.example"}),
        (403, {"Origin": "null"}),
        (403, {"Origin": "http://127.0.0.1:1"}),
        (403, {"Sec_Fetch_Site": "cross-site"}),
        (403, {"Sec_Fetch_Site": "same-site"}),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_others_cannot_use_it(acting, method, status, headers):
    port, done = acting
    assert act_as(port, method, "/go", **headers)[0] == status
    assert done == []


@pytest.mark.parametrize(
    "status, body, headers",
    [
        (415, "{}", {"Content_Type": "text/plain"}),  # which a form of another site could send without asking first
        (400, "[]", {}),
        (400, "{", {}),
        (413, "{}", {"Content_Length": None}),
        (413, "{}", {"Content_Length": "99999999999"}),
        (413, "{}", {"Content_Length": "-1"}),
    ],
)
def test_what_is_no_request_of_the_page_is_refused(acting, status, body, headers):
    port, done = acting
    assert act_as(port, "POST", "/go", body, **headers)[0] == status
    assert done == []
