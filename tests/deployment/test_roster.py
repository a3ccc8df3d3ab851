"""The roster that a client pins: the attack of a server that invents clients, and what a roster must hold."""

import json
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import HEAD, NO_WATCH

from fedvl.cli import app
from fedvl.deployment import keys as keys_module
from fedvl.deployment import server
from fedvl.deployment.audit_log import read_log
from fedvl.deployment.client import Client
from fedvl.deployment.files import add_experiment, resolve_for_parties
from fedvl.deployment.keys import certify_party, fingerprint, sign
from fedvl.deployment.membership import (
    admit_participant,
    create,
    credentials,
    make_join_request,
    read_federation,
    revoke,
)
from fedvl.deployment.messages import Header, Message, pack_tensors, unpack_tensors
from fedvl.deployment.roster import (
    Roster,
    check_roster,
    import_roster,
    pin_roster,
    pinned_roster,
    read_roster,
    roster_of,
    write_roster,
)
from fedvl.deployment.secure_sum import ROSTER, Credentials, SumMember
from fedvl.deployment.state import read_party, state_folder
from fedvl.display import Silent
from fedvl.errors import FedVLError

NAMES = ["a", "b", "c"]
RUN = "a" * 32
FIRST_STEP = "share_train"  # of a sum: the request that names its clients
SETTINGS: dict[str, Any] = {
    "method": {"name": "linear"},
    "data": {"dataset": "cifar10-mini"},
    "federation": {"rounds": 1, "threads": 1},
}


def resolved(secure_sum=True):
    federation = {**SETTINGS["federation"], "secure_sum": secure_sum}
    return resolve_for_parties({**SETTINGS, "federation": federation}, len(NAMES))


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    """A federation between machines with secure sums, whose clients have not joined."""
    folder = tmp_path_factory.mktemp("founded") / "clinic"
    create(folder, NAMES, "fed.example.org", 9443, resolved())
    return folder


@pytest.fixture
def place(founded, tmp_path):
    """The server, three clients on machines of their own, and folders in which the operator pretends to be b and c."""
    clinic = shutil.copytree(founded, tmp_path / "clinic")
    real = {name: shutil.copytree(clinic / "parties" / name, tmp_path / "real" / name) for name in NAMES}
    invented = {name: shutil.copytree(clinic / "parties" / name, tmp_path / "invented" / name) for name in "bc"}
    requests = {name: make_join_request(folder) for name, folder in real.items()}
    sybils = {name: make_join_request(folder) for name, folder in invented.items()}
    return SimpleNamespace(
        clinic=clinic, real=real, invented=invented, requests=requests, sybils=sybils, path=tmp_path / "roster.json"
    )


def rostered(place, *requests):
    """The roster of the operator after admitting these, in a file to send."""
    for request in requests:
        admit_participant(place.clinic, request)
    roster = roster_of(place.clinic, read_federation(place.clinic))
    write_roster(place.path, roster)
    return roster


def honest(place):
    return rostered(place, *place.requests.values())


def invented(place):
    """What the operator sends to a: its own keys for b and c, which it certifies."""
    return rostered(place, place.requests["a"], *place.sybils.values())


def command(*words, answer=""):
    done = CliRunner().invoke(app, [str(word) for word in words], input=answer)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


# --- the attack: an operator that invents clients


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (32, 32), (40 * number, 0, 0)).save(tmp_path / "images" / name / f"{number}.png")
    return str(tmp_path / "images")


def entries(place, client):
    """The clients of the first sum as the operator sends them: the entry of a, and its own for b and c."""
    own = unpack_tensors(ask(client, {}, "keys").payload, 2**20)[ROSTER]
    found = json.loads(bytes(own.tolist()))
    for number, name in ((1, "b"), (2, "c")):
        folder = place.invented[name]
        vouched = Credentials(partial(sign, state_folder(folder) / "key"), lambda entry, content: None)
        (entry,) = json.loads(bytes(SumMember(RUN, number, folder / "state", vouched, 2).entry()[ROSTER].tolist()))
        found.append({**entry, "certificate": read_federation(place.clinic).parties[number].certificate})
    return torch.frombuffer(bytearray(json.dumps(found).encode()), dtype=torch.uint8)


def ask(client, tensors, kind):
    (experiment,) = client.ready
    header = Header(run=RUN, experiment=experiment, round=0, attempt=0, kind=kind, client=0, log=HEAD)
    return client.answer(Message(header, pack_tensors(tensors)))


def prepared_client(folder, images):
    client = Client(folder, images, print)
    client.prepare(Silent())
    return client


def test_an_operator_that_certifies_keys_of_its_own_for_the_others_gets_no_sum_of_one_client(place, images):
    """The first roster of a run has the operator's keys for b and c: a's update would be the only unknown of the sum."""
    roster = honest(place)
    invented(place)  # from now on the server hands out the certificates of its own keys
    command("federation", "roster", place.real["a"], saved(place, roster))
    command("federation", "approve", place.real["a"], "--yes")
    client = prepared_client(place.real["a"], images)
    (ready,) = client.ready.values()
    start = ready.prepared.method.start(torch.Generator().manual_seed(0))
    reply = ask(client, {**start, ROSTER: entries(place, client)}, FIRST_STEP)
    problem = reply.header.problem
    assert problem.startswith("The key of b is not the one in the roster that this client has pinned;")
    assert "fedvl federation roster a roster.json and fedvl federation approve a" in problem
    assert reply.payload == b""
    assert {entry["message"] for entry in read_log(place.real["a"]).chain.entries if entry["kind"] == "sent"} == {
        "keys"
    }


def saved(place, roster):
    write_roster(place.path, roster)
    return place.path


def test_without_a_pinned_roster_nothing_is_approved_and_nothing_answered(place, images):
    party = place.real["a"]
    client = prepared_client(party, images)
    problem = ask(client, {}, "keys").header.problem
    assert problem.startswith("Secure aggregation needs a pinned roster: get roster.json from the operator")
    with pytest.raises(FedVLError, match="Secure aggregation needs a pinned roster"):
        command("federation", "approve", party, "--yes")
    with pytest.raises(FedVLError, match="Secure aggregation needs a pinned roster"):
        client.serve(NO_WATCH, stay=False)
    assert not [entry for entry in read_log(party).chain.entries if entry["kind"] == "approved"]


def test_clients_that_compare_see_that_the_operator_shows_them_different_rosters(place):
    """On the telephone a and b read different fingerprints; a says no, and pins nothing."""
    invented(place)
    said = {"a": command("federation", "roster", place.real["a"], place.path)}
    with pytest.raises(FedVLError, match=r"does not hold the key of this client \(b\)"):
        command("federation", "roster", place.real["b"], place.path)  # so b must get another one
    rostered(place, place.requests["b"])
    said["b"] = command("federation", "roster", place.real["b"], place.path)
    shown = {name: text.split("clients:\n")[1].splitlines()[0].strip() for name, text in said.items()}
    assert shown["a"] != shown["b"]
    for text in said.values():
        assert "Compare the fingerprint with the other clients by telephone, not with the operator alone" in text
    with pytest.raises(FedVLError, match="needs a pinned roster"):
        command("federation", "approve", place.real["a"], answer="n\ny\n")
    assert not (place.real["a"] / "state" / "roster.json").exists()
    with pytest.raises(FedVLError, match="needs a pinned roster"):
        pinned_roster(place.real["a"])


# --- joining, comparing, approving


def test_three_clients_pin_one_roster_with_the_commands(place):
    for name in NAMES:
        request = place.real[name] / f"{name}.request.json"
        said = command("federation", "admit", place.clinic, request, "--yes")
        assert ("All clients are admitted. Hand them the roster" in said) == (name == "c")
    written = command("federation", "roster", place.clinic)
    prints = set()
    for name in NAMES:
        said = command("federation", "roster", place.real[name], place.clinic / "roster.json")
        for other in NAMES:
            assert fingerprint(place.requests[other].public_key) in said
        prints.add(said.split("clients:\n")[1].splitlines()[0])
        assert "Not pinned yet" in command("federation", "roster", place.real[name])
        asked = command("federation", "approve", place.real[name], answer="y\ny\n")
        assert "Did you compare its fingerprint with the other clients" in asked
        assert "It is pinned" in asked
        assert asked.splitlines()[-1] == "  approved now"
        assert command("federation", "roster", place.real[name]).splitlines()[-1] == "It is pinned."
    (shown,) = prints
    assert shown in written
    assert len(shown.split()) == 8
    approved = read_log(place.real["a"]).chain.entries[-1]
    assert (approved["kind"], approved["roster"]) == ("approved", shown.strip())
    with pytest.raises(FedVLError, match="writes the roster, and imports none"):
        command("federation", "roster", place.clinic, place.clinic / "roster.json")


def test_a_changed_roster_needs_a_new_approval_of_secure_aggregation_alone(place):
    add_experiment(place.real["a"], resolved(secure_sum=False).model_copy(update={"seed": 1}))
    (place.real["a"] / "experiments" / "linear.toml").rename(place.real["a"] / "experiments" / "open.toml")
    add_experiment(place.real["a"], resolved())
    command("federation", "roster", place.real["a"], saved(place, honest(place)))
    command("federation", "approve", place.real["a"], "--yes")
    assert command("federation", "approve", place.real["a"]).count("  approved\n") == 2
    renewed = make_join_request(place.real["b"], renew=True)
    command("federation", "roster", place.real["a"], saved(place, rostered(place, renewed)))
    said = command("federation", "approve", place.real["a"], answer="y\nn\n")
    linear, opened = said.split("linear: ")[1].split("open: ")
    assert "  not approved\n" in linear
    assert opened.splitlines()[-1] == "  approved"


def test_a_client_answers_under_a_new_roster_only_after_a_new_approval(place, images):
    party = place.real["a"]
    pin_roster(party, honest(place))
    command("federation", "approve", party, "--yes")
    client = prepared_client(party, images)
    assert ask(client, {}, "keys").header.problem == ""
    before = client.parties[RUN]
    pin_roster(party, rostered(place, make_join_request(place.real["b"], renew=True)))
    problem = ask(client, {}, "keys").header.problem
    assert "with another roster than the one that is pinned now" in problem
    command("federation", "approve", party, "--yes")
    assert ask(client, {}, "keys").header.problem == ""
    assert client.parties[RUN] is not before  # nothing that was checked by the old roster is trusted


def test_a_federation_on_one_machine_pins_its_roster_by_itself(tmp_path):
    create(tmp_path / "clinic", NAMES, "127.0.0.1", 9443, resolved())
    prints = {pinned_roster(tmp_path / "clinic" / "parties" / name).fingerprint for name in NAMES}
    assert prints == {roster_of(tmp_path / "clinic", read_federation(tmp_path / "clinic")).fingerprint}
    for name in NAMES:
        assert command("federation", "approve", tmp_path / "clinic" / "parties" / name).endswith("  approved\n")


# --- what a roster must hold


def changed(roster, number, /, **changes):
    members = [each.model_copy(update=changes) if each.number == number else each for each in roster.members]
    return roster.model_copy(update={"members": tuple(members)})


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda r: r.model_copy(update={"authority": "AA"}), "of another federation"),
        (lambda r: r.model_copy(update={"members": r.members[1:]}), r"does not hold the key of this client \(a\)"),
        (lambda r: changed(r, 1, name="c"), "has c as client 1, and party.json does not"),
        (lambda r: changed(r, 1, number=2), "has b as client 2, and party.json does not"),
        (lambda r: changed(r, 1, number=7), "has b as client 7, and party.json does not"),
        (
            lambda r: changed(r, 1, public_key=r.members[2].public_key),
            "The key of b in the roster has no valid certificate",
        ),
        (
            lambda r: changed(r, 1, certificate=r.members[2].certificate),
            "The key of b in the roster has no valid certi",
        ),
        (lambda r: changed(r, 1, certificate=""), "The key of b in the roster has no valid certificate"),
        (lambda r: r.model_copy(update={"members": (*r.members, r.members[1])}), "have the same number"),
    ],
)
def test_a_roster_that_is_not_sound_is_not_imported(change, says, place):
    path = saved(place, change(honest(place)))
    with pytest.raises(FedVLError, match=says):
        import_roster(place.real["a"], path)
    assert not list((place.real["a"] / "state").glob("roster*"))


def test_one_key_under_two_names_is_refused(place):
    roster = honest(place)
    key = place.requests["c"].public_key
    twin = changed(roster, 1, public_key=key, certificate=certify_party(place.clinic, "b", key))
    with pytest.raises(FedVLError, match="Two clients of the roster have the same public key"):
        check_roster(place.real["a"], read_party(place.real["a"]), twin)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"authority": "A", "members": [], "x": 1}', None])
def test_a_file_that_is_no_roster_is_told(content, place, tmp_path):
    if content is not None:
        place.path.write_bytes(content)
    with pytest.raises(FedVLError, match="is not a roster; ask the operator"):
        read_roster(place.path)


@pytest.mark.parametrize("days", [-1, 3651])
def test_a_certificate_counts_only_while_it_is_valid(days, place, monkeypatch):
    roster = honest(place)
    pin_roster(place.real["a"], roster)
    content = b"keys of b"
    entry: Any = SimpleNamespace(client=1, signature=sign(state_folder(place.real["b"]) / "key", content))
    check = credentials(place.real["a"], read_party(place.real["a"])).check
    check(entry, content)
    later = datetime.now(UTC) + timedelta(days=days)
    monkeypatch.setattr(keys_module, "datetime", SimpleNamespace(now=lambda zone: later))
    with pytest.raises(FedVLError, match="The certificate of b in the pinned roster is not valid now"):
        check(entry, content)
    with pytest.raises(FedVLError, match="has no valid certificate"):
        check_roster(place.real["a"], read_party(place.real["a"]), roster)


def test_only_the_pinned_key_signs_for_a_client(place):
    pin_roster(place.real["a"], honest(place))
    found = credentials(place.real["a"], read_party(place.real["a"]))
    content = b"keys"
    signed = {
        "b": (1, state_folder(place.real["b"])),
        "c in the name of b": (1, state_folder(place.real["c"])),
        "an invented b": (1, state_folder(place.invented["b"])),
        "nobody": (9, state_folder(place.real["b"])),
    }
    for who, (client, folder) in signed.items():
        entry: Any = SimpleNamespace(client=client, signature=sign(folder / "key", content))
        if who == "b":
            found.check(entry, content)
            with pytest.raises(FedVLError, match="The key of b is not the one"):
                found.check(entry, content + b"!")
            continue
        with pytest.raises(FedVLError, match=r"The key of b is not the one|client 9 is not in the roster"):
            found.check(entry, content)
    assert found.sign(content)


def test_a_client_that_was_admitted_later_is_not_in_the_pinned_roster(place):
    pin_roster(place.real["a"], rostered(place, place.requests["a"], place.requests["b"]))
    content = b"keys"
    entry: Any = SimpleNamespace(client=2, signature=sign(state_folder(place.real["c"]) / "key", content))
    with pytest.raises(
        FedVLError, match=r"c is not in the roster that this client has pinned; .* fedvl federation roster a"
    ):
        credentials(place.real["a"], read_party(place.real["a"])).check(entry, content)


def test_the_fingerprint_is_of_names_numbers_keys_and_authority_in_any_order(place):
    roster = honest(place)
    shown = roster.fingerprint
    assert shown == Roster(authority=roster.authority, members=roster.members[::-1]).fingerprint
    assert len(shown.replace(" ", "")) * 5 == 160  # bits; who varies keys on both sides finds a pair after 2^80
    others = [
        roster.model_copy(update={"authority": "AA"}),
        roster.model_copy(update={"members": roster.members[:2]}),
        changed(roster, 1, name="d"),
        changed(roster, 1, number=5),
        changed(roster, 1, public_key=place.sybils["b"].public_key),
    ]
    assert len({shown, *(other.fingerprint for other in others)}) == len(others) + 1


# --- revoking


def test_revoking_says_that_the_roster_has_changed_and_what_to_do(place):
    before = honest(place)
    said = command("federation", "revoke", place.clinic, "b")
    assert "The roster has changed" in said
    assert "Not admitted, or revoked: b. A run goes on without them while its sums have enough clients" in said
    assert f"hand out the new roster (fedvl federation roster {place.clinic})" in said
    assert f"start it with fedvl server {place.clinic}." in said
    shown = command("federation", "roster", place.clinic)
    assert "Not admitted, and not in it: b." in shown
    assert before.fingerprint not in shown
    with pytest.raises(FedVLError, match="no key that could be revoked"):
        revoke(place.clinic, "b")


def test_a_server_says_who_is_revoked_at_its_start_and_when_it_stops_for_too_few(place, tmp_path, monkeypatch):
    """Nobody is waited for; the error that stops the run is the real one."""
    honest(place)
    revoke(place.clinic, "b")
    monkeypatch.setattr("fedvl.deployment.server.RETURN_SECONDS", 0.01)
    settings = (place.clinic / "experiments" / "linear.toml").read_text().replace("deadline = 600.0", "deadline = 0.05")
    (place.clinic / "experiments" / "linear.toml").write_text(settings)
    silent = SimpleNamespace(connected=lambda: {0, 2}, send=lambda *_: {}, collect=lambda *_: [])
    monkeypatch.setattr(server, "opened_link", lambda *_: nullcontext(SimpleNamespace(address="", secret="", nodes={})))
    monkeypatch.setattr(server, "flower", lambda: SimpleNamespace(flower_run=lambda *words: nullcontext(silent)))
    started = CliRunner().invoke(app, ["server", str(place.clinic), "--out", str(tmp_path / "run"), "--quiet"])
    assert "Not admitted, or revoked: b." in started.stderr
    assert isinstance(started.exception, FedVLError)
    assert str(started.exception).startswith("The secure sum of round 1 needs 3 clients or more")
    assert "Not admitted, or revoked: b." in str(started.exception)
    again = CliRunner().invoke(app, ["resume", str(tmp_path / "run"), "--quiet"])
    assert f"fedvl federation roster {place.clinic}" in str(again.exception)
