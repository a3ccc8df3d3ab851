"""The SuperLink that the runs of a federation share: started once, ended after the last, and told who is admitted."""

import socket
import subprocess
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment import link
from fedvl.deployment.files import add_experiment, resolve_for_parties
from fedvl.deployment.membership import create, read_federation, revoke
from fedvl.deployment.supervisor import free_port
from fedvl.errors import FedVLError

NAMES = ["east", "north", "west"]


@pytest.fixture
def clinic(tmp_path):
    folder = tmp_path / "clinic"
    create(folder, NAMES, "127.0.0.1", free_port(), resolve_for_parties({"method": {"name": "linear"}}, len(NAMES)))
    return folder


class Started:
    """A SuperLink that is up as soon as it is started."""

    running, ended, log = 0, False, "superlink.log"

    def __init__(self, *words, **environment):
        Started.running += 1

    def stop(self):
        Started.running -= 1


@pytest.fixture
def registered(monkeypatch):
    """The public keys that a SuperLink without processes was told."""
    keys = list[bytes]()

    def register(address, authority, secret, public_keys):
        keys[:] = public_keys
        return list(range(10, 10 + len(public_keys)))

    made_up = SimpleNamespace(door_settings=lambda *words: {}, register=register)
    monkeypatch.setattr(Started, "running", 0)
    monkeypatch.setattr(link, "Process", Started)
    monkeypatch.setattr(link, "flower", lambda: made_up)
    monkeypatch.setattr(link, "wait_for_port", lambda *words: None)
    return keys


def test_runs_at_once_share_one_link_which_ends_with_them(clinic, registered):
    federation = read_federation(clinic)
    with link.opened_link(clinic, federation) as first:
        with link.opened_link(clinic, federation) as second:
            assert second == first
            assert Started.running == 1
        assert (clinic / "link.json").stat().st_mode & 0o777 == 0o600
        assert Started.running == 1
    assert Started.running == 0
    assert not (clinic / "link.json").exists()


def test_a_link_whose_server_was_killed_is_not_used(clinic, registered, monkeypatch):
    (clinic / "link.json").write_text('{"address": "127.0.0.1:1", "secret": "old", "nodes": {}}')
    federation, started = read_federation(clinic), link.started_link

    @contextmanager
    def looked(*words):
        assert not (clinic / "link.json").exists()  # another run that comes now waits
        with started(*words) as found:
            yield found

    monkeypatch.setattr(link, "started_link", looked)
    with link.opened_link(clinic, federation) as found:
        assert found.secret != "old"
        assert found.address == f"127.0.0.1:{federation.port}"


def test_a_failing_run_ends_the_link_too(clinic, registered):
    with pytest.raises(ZeroDivisionError), link.opened_link(clinic, read_federation(clinic)):
        raise ZeroDivisionError
    assert Started.running == 0
    assert not (clinic / "link.json").exists()


def test_each_start_has_another_secret(clinic, registered):
    secrets = set()
    for _ in range(2):
        with link.opened_link(clinic, read_federation(clinic)) as found:
            secrets.add(found.secret)
            assert (clinic / "secret").read_text() == found.secret
            assert (clinic / "secret").stat().st_mode & 0o777 == 0o600
    assert len(secrets) == 2


def test_the_link_knows_admitted_clients_alone(clinic, registered):
    keys = {member.name: member.public_key.encode() for member in read_federation(clinic).parties}
    revoke(clinic, "north")
    with link.opened_link(clinic, read_federation(clinic)) as found:
        assert found.nodes == {0: 10, 2: 11}
    assert registered == [keys["east"], keys["west"]]


def test_a_message_may_be_as_large_as_the_largest_experiment_allows(clinic):
    settings = {"method": {"name": "fst-cbdg"}, "federation": {"max_message_bytes": 2**33}}
    smaller = link.most_bytes(clinic)
    add_experiment(clinic, resolve_for_parties(settings, len(NAMES)))
    assert link.most_bytes(clinic) == 2**33 + link.ENVELOPE_BYTES > smaller


def test_a_port_that_is_taken_is_told_before_anything_is_started(clinic, registered):
    federation = read_federation(clinic)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", federation.port))
        taken.listen()
        told = rf"Cannot listen on 127.0.0.1:{federation.port} .*init with --port"
        with pytest.raises(FedVLError, match=told), link.opened_link(clinic, federation):
            raise AssertionError
    assert Started.running == 0


def test_an_expired_certificate_is_told_before_anything_is_started(clinic, registered, monkeypatch):
    monkeypatch.setattr(link, "days_left", lambda path: -1)
    told = f"The server's certificate has expired; make it anew with fedvl federation renew {clinic}"
    with pytest.raises(FedVLError, match=told), link.opened_link(clinic, read_federation(clinic)):
        raise AssertionError
    assert Started.running == 0


def test_behind_a_reverse_proxy_the_server_listens_elsewhere_than_clients_are_told(tmp_path, registered):
    port = free_port()
    folder, experiment = tmp_path / "clinic", resolve_for_parties({"method": {"name": "linear"}}, 1)
    create(folder, ["east"], "fed.example.org", 443, experiment, f"127.0.0.1:{port}")
    federation = read_federation(folder)
    assert '"server":"fed.example.org:443"' in (folder / "parties/east/party.json").read_text().replace(" ", "")
    assert (federation.listen, federation.listen_port) == ("127.0.0.1", port)
    with link.opened_link(folder, federation) as found:
        assert found.address == f"127.0.0.1:{port}"
    everywhere = federation.model_copy(update={"listens": str(port)})
    assert (everywhere.listen, everywhere.listen_port) == ("0.0.0.0", port)
    assert federation.model_copy(update={"listens": ""}).listen_port == 443


def test_a_superlink_that_ended_names_its_log():
    process: Any = SimpleNamespace(ended=True, log="clinic/flower/superlink.log")
    with pytest.raises(FedVLError, match=r"did not start; clinic/flower/superlink\.log says why"):
        link.wait_for_port(free_port(), process)


def test_a_process_that_does_not_end_when_told_is_killed(monkeypatch):
    monkeypatch.setattr(link, "ENDING_SECONDS", 0.05)
    process = link.Process.__new__(link.Process)
    words = ["sh", "-c", "trap '' TERM; echo; while :; do sleep 1; done"]
    process.popen = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert process.popen.stdout is not None
    process.popen.stdout.readline()  # it ignores the signal from here on
    assert not process.ended
    process.stop()
    assert process.ended
