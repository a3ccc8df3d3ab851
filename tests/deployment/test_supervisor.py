"""A client's SuperNode that ends: what is tried again, and what is said."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment.supervisor import Supervised
from fedvl.errors import FedVLError


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("fedvl.deployment.supervisor.LONGEST_PAUSE_SECONDS", 0.0)


class Ending:
    """A SuperNode that ends at once and says why."""

    def __init__(self, command, options, folder, **environment):
        folder.mkdir(exist_ok=True)
        self.log, self.ended = folder / "supernode.log", True
        self.log.write_text(Path(folder.parent / "says").read_text())


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ("[code: 401] The server does not know this party's key.", "ask its operator to admit"),
        (
            "[code: 401] This party's clock is 400 seconds behind the server's.",
            "400 seconds behind .* Set this machine",
        ),
        ("ssl.SSLCertVerificationError: CERTIFICATE_VERIFY_FAILED", "not one of this federation"),
    ],
)
def test_a_refused_client_says_why_after_a_second_try(says, sentence, tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "says").write_text(says)
    monkeypatch.setattr("fedvl.deployment.supervisor.Process", Ending)
    node = Supervised(tmp_path, "127.0.0.1:1", 1, tmp_path / "secret", 2**16)
    assert node.check()
    with pytest.raises(FedVLError, match=sentence):
        node.check()


def test_a_supernode_that_ends_for_no_clear_reason_is_started_again_many_times(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "says").write_text("Traceback")
    monkeypatch.setattr("fedvl.deployment.supervisor.Process", Ending)
    node = Supervised(tmp_path, "127.0.0.1:1", 1, tmp_path / "secret", 2**16)
    assert all(node.check() for _ in range(9))
    with pytest.raises(FedVLError, match="cannot stay connected"):
        node.check()


def test_a_supernode_that_cannot_stay_is_started_again_after_ever_longer_pauses(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "says").write_text("Traceback")
    clock = [0.0]
    monkeypatch.setattr("fedvl.deployment.supervisor.Process", Ending)
    monkeypatch.setattr("fedvl.deployment.supervisor.LONGEST_PAUSE_SECONDS", 40.0)
    monkeypatch.setattr("fedvl.deployment.supervisor.time.monotonic", lambda: clock[0])
    node = Supervised(tmp_path, "127.0.0.1:1", 1, tmp_path / "secret", 2**16)
    starts = []
    for second in range(100):
        clock[0] = float(second)
        lives = node.short_lives
        assert node.check()
        starts += [second] * (node.short_lives > lives)
    assert starts == [0, 2, 6, 14, 30, 62]


def test_a_client_that_stays_does_not_count_the_ends_of_short_runs(tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "says").write_text("The SuperLink ended")
    monkeypatch.setattr("fedvl.deployment.supervisor.Process", Ending)
    node = Supervised(tmp_path, "127.0.0.1:1", 1, tmp_path / "secret", 2**16)
    for _ in range(30):  # a message comes in each of its short lives
        node.connected()
        assert node.check()
