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
        "audit.jsonl",
        "ca.crt",
        "experiments",
        "key",
        "party.json",
        "policy.toml",
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
    fedvl("federation", "init", "clinic", *THREE, "--method", "fedpp", "--set", "method.visual_prompts=false")
    said = fedvl("client", "clinic/parties/south", "--dry-run", "--quiet")
    leaves, stays = said.split("stays", 1)[0], said.split("stays", 1)[1]
    assert [line.split()[:2] for line in leaves.splitlines() if "float32" in line] == [
        ["counts", "report"],
        ["images", "report"],
    ]
    assert "44 bytes in total" in leaves
    assert all(name in stays for name in ("images and labels", "context", "labels", "confidence"))


def test_a_client_with_its_own_folder_of_images(fedvl, tmp_path):
    fedvl("federation", "init", "clinic", *THREE, "--method", "linear")
    for name in ("cat", "Dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32), (80 * number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    said = fedvl("client", "clinic/parties/west", "--data", "photos", "--dry-run", "--quiet")
    assert "10 x 256" in said
    assert "images and labels    6" in said
    (tmp_path / "photos" / "Dog").rename(tmp_path / "photos" / "unicorn")
    with pytest.raises(FedVLError, match=r"does not know \(unicorn\)"):
        fedvl("client", "clinic/parties/west", "--data", "photos", "--dry-run", "--quiet")


def test_a_folder_that_is_none_is_explained(fedvl, tmp_path):
    with pytest.raises(FedVLError, match="give the folder that fedvl federation init made for you"):
        fedvl("client", tmp_path, "--dry-run")
    with pytest.raises(FedVLError, match="--experiment: there is none"):
        fedvl("server", tmp_path)
