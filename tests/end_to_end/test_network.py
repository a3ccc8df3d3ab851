"""Clients behind proxies and firewalls, servers behind nginx and Caddy: real processes, with TLS and keys."""

import json
import os
import shutil
import signal
import time
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.kills import draw_images
from helpers.machines import LATEST, committed, ended, fedvl, wait_until
from helpers.network import Proxy, configured, reverse_proxy

from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.membership import create, revoke
from fedvl.deployment.supervisor import free_port

NAMES = ["north", "south", "west"]
PASSWORD = "radiology:open sesame"
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "training": {"local_epochs": 1},
    "federation": {"threads": 1, "rounds": 2, "quorum": 3, "deadline": 120},
}
IDLE_SECONDS = 6.0  # after which the firewall forgets a connection


def make(root, images, listens=""):
    """A federation whose clients reach the server by a name, through what the test puts in between."""
    experiment = resolve_for_parties(
        {**SETTINGS, "method": {"name": "linear"}, "data": {"dataset": str(images), "partition": "iid"}}, len(NAMES)
    )
    create(root / "clinic", NAMES, "localhost", free_port(), experiment, listens)
    return root / "clinic"


def send_through(folder, name, port):
    """Give a client another port of this machine's name; return the server's own."""
    path = folder / "parties" / name / "party.json"
    told = json.loads(path.read_bytes())
    path.write_text(json.dumps({**told, "server": f"localhost:{port}"}))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("network")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(root / "cache"))
        yield draw_images(root)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("caddy")), reason="nginx or Caddy is not installed")
def test_clients_behind_an_authenticated_proxy_nginx_with_sni_and_caddy_finish_a_run(images, tmp_path, monkeypatch):
    """One client each way. The proxy's firewall forgets idle connections, and a client pauses for longer than that."""
    target, nginx, caddy, proxy_port = (free_port() for _ in range(4))
    folder = make(tmp_path, images, f"127.0.0.1:{target}")
    send_through(folder, "north", target)
    send_through(folder, "south", nginx)
    send_through(folder, "west", caddy)
    logs = {name: tmp_path / f"{name}.log" for name in NAMES}
    with (
        Proxy(proxy_port, target, PASSWORD, IDLE_SECONDS) as proxy,
        reverse_proxy("nginx.conf", configured("nginx.conf", folder, nginx, target), tmp_path / "nginx", nginx),
        reverse_proxy("Caddyfile", configured("Caddyfile", folder, caddy, target), tmp_path / "caddy", caddy),
    ):
        clients = {name: fedvl("client", folder / "parties" / name, log=logs[name]) for name in NAMES[1:]}
        address = f"http://radiology:open%20sesame@127.0.0.1:{proxy_port}"
        for variable in ("HTTPS_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(variable, address)
        clients["north"] = fedvl("client", folder / "parties" / "north", log=logs["north"])
        monkeypatch.delenv("HTTPS_PROXY")
        monkeypatch.delenv("HTTP_PROXY")
        run = tmp_path / "run"
        server = fedvl("server", folder, "--out", run, log=run.with_suffix(".log"))
        with ended([server, *clients.values()]):
            wait_until(lambda: committed(run), server)
            os.kill(clients["north"].pid, signal.SIGSTOP)
            time.sleep(IDLE_SECONDS + 2)
            os.kill(clients["north"].pid, signal.SIGCONT)
            assert server.wait(LATEST) == 0, run.with_suffix(".log").read_text()
            assert [clients[name].wait(LATEST) for name in NAMES] == [0, 0, 0], logs["north"].read_text()
        assert set(proxy.statuses) <= {200, 502}  # 502 before the server was started
        assert 200 in proxy.statuses
        assert proxy.lost == 0
    answered = [
        (answer["round"], answer["client"]) for answer in json.loads((run / "result.json").read_bytes())["answers"]
    ]
    assert answered == [(number, client) for number in (1, 2) for client in range(3)]
    assert f"Connected through the proxy 127.0.0.1:{proxy_port}." in logs["north"].read_text()
    assert (tmp_path / "caddy" / "log").stat().st_size


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_client_says_why_it_cannot_connect_and_ends_once_it_is_revoked(images, tmp_path):
    """It says so before it encodes its images; started again after that, it encodes none."""
    folder = make(tmp_path, images)
    log = tmp_path / "north.log"
    client = fedvl("client", folder / "parties" / "north", "--stay", log=log, supervisor__WATCH_SECONDS=0.5)
    with ended([client]):
        wait_until(
            lambda: "check that the server is started and firewalls allow it. Trying again." in log.read_text(), client
        )
        server = fedvl("server", folder, "--out", tmp_path / "run", log=tmp_path / "run.log")
        with ended([server]):
            wait_until(lambda: "Connected." in log.read_text(), client, server)
            wait_until(lambda: "Waiting for south, west." in (tmp_path / "run.log").read_text(), server)
            revoke(folder, "north")
            assert client.wait(LATEST) == 2
            again = fedvl("client", folder / "parties" / "north", log=tmp_path / "again.log")
            assert again.wait(LATEST) == 2
    told = log.read_text()
    assert told.index("Trying again.") < told.index("images are ready")
    revoked = "Error: The server does not know this client's key: it was not admitted yet, or was revoked."
    assert revoked in told
    assert revoked in (tmp_path / "again.log").read_text()
    assert "images are ready" not in (tmp_path / "again.log").read_text()
