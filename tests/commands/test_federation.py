"""fedvl federation init and fedvl client as a new user meets them, without a network."""

import stat
from importlib.util import find_spec

import pytest
from PIL import Image
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from fedvl.cli import app
from fedvl.config import read_toml
from fedvl.errors import FedVLError
from fedvl.runs.settings import resolve_experiment

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
        "party.json",
        "state",
    ]
    state = clinic / "parties" / "south" / "state"
    assert sorted(path.name for path in state.iterdir()) == [
        "audit.jsonl",
        "key",
        "origin.json",
        "policy.toml",
        "roster.json",
    ]
    assert stat.S_IMODE((state / "key").stat().st_mode) == 0o600
    assert '"server":"127.0.0.1:7777"' in (clinic / "parties" / "south" / "party.json").read_text().replace(" ", "")
    keys = [(clinic / "parties" / name / "state" / "key").read_bytes() for name in ("north", "south", "west")]
    assert len(set(keys)) == 3
    with pytest.raises(FedVLError, match="exists already"):
        fedvl("federation", "init", "clinic", *THREE)


@pytest.mark.parametrize(
    ("words", "rule", "note"),
    [
        ([], "centred-clipping", "Updates are merged by centred-clipping, against hostile clients"),
        (["--set", "federation.robust=mean"], "mean", "merged by the mean, which one hostile client can ruin"),
        (["--secure-sum"], "mean", "so that no rule stops a hostile client"),
    ],
)
def test_init_says_and_writes_how_updates_are_merged(fedvl, tmp_path, words, rule, note):
    assert note in fedvl("federation", "init", "clinic", *THREE, "--method", "linear", *words)
    for folder in (tmp_path / "clinic", tmp_path / "clinic" / "parties" / "south"):
        written = resolve_experiment(read_toml(folder / "experiments" / "linear.toml"))  # as fedvl run reads it
        assert written.federation.robust == rule


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


def test_a_dry_run_of_a_secure_sum_attacks_the_update_alone_and_a_sum(fedvl, monkeypatch):
    """A mask hides the update from the server, not from who approves: a vector of zeros would say nothing."""
    monkeypatch.delenv("FEDVL_CACHE")
    flags = ("--set", "federation.threads=1", "--set", "data.shots=60")
    fedvl("federation", "init", "clinic", *THREE, "--method", "linear", "--secure-sum", *flags)
    said = " ".join(fedvl("client", "clinic/parties/south", "--dry-run", "--quiet").split())
    assert "This update alone, the worst case: With these messages the server could" in said
    assert "A sum with 2 imitated others: " in said
    assert "0.50 to 0.50" not in said
    assert "0.00 to 0.00" not in said


def test_a_client_with_its_own_folder_of_images(fedvl, tmp_path):
    fedvl("federation", "init", "clinic", *THREE, "--method", "linear")
    for name in ("cat", "Dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32), (80 * number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    said = fedvl("client", "clinic/parties/west", "--data", "photos", "--dry-run", "--quiet")
    assert "10 x 256" in said
    assert "images and labels    6" in said
    assert "takes 30 labelled images of this client's own, for testing or training; there are 6." in " ".join(
        said.split()
    )
    (tmp_path / "photos" / "Dog").rename(tmp_path / "photos" / "unicorn")
    with pytest.raises(FedVLError, match=r"does not know \(unicorn\)"):
        fedvl("client", "clinic/parties/west", "--data", "photos", "--dry-run", "--quiet")


def test_a_folder_that_is_none_is_explained(fedvl, tmp_path):
    with pytest.raises(FedVLError, match="give the folder that the server's operator handed you"):
        fedvl("client", tmp_path, "--dry-run")
    with pytest.raises(FedVLError, match=r"There is no federation in .*; make one with fedvl federation init"):
        fedvl("server", tmp_path)


def test_a_party_approves_after_it_has_read_and_the_client_says_what_is_approved(fedvl, tmp_path):
    fedvl("federation", "init", "clinic", *THREE, "--method", "linear", "--host", "fed.example.org", "--rounds", 7)
    party = tmp_path / "clinic" / "parties" / "west"
    policy = party / "state" / "policy.toml"
    assert not policy.exists()
    said = fedvl("federation", "join", party)
    assert "policy.toml says what this client answers" in said
    assert "least_clients = 1" in policy.read_text()
    for number in range(10):
        (tmp_path / "photos" / "cat").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(tmp_path / "photos" / "cat" / f"{number}.png")
    client = ("client", party, "--data", "photos", "--quiet")
    rehearsed = fedvl(*client, "--dry-run")
    assert "This party has not approved the experiment" in rehearsed
    with pytest.raises(FedVLError, match="has not approved the experiment"):
        fedvl(*client)
    declined = CliRunner().invoke(app, ["federation", "approve", str(party)], input="n\n").output
    assert "linear with fedvl-tiny, 7 rounds; secure sum: no; privacy: none" in declined
    assert "not approved" in declined
    assert "approved now" in fedvl("federation", "approve", party, "--yes")
    assert fedvl("federation", "approve", party).splitlines()[-1] == "  approved"
    policy.write_text("most_rounds = 5")
    assert "The line most_rounds of this party's policy.toml is 5" in fedvl(*client, "--dry-run")
    policy.unlink()
    assert "policy.toml is new: read it" in fedvl("federation", "approve", party)
    assert fedvl(*client, "--dry-run").count("It is approved, and policy.toml allows it.\n") == 1


def test_a_tampered_log_stops_a_client_before_it_connects_and_verify_names_the_line(fedvl, tmp_path):
    fedvl("federation", "init", "clinic", *THREE, "--method", "linear")
    party, clinic = tmp_path / "clinic" / "parties" / "west", tmp_path / "clinic"
    said = fedvl("audit", "verify", clinic, party)
    assert "audit.jsonl: 3 lines, and each fits the one before it.\n  3 admitted\n" in said
    assert (
        "audit.jsonl: 4 lines, and each fits the one before it.\n  1 approved, 1 joined, 1 roster, 1 secret\n" in said
    )
    assert f"{clinic}/audit.jsonl to {party}/state/audit.jsonl: 0 sent, 0 received, 0 matched by SHA-256.\n" in said
    assert "One log cannot tell whether its end was cut" in fedvl("audit", "verify", party)
    assert "No messages were matched: give the log of the server" in fedvl("audit", "verify", party, party)
    log = party / "state" / "audit.jsonl"
    log.write_text(log.read_text().replace('"experiment": "', '"experiment": "0'))
    for words in (("client", party, "--quiet"), ("audit", "verify", party), ("audit", "verify", clinic, party)):
        with pytest.raises(FedVLError, match="was changed: line 4 is not as it was written"):
            fedvl(*words)
    with pytest.raises(FedVLError, match="folders whose logs are checked come after verify"):
        fedvl("audit", clinic, party)
