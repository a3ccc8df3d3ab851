"""A client's SuperNode that ends: what is tried again, and what is said."""

import socket
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedvl.deployment.supervisor import free_port

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment import supervisor
from fedvl.deployment.connection import Reached, UnreachableError
from fedvl.deployment.supervisor import Supervised, Watch
from fedvl.errors import FedVLError


class Server:
    """A server as a client's watch sees it: reached, or not for a reason that a test sets."""

    def __init__(self):
        self.problem, self.asked = None, 0

    def reach(self, address, authorities, key):
        self.asked += 1
        if self.problem:
            raise self.problem
        return Reached("0.1.0", "")


@pytest.fixture(autouse=True)
def server(monkeypatch):
    found = Server()
    monkeypatch.setattr(supervisor, "MAX_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "reach", found.reach)
    monkeypatch.setattr(supervisor, "read_authorities", lambda path: f"<{path.name}>")
    return found


class Ending:
    """A SuperNode that ends at once and says why."""

    def __init__(self, command, options, folder, **environment):
        folder.mkdir(exist_ok=True)
        self.log, self.ended, self.options = folder / "supernode.log", True, options
        self.log.write_text(Path(folder.parent / "says").read_text())

    def stop(self):
        self.ended = True


def until(condition):
    while not condition():
        time.sleep(0.001)


class Start:
    def __init__(self, folder):
        self.folder, self.watches, self.said = folder, [], []

    def watch(self, **named):
        self.watches.append(Watch(self.folder, "fed:1", self.said.append, **named))
        return self.watches[-1]

    def __call__(self, **named):
        return Supervised(self.watch(**named).__enter__(), 1, self.folder / "secret", 2**16)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that starts a SuperNode which ends at once; what it says is in ``said``."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "says").write_text("Traceback")
    monkeypatch.setattr(supervisor, "Process", Ending)
    start = Start(tmp_path)
    yield start
    for watch in start.watches:
        watch.__exit__()


def test_a_problem_that_waiting_does_not_mend_is_raised_by_the_first_look(server, started):
    """Nothing is encoded or started then; the error is all that is said."""
    server.problem = UnreachableError("key", "The server does not know this client's key.", lasting=True)
    with pytest.raises(FedVLError, match="does not know this client's key"), started.watch():
        pytest.fail("it goes on")
    assert (server.asked, started.said) == (1, [])


def test_a_problem_that_waiting_does_not_mend_ends_the_client_at_once(server, started):
    node = started()
    server.problem = UnreachableError("key", "The server does not know this client's key.", lasting=True)
    node.watch.join()
    with pytest.raises(FedVLError, match="does not know this client's key"):
        node.check()
    assert started.said == ["Connected.", "The server does not know this client's key."]
    asked = server.asked
    time.sleep(0.05)
    assert server.asked == asked


def test_a_problem_that_may_pass_is_told_once_and_tried_again_until_it_has_passed(server, started):
    server.problem = UnreachableError("port", "No connection to fed:1.")
    node = started()
    until(lambda: server.asked > 3)
    assert node.check()
    assert started.said == ["No connection to fed:1. Trying again."]
    server.problem = None
    until(lambda: len(started.said) == 2)
    assert (started.said[1], node.watch.version) == ("Connected.", "0.1.0")
    server.problem = UnreachableError("name", "The name is not known here.")
    until(lambda: len(started.said) == 3)
    assert started.said[2] == "The name is not known here. Trying again."


def test_nothing_is_told_after_the_end(server, started):
    with started.watch() as watch:
        server.problem = UnreachableError("port", "No connection to fed:1.")
        watch.over.set()
    watch.join()
    assert started.said == ["Connected."]


def test_the_authorities_of_a_bundle_are_trusted_beside_the_federations(server, started, tmp_path):
    assert str(tmp_path / "ca.crt") in started().process.options
    node = started(bundle=tmp_path / "firewall.pem")
    path = tmp_path / "state" / "authorities.crt"
    assert node.process.options[node.process.options.index("--root-certificates") + 1] == str(path)
    assert path.read_text() == "<ca.crt><firewall.pem>"


def test_a_supernode_that_ends_for_no_clear_reason_is_started_again_many_times(started):
    node = started()
    assert all(node.check() for _ in range(9))
    with pytest.raises(FedVLError, match="cannot stay connected"):
        node.check()


def test_a_supernode_that_cannot_stay_is_started_again_after_ever_longer_pauses(started, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fedvl.deployment.supervisor.MAX_PAUSE_SECONDS", 40.0)
    monkeypatch.setattr("fedvl.deployment.supervisor.time.monotonic", lambda: clock[0])
    node = started()
    starts = []
    for second in range(100):
        clock[0] = float(second)
        lives = node.short_lives
        assert node.check()
        starts += [second] * (node.short_lives > lives)
    assert starts == [0, 2, 6, 14, 30, 62]


def test_a_client_that_stays_does_not_count_the_ends_of_short_runs(started):
    node = started()
    for _ in range(30):  # a message comes in each of its short lives
        node.connected()
        assert node.check()


def test_a_free_port_is_one_that_nobody_has(monkeypatch):
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        busy, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        drawn = iter([busy - 20_000, busy - 20_000, free - 20_000])
        monkeypatch.setattr("secrets.randbelow", lambda below: next(drawn))
        assert free_port() == free
    monkeypatch.undo()
    assert 20_000 <= free_port() < 32_000
