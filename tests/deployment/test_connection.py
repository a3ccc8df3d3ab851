"""The way to a server, hop by hop: each failure is planted, and named."""

import asyncio
import os
import re
import socket
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

import uvicorn
from helpers.network import Proxy

from fedvl import __version__
from fedvl.commands import doctor
from fedvl.deployment import connection, door
from fedvl.deployment.connection import UnreachableError, reach, read_authorities
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.keys import make_authority, make_server_certificate
from fedvl.deployment.link import flower
from fedvl.deployment.membership import create, revoke
from fedvl.deployment.messages import FORMAT
from fedvl.deployment.supervisor import free_port
from fedvl.errors import FedVLError

PASSWORD = "radiology:secret"
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("connection") / "clinic"
    create(folder, ["north", "south"], "localhost", free_port(), resolve_for_parties({"method": {"name": "linear"}}, 2))
    revoke(folder, "south")
    return folder


@contextmanager
def listening(folder, certificates=None):
    """The door of this federation, with TLS, before nothing: what may come in gets a page that is not there."""

    async def behind(scope, receive, send):
        await door.answer(send, 404, {"detail": "Not Found"})

    inside = flower()
    signed = door.Signed(
        *(name.encode() for name in (inside.PUBLIC_KEY_HEADER, inside.TIMESTAMP_HEADER, inside.SIGNATURE_HEADER))
    )
    keys = inside.PartyKeys(folder / "federation.json")
    app = door.Door(behind, "secret", keys, 2**20, signed, lambda body: None, lambda *words: None)
    where, port = certificates or folder, free_port()
    config = uvicorn.Config(
        app,
        port=port,
        log_level="error",
        lifespan="off",
        ws="none",
        ssl_keyfile=where / "server.key",
        ssl_certfile=where / "server.crt",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port(clinic):
    with listening(clinic) as port:
        yield port


@contextmanager
def talking(answer):
    """A port that answers connections with these bytes, without TLS."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def talk(reader, writer):
        await reader.read(100)
        writer.write(answer)
        writer.close()

    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(talk, "127.0.0.1", 0), loop).result()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)


def other_authority(folder):
    folder.mkdir()
    make_authority(folder)
    make_server_certificate(folder, "localhost")
    return folder


def failure(address, folder, name="north"):
    party = folder / "parties" / name
    with pytest.raises(UnreachableError) as caught:
        reach(address, read_authorities(party / "ca.crt"), party / "state" / "key")
    return caught.value


def test_a_client_that_reaches_its_server_learns_its_version(clinic, port):
    party = clinic / "parties" / "north"
    found = reach(f"localhost:{port}", read_authorities(party / "ca.crt"), party / "state" / "key")
    assert found == (__version__, "")
    assert doctor.connection(f"localhost:{port}", party) == [
        (
            "good",
            f"connection to localhost:{port}: name, port, TLS, authority, key, clock, version; "
            f"the server runs FedVL {__version__}",
        )
    ]


def test_what_is_not_examined_is_said(clinic, port):
    first, second = doctor.connection(f"localhost:{port}", None)
    assert first == ("good", f"connection to localhost:{port}: name, port, TLS")
    assert second[1].startswith("not examined: authority, key, clock, version; give the folder")
    first, second = doctor.connection(f"localhost:{port}", clinic)
    assert first == ("good", f"connection to localhost:{port}: name, port, TLS, authority")
    assert second[1].startswith("not examined: key, clock, version; give the folder")


def test_an_address_without_a_port_is_refused(clinic):
    with pytest.raises(FedVLError, match=r"fed\.example\.org has no port; give --connect HOST:PORT"):
        doctor.connection("fed.example.org", None)


# --- eight planted failures, as fedvl doctor says them


def planted_name(clinic, port, patch):
    patch.setattr(
        socket, "getaddrinfo", lambda *words, **named: (_ for _ in ()).throw(socket.gaierror(-2, "not known"))
    )
    return f"fed.example.invalid:{port}", "north"


def planted_port(clinic, port, patch):
    return f"localhost:{free_port()}", "north"


def planted_proxy(clinic, port, patch):
    patch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{clinic.proxy}")
    return f"localhost:{port}", "north"


def planted_tls(clinic, port, patch):
    return f"localhost:{clinic.plain}", "north"


def planted_authority(clinic, port, patch):
    return f"localhost:{clinic.stranger}", "north"


def planted_key(clinic, port, patch):
    return f"localhost:{port}", "south"


def planted_clock(clinic, port, patch):
    class Later(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(UTC) + timedelta(seconds=400)

    patch.setattr(flower(), "datetime", Later)
    return f"localhost:{port}", "north"


def planted_version(clinic, port, patch):
    patch.setattr(door, "FORMAT", 99)
    patch.setattr(door, "__version__", "9.9.9")
    return f"localhost:{port}", "north"


PLANTED = {
    "name": (planted_name, "", "The name fed.example.invalid of the server is not known here"),
    "port": (planted_port, "name", "(Connection refused); check that the server is started and firewalls allow it"),
    "proxy": (planted_proxy, "", "asks for a user and password (407 Proxy Authentication Required); set HTTPS_PROXY=http://"),
    "TLS": (planted_tls, "name, port", "does not speak TLS as a server of FedVL"),
    "authority": (planted_authority, "name, port, TLS", "is not of this federation's authority (unable to get local issuer"),
    "key": (planted_key, "name, port, TLS, authority", "The server does not know this client's key"),
    "clock": (planted_clock, "name, port, TLS, authority, key", "seconds ahead of the server's. Set this machine's clock."),
    "version": (
        planted_version,
        "name, port, TLS, authority, key, clock",
        f"The server runs FedVL 9.9.9 and this machine {__version__}, whose messages have different formats (99 and {FORMAT})",
    ),
}  # fmt: skip


@pytest.mark.parametrize("hop", PLANTED)
def test_doctor_names_the_hop_that_fails(hop, clinic, port, monkeypatch, tmp_path, capsys):
    plant, passed, sentence = PLANTED[hop]
    proxy = free_port()
    stranger = other_authority(tmp_path / "stranger")
    for name in (
        "python",
        "torch_build",
        "torchvision",
        "embedded_models",
        "embedded_images",
        "cache_folder",
        "npm",
        "extras",
    ):
        monkeypatch.setattr(doctor, name, lambda: [])
    monkeypatch.setattr(doctor, "federation_folder", lambda folder: [])
    with (
        talking(b"HTTP/1.1 400 Bad Request\r\n\r\n") as plain,
        Proxy(proxy, port, PASSWORD),
        listening(clinic, stranger) as other,
    ):
        place = Places(proxy, plain, other)
        address, name = plant(place, port, monkeypatch)
        assert not doctor.examine(clinic / "parties" / name, address)
    good = [f"ok   connection to {address}: {passed}"] if passed else []
    *before, last = capsys.readouterr().out.splitlines()
    assert before == good
    assert last.startswith(f"bad  connection to {address} fails at: {hop}. ")
    assert sentence in last


class Places:
    def __init__(self, proxy, plain, stranger):
        self.proxy, self.plain, self.stranger = proxy, plain, stranger


# --- more ways to fail


def test_a_proxy_with_a_password_is_passed_and_named(clinic, port, monkeypatch):
    with Proxy(free_port(), port, PASSWORD) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{PASSWORD}@127.0.0.1:{proxy.port}")
        ((kind, sentence),) = doctor.connection(f"localhost:{port}", clinic / "parties" / "north")
        assert (kind, proxy.statuses) == ("good", [200])
        assert f"through the proxy 127.0.0.1:{proxy.port}: proxy, name, port, TLS" in sentence
        proxy.allowed = "elsewhere:443"
        found = failure(f"localhost:{port}", clinic)
        assert (found.hop, found.lasting) == ("proxy", True)
        assert "does not allow" in str(found)
        proxy.allowed, proxy.target = f"localhost:{port}", free_port()
        found = failure(f"localhost:{port}", clinic)
        assert (found.hop, found.lasting) == ("port", False)
        assert "(502 Bad Gateway); is the server started?" in str(found)
    found = failure(f"localhost:{port}", clinic)
    assert (found.hop, found.lasting) == ("proxy", False)
    assert str(found).startswith(f"No connection to 127.0.0.1:{proxy.port} (Connection refused); check HTTPS_PROXY.")
    monkeypatch.setenv("HTTPS_PROXY", "ftp://proxy:21")
    found = failure(f"localhost:{port}", clinic)
    assert (found.hop, found.lasting) == ("proxy", True)
    assert "give http://USER:PASSWORD@HOST:PORT" in str(found)


def test_no_connection_on_this_machine_goes_through_a_proxy(clinic, port, monkeypatch):
    monkeypatch.setenv("no_proxy", "intranet.example.org")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    flower()
    flower()
    assert os.environ["no_proxy"] == "intranet.example.org,127.0.0.1"
    party = clinic / "parties" / "north"
    assert reach(f"127.0.0.1:{port}", read_authorities(party / "ca.crt"), party / "state" / "key").proxy == ""


def test_an_expired_certificate_is_told(clinic, tmp_path, monkeypatch):
    for name in ("ca.crt", "ca.key"):
        (tmp_path / name).write_bytes((clinic / name).read_bytes())
    monkeypatch.setattr("fedvl.deployment.keys.SERVER_DAYS", -0.01)
    make_server_certificate(tmp_path, "localhost")
    with listening(clinic, tmp_path) as port:
        found = failure(f"localhost:{port}", clinic)
    assert (found.hop, found.lasting) == ("authority", True)
    assert "has expired; its operator runs fedvl federation renew" in str(found)


def test_a_certificate_of_another_authority_is_accepted_with_a_bundle(clinic, tmp_path):
    """As behind a firewall that inspects TLS: the bundle has comments, as those of systems have."""
    other = other_authority(tmp_path / "firewall")
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("# Contrôle réseau\n" + (other / "ca.crt").read_text())
    party = clinic / "parties" / "north"
    both = read_authorities(party / "ca.crt") + read_authorities(bundle)
    with listening(clinic, other) as port:
        assert failure(f"localhost:{port}", clinic).hop == "authority"
        assert reach(f"localhost:{port}", both, party / "state" / "key").version == __version__
    with listening(clinic) as port:
        assert reach(f"localhost:{port}", both, party / "state" / "key").version == __version__
    bundle.write_text("nothing")
    with pytest.raises(FedVLError, match=re.escape(f"{bundle} holds no certificates in PEM form")):
        read_authorities(bundle)


@pytest.mark.parametrize(
    "status, content, hop",
    [
        (404, b"Not Found", "version"),
        (200, b"[]", "version"),
        (200, b'{"fedvl": "0.2.0", "messages": "1"}', "version"),
        (503, b"", "port"),
    ],
)
def test_a_server_that_is_older_or_another_is_named(status, content, hop, clinic, monkeypatch):
    """A server from before versions were asked for has no such page."""

    async def answered(self, scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": content})

    monkeypatch.setattr(door.Door, "__call__", answered)
    with listening(clinic) as port:
        found = failure(f"localhost:{port}", clinic)
    assert (found.hop, found.lasting) == (hop, hop == "version")
    assert (f"older than {__version__} here" in str(found)) == (hop == "version")


def test_a_server_that_accepts_and_says_nothing_is_not_waited_for(clinic, monkeypatch):
    monkeypatch.setattr(connection, "STEP_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        found = failure(f"localhost:{silent.getsockname()[1]}", clinic)
    assert (found.hop, found.lasting) == ("TLS", False)


def test_another_address_of_the_machine_needs_a_certificate_of_its_own(clinic):
    error = ssl.SSLCertVerificationError(1, "mismatch")
    for code in (connection.OTHER_HOST, connection.OTHER_ADDRESS):
        error.verify_code = code
        assert "is not for 10.0.0.5:443; use the name" in connection.Way("10.0.0.5:443")._distrusted(error)
