"""A client's state folder: what a folder from an operator may hold, and that planted secrets are never used."""

import json
import os
import shutil
import stat
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import EXPERIMENT, RUN, SmallClient

from fedvl.cli import app
from fedvl.deployment import state as state_module
from fedvl.deployment.audit_log import AuditLog, read_log
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.keys import write_private
from fedvl.deployment.membership import create, make_join_request
from fedvl.deployment.state import begin_run, check_secret, log_of, make_secret, make_state, open_state, state_folder
from fedvl.errors import FedVLError

NAMES = ["north", "south"]


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("founded") / "clinic"
    settings = {"method": {"name": "linear"}, "data": {"dataset": "cifar10-mini"}}
    create(folder, NAMES, "fed.example.org", 9443, resolve_for_parties(settings, len(NAMES)))
    return folder / "parties" / "north"


@pytest.fixture
def handed(founded, tmp_path):
    return shutil.copytree(founded, tmp_path / "north")


def command(*words, answer=""):
    """What a command says, or the error that it ends with."""
    done = CliRunner().invoke(app, [str(word) for word in words], input=answer)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


# --- what a received folder may hold


def planted(name, content="x"):
    def plant(folder):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)

    return plant


def linked(name, target):
    def plant(folder):
        if (folder / name).exists():
            shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(target)

    return plant


PLANTS = {
    "a run's salt": (planted(f"runs/{RUN}/salt"), "runs"),
    "a run's key for secure sums": (planted(f"runs/{RUN}/sum.key"), "runs"),
    "a policy": (planted("policy.toml", "least_images = 0"), "policy.toml"),
    "known keys": (planted("known_parties.json", "{}"), "known_parties.json"),
    "a key": (planted("key"), "key"),
    "a log": (planted("audit.jsonl", ""), "audit.jsonl"),
    "a hidden file": (planted(".link"), ".link"),
    "something else beside experiments": (planted("experiments/linear.py"), "experiments/linear.py"),
    "a folder of experiments": (planted("experiments/more/x.toml"), "experiments/more"),
    "a hidden experiment": (planted("experiments/.toml"), "experiments/.toml"),
    "experiments by a link": (linked("experiments", "../elsewhere"), "experiments"),
    "an experiment by a link": (linked("experiments/linear.toml", "../../elsewhere"), "experiments/linear.toml"),
    "a certificate by a link": (linked("ca.crt", "../elsewhere"), "ca.crt"),
    "party.json by a link": (linked("party.json", "../elsewhere"), "party.json"),
    "a certificate that is a pipe": (lambda folder: pipe(folder / "ca.crt"), "ca.crt"),
}


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("what", PLANTS)
def test_join_refuses_a_folder_with_anything_that_an_operator_does_not_hand_over(what, handed):
    plant, named = PLANTS[what]
    plant(handed)
    with pytest.raises(FedVLError, match=f" holds {named}, which an operator does not hand over: only party.json"):
        command("federation", "join", handed)
    assert not os.path.lexists(handed / "state")


@pytest.mark.parametrize("what", PLANTS)
def test_every_later_command_refuses_it_too(what, handed):
    """An operator may hand over files again, to be put into the folder of a client that has joined."""
    make_join_request(handed)
    plant, named = PLANTS[what]
    plant(handed)
    for words in (["approve", handed, "--yes"], ["roster", handed], ["join", handed, "--renew"]):
        with pytest.raises(FedVLError, match=f" holds {named}, which an operator does not hand over"):
            command("federation", *words)
    with pytest.raises(FedVLError, match=f" holds {named}, which an operator does not hand over"):
        command("client", handed, "--dry-run", "--quiet")


def test_a_client_that_has_not_joined_is_told_to(handed):
    for words in (["federation", "approve", handed], ["federation", "roster", handed], ["client", handed, "--dry-run"]):
        with pytest.raises(FedVLError, match=rf"has not joined yet; run fedvl federation join {handed}\."):
            command(*words)
    with pytest.raises(FedVLError, match="There is no folder"):
        command("federation", "join", handed / "nothing")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../north"},
        {"name": "north/../../x"},
        {"name": ".."},
        {"name": "south"},
        {"number": 2},
        {"number": -1},
        {"names": ["north", "north"]},
        {"server": "--insecure:1"},
        {"server": "fed.example.org"},
    ],
    ids=str,
)
def test_a_party_file_that_names_other_places_or_clients_is_refused(change, handed):
    path = handed / "party.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(FedVLError, match=r"party.json is not there or damaged"):
        command("federation", "join", handed)
    assert not list(handed.parent.glob("*.request.json"))


# --- a state folder that came with the folder


@pytest.fixture
def sent(handed, tmp_path):
    """A folder in which the operator has joined, approved and begun a run, as it arrives at a client."""
    make_join_request(handed)
    command("federation", "approve", handed, "--yes")
    begin_run(log_of(handed), state_folder(handed), RUN, EXPERIMENT)
    return shutil.copytree(handed, tmp_path / "sent" / "north")


def test_a_state_folder_that_was_not_made_here_is_refused_by_every_command(sent):
    before = {path: path.read_bytes() for path in (sent / "state").rglob("*") if path.is_file()}
    for words in (["approve", sent, "--yes"], ["roster", sent], ["join", sent, "--renew"]):
        with pytest.raises(FedVLError, match=r"state was not made here: .* fedvl federation join .* --moved"):
            command("federation", *words)
    for words in (["client", sent, "--dry-run"], ["client", sent]):
        with pytest.raises(FedVLError, match="state was not made here"):
            command(*words)
    with pytest.raises(FedVLError, match="state exists, and a folder that an operator hands over has none"):
        command("federation", "join", sent)
    assert {path: path.read_bytes() for path in (sent / "state").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("origin", ["", "{}", "[" * 100, '{"identity": "0"}', None])
def test_an_origin_that_is_none_counts_for_nothing(origin, handed):
    make_join_request(handed)
    path = handed / "state" / "origin.json"
    path.write_text(origin) if origin is not None else path.unlink()
    with pytest.raises(FedVLError, match="state was not made here"):
        open_state(handed)


def test_the_identity_holds_the_machine_and_both_inodes(handed, tmp_path, monkeypatch):
    """With the inodes of the sender's own disk, on a stick that is mounted as it is, the machine's id differs."""
    make_join_request(handed)
    assert open_state(handed) == handed / "state"
    monkeypatch.setattr(state_module, "MACHINE_ID", tmp_path / "machine-id")
    (tmp_path / "machine-id").write_text("another")
    with pytest.raises(FedVLError, match="was not made here"):
        open_state(handed)
    monkeypatch.undo()
    origin = handed / "state" / "origin.json"
    content = origin.read_bytes()
    origin.rename(handed / "kept")  # its inode is not given to the next file
    write_private(origin, content)
    (handed / "kept").unlink()
    with pytest.raises(FedVLError, match="was not made here"):
        open_state(handed)


def test_a_folder_that_is_renamed_on_its_disk_goes_on(handed, tmp_path):
    make_join_request(handed)
    handed.rename(tmp_path / "renamed")
    assert open_state(tmp_path / "renamed")


def test_a_folder_that_its_person_moved_goes_on_after_a_question(sent):
    said = CliRunner().invoke(app, ["federation", "join", str(sent), "--moved"], input="n\n")
    assert "SHA256:" in said.output
    assert isinstance(said.exception, FedVLError)
    with pytest.raises(FedVLError, match="was not made here"):
        open_state(sent)
    assert "is used on this machine from now on" in command("federation", "join", sent, "--moved", answer="y\n")
    assert open_state(sent)
    assert read_log(sent).chain.entries[-1]["kind"] == "moved"
    assert command("federation", "approve", sent).splitlines()[-1] == "  approved"


def test_a_state_that_is_a_link_or_open_to_others_is_refused(handed, tmp_path):
    make_join_request(handed)
    (handed / "state").chmod(0o750)
    with pytest.raises(FedVLError, match=r"Others can read .*state"):
        open_state(handed)
    (handed / "state").chmod(0o700)
    (handed / "state").rename(tmp_path / "elsewhere")
    (handed / "state").symlink_to(tmp_path / "elsewhere")
    for use in (open_state, make_state):
        with pytest.raises(FedVLError, match=r"is not a folder|state exists"):
            use(handed)


def test_joining_twice_needs_renew_and_says_so(handed):
    make_join_request(handed)
    with pytest.raises(FedVLError, match="if you joined before, --renew makes another key"):
        make_join_request(handed)
    first = (handed / "state" / "key").read_bytes()
    make_join_request(handed, renew=True)
    assert (handed / "state" / "key").read_bytes() != first


# --- secrets


@pytest.fixture
def own(tmp_path):
    """A state folder, and its log."""
    (tmp_path / "state").mkdir()
    return tmp_path / "state", AuditLog(tmp_path / "state" / "audit.jsonl")


def test_a_secret_is_private_and_its_hash_is_in_the_log_before_it_is_on_disk(own, monkeypatch):
    state, log = own
    make_secret(log, state, "key", b"secret")
    assert stat.S_IMODE((state / "key").stat().st_mode) == 0o600
    check_secret(log, state, "key")
    before = read_log(state.parent).chain.entries
    assert [entry["kind"] for entry in before] == ["secret"]
    monkeypatch.setattr(state_module, "write_private", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        make_secret(log, state, "key", b"another")
    check_secret(log, state, "key")  # the first is still the client's own
    assert len(read_log(state.parent).chain.entries) == 2


@pytest.mark.parametrize("name", ["key", "salt"])
def test_a_secret_that_somebody_put_there_is_not_used(name, own):
    state, log = own
    make_secret(log, state, "other", b"x")
    write_private(state / name, b"planted")
    with pytest.raises(FedVLError, match=f"{name} is not a secret that this client made"):
        check_secret(log, state, name)
    (state / name).unlink()
    (state / name).symlink_to(state / "other")
    with pytest.raises(FedVLError, match="cannot be read"):
        check_secret(log, state, name)


def test_a_run_begins_with_a_secret_of_its_own_and_goes_on_with_it(own):
    state, log = own
    folder = begin_run(log, state, RUN, EXPERIMENT)
    salt = (folder / "salt").read_bytes()
    assert (len(salt), stat.S_IMODE((folder / "salt").stat().st_mode)) == (32, 0o600)
    assert begin_run(log, state, RUN, EXPERIMENT) == folder
    assert (folder / "salt").read_bytes() == salt
    other = begin_run(log, state, "c" * 32, EXPERIMENT)
    assert (other / "salt").read_bytes() != salt
    with pytest.raises(FedVLError, match="with another experiment"):
        begin_run(log, state, RUN, "d" * 64)


def test_a_run_folder_that_the_log_does_not_have_is_refused(own):
    """Secrets that were planted for the run that the operator will name."""
    state, log = own
    (state / "runs" / RUN).mkdir(parents=True)
    write_private(state / "runs" / RUN / "salt", bytes(32))
    with pytest.raises(FedVLError, match="is not in this client's log"):
        begin_run(log, state, RUN, EXPERIMENT)


@pytest.mark.parametrize("name", ["salt", "sum.key"])
def test_a_client_goes_on_with_no_other_secret_than_its_own(name, tmp_path):
    client = SmallClient.joined(3, tmp_path, secure_sum=True, least_clients=2)
    assert client.problem(kind="keys") == ""
    noted = {entry["file"] for entry in read_log(tmp_path).chain.entries if entry["kind"] == "secret"}
    assert noted == {f"runs/{RUN}/salt", f"runs/{RUN}/sum.key"}
    again = SmallClient(3, tmp_path, secure_sum=True, least_clients=2)
    assert again.problem(kind="keys") == ""
    path = tmp_path / "state" / "runs" / RUN / name
    size = path.stat().st_size
    path.unlink()
    write_private(path, bytes(size))
    planted = SmallClient(3, tmp_path, secure_sum=True, least_clients=2)
    assert f"{name} is not a secret that this client made" in planted.problem(kind="keys")


def test_a_crash_between_a_secret_and_its_line_costs_nothing(tmp_path, monkeypatch):
    client = SmallClient.joined(3, tmp_path, secure_sum=True, least_clients=2)

    def killed(*words):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedvl.deployment.client.log_secrets", killed)
        with pytest.raises(KeyboardInterrupt):
            client.ask(kind="keys")
    key = (tmp_path / "state" / "runs" / RUN / "sum.key").read_bytes()
    again = SmallClient(3, tmp_path, secure_sum=True, least_clients=2)
    assert again.problem(kind="keys") == ""
    assert (tmp_path / "state" / "runs" / RUN / "sum.key").read_bytes() == key


def test_a_state_without_an_origin_can_be_adopted(handed):
    state = make_state(handed)
    (state / state_module.ORIGIN).unlink()
    with pytest.raises(FedVLError, match="was not made here"):
        open_state(handed)
    state_module.adopt_state(handed)
    assert open_state(handed) == state
