"""Pages on this machine alone: who may read one, and what happens when it cannot be made."""

import socket
from http.client import HTTPConnection

import pytest

from fedvl.errors import FedVLError
from fedvl.report.loopback import hostname, is_loopback, page_server, served


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
