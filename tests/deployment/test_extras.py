"""Packages that are not installed: told by init, approve, server and client, before anything starts."""

import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import SmallClient

from fedvl.cli import app
from fedvl.deployment.extras import EXTRA_PACKAGES, check_extras
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.membership import create
from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment
from fedvl.version import install_command

PRIVATE = {"method": {"name": "linear"}, "privacy": {"unit": "record", "epsilon": 8.0}}
SENTENCE = r'Differential privacy \(--privacy\) needs dp_accounting: pip install "dp-accounting==0\.6\.0"\.'


@pytest.fixture
def without(monkeypatch):
    """Take a package away, as far as FedVL looks."""

    def remove(*extras):
        gone = {EXTRA_PACKAGES[extra] for extra in extras}
        monkeypatch.setattr("fedvl.deployment.extras.find_spec", lambda name: None if name in gone else find_spec(name))

    return remove


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_every_command_tells_that_differential_privacy_cannot_be_counted(without, tmp_path):
    create(tmp_path / "clinic", ["north", "south"], "127.0.0.1", 9443, resolve_for_parties(PRIVATE, 2))
    without("privacy")
    party = tmp_path / "clinic" / "parties" / "north"
    init = ("federation", "init", tmp_path / "new", "--clients", "a,b", "--privacy", "record:eps=8")
    for words in (
        init,
        ("federation", "approve", party),
        ("client", party, "--dry-run"),
        ("client", party),
        ("server", tmp_path / "clinic", "--out", tmp_path / "run"),
        ("resume", tmp_path / "run"),
    ):
        with pytest.raises(FedVLError, match=SENTENCE):
            command(*words)
    assert not (tmp_path / "new").exists()


def test_a_ceiling_of_the_policy_needs_it_too(without, tmp_path):
    client = SmallClient.joined(3, tmp_path)
    (client.state / "policy.toml").write_text("epsilon = 8.0")
    without("privacy")
    assert client.problem().startswith("The line epsilon of this client's policy.toml needs dp_accounting")


@pytest.mark.parametrize(
    ("name", "extra"), [("scan.dcm", "dicom"), ("SCAN.DCM", "dicom"), ("photo.heic", "heic"), ("photo.HEIF", "heic")]
)
def test_images_that_cannot_be_read_are_told_and_not_left_out(name, extra, without, tmp_path):
    """Without the package they would be left out, one by one, and training begin with the rest."""
    experiment = resolve_experiment({})
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / name).touch()
    check_extras(experiment, str(tmp_path / "images"))
    without(extra)
    with pytest.raises(FedVLError, match=rf"cat/{name} needs {EXTRA_PACKAGES[extra]}: {install_command(extra)}"):
        check_extras(experiment, str(tmp_path / "images"))
    without(*(EXTRA_PACKAGES.keys() - {extra, "privacy"}))
    check_extras(experiment, str(tmp_path / "images"))
    without(extra)
    (tmp_path / "images" / "cat" / name).rename(tmp_path / "images" / "cat" / f".{name}")
    check_extras(experiment, str(tmp_path / "images"))
    check_extras(experiment, "cifar10-mini")
    check_extras(experiment)


def test_a_client_says_so_of_its_own_images_and_init_of_the_servers(without, tmp_path):
    create(tmp_path / "clinic", ["north"], "127.0.0.1", 9443, resolve_for_parties({"method": {"name": "linear"}}, 1))
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.dcm").touch()
    without("dicom")
    party = tmp_path / "clinic" / "parties" / "north"
    with pytest.raises(FedVLError, match="needs pydicom"):
        command("client", party, "--data", tmp_path / "images", "--dry-run")
    with pytest.raises(FedVLError, match="needs pydicom"):
        command("federation", "init", tmp_path / "new", "--clients", "a,b", "--dataset", tmp_path / "images")
    shutil.rmtree(tmp_path / "images")


class Telling:
    """In place of a client: it says one sentence."""

    def __init__(self, folder, data, say, survey):
        self.say, self.rehearsal, self.file = say, False, SimpleNamespace(name="north", server="127.0.0.1:1")

    def prepare(self, display):
        return

    def watch(self, ca_bundle):
        return nullcontext()

    def serve(self, *ignored):
        self.say('Refused: install it with pip install "fedvl[privacy]".')


def test_what_a_client_says_keeps_its_brackets(monkeypatch, tmp_path):
    """The terminal knows markup, and [privacy] is none."""
    monkeypatch.setattr("fedvl.deployment.client.Client", Telling)
    assert 'install it with pip install "fedvl[privacy]".' in command("client", tmp_path)
