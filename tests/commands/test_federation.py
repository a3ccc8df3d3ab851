"""fedvl federation init and fedvl client as a new user meets them, without a network."""

import stat
from importlib.util import find_spec

import pytest
from PIL import Image
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.cli import app
from fedvl.errors import FedVLError

THREE = ["--clients", "north,south,west"]


@pytest.fixture
def fedvl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words):
        result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output

    return call


def test_init_makes_a_folder_for_each_party_with_nothing_of_the_others(fedvl, tmp_path):
    said = fedvl("federation", "init", "clinic", *THREE, "--method", "fst-cbdg", "--port", 7777)
    assert "clinic/parties/south" in said
    clinic = tmp_path / "clinic"
    assert sorted(path.name for path in (clinic / "parties" / "south").iterdir()) == [
        "ca.crt",
        "experiments",
        "key",
        "party.json",
    ]
    assert stat.S_IMODE((clinic / "parties" / "south" / "key").stat().st_mode) == 0o600
    assert '"server":"127.0.0.1:7777"' in (clinic / "parties" / "south" / "party.json").read_text().replace(" ", "")
    keys = [(clinic / "parties" / name / "key").read_bytes() for name in ("north", "south", "west")]
    assert len(set(keys)) == 3
    with pytest.raises(FedVLError, match="exists already"):
        fedvl("federation", "init", "clinic", *THREE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--clients takes different names"),
        (["--clients", "a,a"], "--clients takes different names"),
        (["--clients", "../a,b"], "--clients takes different names"),
        ([*THREE, "--method", "centralised"], "pools all data"),
        ([*THREE, "--method", "fed-mp", "--set", "evaluation.protocol=open"], "use --protocol closed"),
        ([*THREE, "--set", "data.labels=cps"], "needs all clients at once"),
        ([*THREE, "--dataset", "nothing-like-it"], "no dataset"),
    ],
)
def test_init_refuses_what_cannot_work_and_leaves_nothing(fedvl, tmp_path, words, said):
    with pytest.raises(FedVLError, match=said):
        fedvl("federation", "init", "clinic", *words)
    assert not (tmp_path / "clinic").exists()


def test_a_dry_run_names_every_tensor_that_would_leave_and_what_stays(fedvl):
    settings = ("method.visual_prompts=false", "training.local_epochs=1", "data.shots=20", "data.minimum=0")
    flags = [word for setting in settings for word in ("--set", setting)]
    fedvl("federation", "init", "clinic", *THREE, "--method", "fedpp", *flags)
    said = fedvl("client", "clinic/parties/south", "--dry-run", "--quiet")
    leaves, stays = said.split("stays", 1)[0], said.split("stays", 1)[1]
    assert [line.split()[:2] for line in leaves.splitlines() if "float32" in line] == [
        ["counts", "report"],
        ["images", "report"],
    ]
    assert "44 bytes in total" in leaves
    assert "label-histogram-of-report" in said
    assert all(name in stays for name in ("images and labels", "context", "labels", "confidence"))


def test_a_dry_run_shows_what_the_update_gives_away_and_which_numbers_go_with_it(fedvl, monkeypatch):
    monkeypatch.delenv("FEDVL_CACHE")  # features that other tests have too
    fedvl("federation", "init", "clinic", *THREE, "--method", "linear", "--set", "federation.threads=1")
    said = fedvl("client", "clinic/parties/south", "--dry-run", "--quiet")
    assert ", a loss (" in said
    assert all(name in said for name in ("label-histogram", "membership-at-1-percent", "feature-recovery"))
    assert "No remedy is on" in said
    fedvl("federation", "init", "private", *THREE, "--method", "linear", "--privacy", "client:eps=3")
    said = fedvl("client", "private/parties/south", "--dry-run", "--quiet")
    assert "a weight (1), a number of examples (1), no loss, and a salted" in said
    assert "At most epsilon 3 at delta 1e-05 for each client" in said


def test_a_client_with_its_own_folder_of_images(fedvl, tmp_path):
    fedvl("federation", "init", "clinic", *THREE, "--method", "linear")
    for name in ("cat", "Dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32), (80 * number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    said = fedvl("client", "clinic/parties/west", "--data", "photos", "--dry-run", "--quiet")
    assert "10 x 256" in said
    assert "images and labels    6" in said
    assert "takes 30 labelled images of this party's own, for testing or training; there are 6." in said
    (tmp_path / "photos" / "Dog").rename(tmp_path / "photos" / "unicorn")
    with pytest.raises(FedVLError, match=r"does not know \(unicorn\)"):
        fedvl("client", "clinic/parties/west", "--data", "photos", "--dry-run", "--quiet")


def test_a_folder_that_is_none_is_explained(fedvl, tmp_path):
    with pytest.raises(FedVLError, match="give the folder that fedvl federation init made for you"):
        fedvl("client", tmp_path, "--dry-run")
    with pytest.raises(FedVLError, match="--experiment: there is none"):
        fedvl("server", tmp_path)
