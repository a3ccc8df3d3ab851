"""A client's SuperNode that ends: what is tried again, and what is said."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.deployment.client import Supervised
from fedvl.errors import FedVLError


class Ending:
    """A SuperNode that ends at once and says why."""

    def __init__(self, command, options, folder):
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
    (tmp_path / "says").write_text(says)
    monkeypatch.setattr("fedvl.deployment.client.Process", Ending)
    node = Supervised(tmp_path, "127.0.0.1:1", 1, tmp_path / "secret")
    assert node.check()
    with pytest.raises(FedVLError, match=sentence):
        node.check()


def test_a_supernode_that_ends_for_no_clear_reason_is_started_again_many_times(tmp_path, monkeypatch):
    (tmp_path / "says").write_text("Traceback")
    monkeypatch.setattr("fedvl.deployment.client.Process", Ending)
    node = Supervised(tmp_path, "127.0.0.1:1", 1, tmp_path / "secret")
    assert all(node.check() for _ in range(9))
    with pytest.raises(FedVLError, match="cannot stay connected"):
        node.check()


def test_a_client_that_stays_does_not_count_the_ends_of_short_runs(tmp_path, monkeypatch):
    (tmp_path / "says").write_text("The SuperLink ended")
    monkeypatch.setattr("fedvl.deployment.client.Process", Ending)
    node = Supervised(tmp_path, "127.0.0.1:1", 1, tmp_path / "secret")
    for _ in range(30):  # a message comes in each of its short lives
        node.connected()
        assert node.check()
