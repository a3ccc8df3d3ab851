"""Parties join with keys of their own making; what is not theirs is not admitted, and what is revoked is gone."""

import json
import os
import shutil
import stat
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from cryptography import x509

from fedvl.cli import app
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.keys import (
    authority_fingerprint,
    fingerprint,
    make_key,
    public_key_of,
    read_certificate,
    sign,
    signed_by,
    write_private,
)
from fedvl.deployment.membership import (
    admit_participant,
    check_key,
    create,
    find_member,
    make_join_request,
    read_federation,
    read_request,
    revoke,
)
from fedvl.deployment.state import request_path
from fedvl.errors import FedVLError

NAMES = ["north", "south"]


@pytest.fixture(scope="module")
def founded(tmp_path_factory):
    """A federation between machines that nobody has joined yet."""
    folder = tmp_path_factory.mktemp("founded") / "clinic"
    settings = {"method": {"name": "linear"}, "data": {"dataset": "cifar10-mini"}}
    create(folder, NAMES, "fed.example.org", 9443, resolve_for_parties(settings, len(NAMES)))
    return folder


@pytest.fixture
def clinic(founded, tmp_path):
    return shutil.copytree(founded, tmp_path / "clinic")


def made_key(path):
    write_private(path, make_key())
    return public_key_of(path)


def keys_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("key*"))


def test_the_server_makes_no_partys_key_and_a_party_makes_its_own(clinic):
    assert keys_in(clinic) == []
    request = make_join_request(clinic / "parties" / "north")
    assert keys_in(clinic) == ["parties/north/state/key"]
    assert stat.S_IMODE((clinic / "parties/north/state/key").stat().st_mode) == 0o600
    assert stat.S_IMODE((clinic / "parties/north/state").stat().st_mode) == 0o700
    admit_participant(clinic, read_request(request_path(clinic / "parties/north", "north")))
    assert list(read_federation(clinic).admitted) == [0]
    member = read_federation(clinic).parties[0]
    assert member.public_key == request.public_key
    certificate = x509.load_pem_x509_certificate(member.certificate.encode())
    certificate.verify_directly_issued_by(read_certificate(clinic / "ca.crt"))
    assert certificate.subject.rfc4514_string() == "CN=north"


def test_on_one_machine_keys_are_made_at_once(tmp_path):
    settings = {"method": {"name": "linear"}, "data": {"dataset": "cifar10-mini"}}
    create(tmp_path / "clinic", NAMES, "127.0.0.1", 9443, resolve_for_parties(settings, len(NAMES)))
    assert list(read_federation(tmp_path / "clinic").admitted) == [0, 1]
    for name in NAMES:
        check_key(tmp_path / "clinic" / "parties" / name)


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o277, 0o777])
def test_a_key_is_0600_under_any_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        write_private(tmp_path / "key", make_key())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_the_fingerprint_is_that_of_ssh(tmp_path):
    keygen = shutil.which("ssh-keygen")
    public = made_key(tmp_path / "key")
    assert fingerprint(public).startswith("SHA256:")
    assert len(fingerprint(public)) == 50
    if keygen:
        import subprocess

        (tmp_path / "key.pub").write_text(public)
        said = subprocess.run([keygen, "-l", "-f", tmp_path / "key.pub"], capture_output=True, text=True, check=True)
        assert said.stdout.split()[1] == fingerprint(public)


def test_a_second_key_needs_renew_and_replaces_the_first_when_it_is_admitted(clinic):
    party = clinic / "parties" / "north"
    first = make_join_request(party)
    admit_participant(clinic, first)
    with pytest.raises(FedVLError, match="--renew makes another"):
        make_join_request(party)
    second = make_join_request(party, renew=True)
    assert find_member(read_federation(clinic), "north").public_key == first.public_key  # until the operator agrees
    admit_participant(clinic, second)
    assert find_member(read_federation(clinic), "north").public_key == second.public_key != first.public_key


def test_a_revoked_party_is_out_and_can_join_again(clinic):
    admit_participant(clinic, make_join_request(clinic / "parties" / "north"))
    admit_participant(clinic, make_join_request(clinic / "parties" / "south"))
    revoke(clinic, "north")
    assert list(read_federation(clinic).admitted) == [1]
    with pytest.raises(FedVLError, match="no key that could be revoked"):
        revoke(clinic, "north")
    with pytest.raises(FedVLError, match="its parties are north, south"):
        revoke(clinic, "east")
    admit_participant(clinic, make_join_request(clinic / "parties" / "north", renew=True))
    assert list(read_federation(clinic).admitted) == [0, 1]


def forge(request, **changes):
    return {**request.model_dump(), **changes}


@pytest.mark.parametrize(
    "case", ["name", "key", "signature", "type", "extra", "not json", "large", "absent", "other curve"]
)
def test_a_request_that_is_not_whole_is_not_admitted(case, clinic, tmp_path):
    request, path = make_join_request(clinic / "parties" / "north"), tmp_path / "request.json"
    stranger = made_key(tmp_path / "stranger")
    contents = {
        "name": forge(request, name="south"),
        "key": forge(request, public_key=stranger),
        "signature": forge(request, signature="AAAA"),
        "type": forge(request, name=7),
        "extra": forge(request, number=1),
        "not json": "{",
        "large": forge(request, name="n" * 10_000),
        "other curve": forge(
            request, public_key="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGJlbm90YWtleWJlbm90YWtleWJlbm90YWtleTAw"
        ),
    }
    if case != "absent":
        path.write_text(contents[case] if case == "not json" else json.dumps(contents[case]))
    before = (clinic / "federation.json").read_bytes()
    said = CliRunner().invoke(app, ["federation", "admit", str(clinic), str(path), "--yes"])
    assert isinstance(said.exception, FedVLError)
    assert "ask the party for it again" in str(said.exception)
    assert (clinic / "federation.json").read_bytes() == before


def test_a_request_counts_for_one_federation_and_one_party(clinic, founded, tmp_path):
    request = make_join_request(clinic / "parties" / "north")
    other = tmp_path / "other"
    settings = {"method": {"name": "linear"}, "data": {"dataset": "cifar10-mini"}}
    create(other, NAMES, "fed.example.org", 9443, resolve_for_parties(settings, len(NAMES)))
    with pytest.raises(FedVLError, match="for another federation"):
        admit_participant(other, request)
    admit_participant(clinic, request)
    twin = request.model_copy(update={"name": "south"})
    twin = twin.model_copy(update={"signature": sign(clinic / "parties/north/state/key", twin.signed_part)})
    assert signed_by(twin.public_key, twin.signed_part, twin.signature)
    with pytest.raises(FedVLError, match="shows the key of another party"):
        admit_participant(clinic, twin)


def test_the_commands_of_joining_show_both_fingerprints_and_ask(clinic):
    runner, party = CliRunner(), clinic / "parties" / "north"
    said = runner.invoke(app, ["federation", "join", str(party)], catch_exceptions=False)
    request = read_request(request_path(party, "north"))
    assert fingerprint(request.public_key) in said.stdout
    assert authority_fingerprint(clinic) in said.stdout
    asked = ["federation", "admit", str(clinic), str(request_path(party, "north"))]
    refused = runner.invoke(app, asked, input="n\n")
    assert isinstance(refused.exception, FedVLError)
    assert not read_federation(clinic).admitted
    agreed = runner.invoke(app, asked, input="y\n", catch_exceptions=False)
    assert fingerprint(request.public_key) in agreed.stdout
    assert list(read_federation(clinic).admitted) == [0]
    runner.invoke(app, ["federation", "revoke", str(clinic), "north"], catch_exceptions=False)
    assert not read_federation(clinic).admitted


def test_revoke_takes_the_federation_of_the_present_folder(clinic, monkeypatch):
    admit_participant(clinic, make_join_request(clinic / "parties" / "north"))
    monkeypatch.chdir(clinic)
    CliRunner().invoke(app, ["federation", "revoke", "north"], catch_exceptions=False)
    assert not read_federation(clinic).admitted


def test_a_renewed_certificate_has_the_same_authority(clinic):
    before = (clinic / "server.crt").read_bytes()
    CliRunner().invoke(app, ["federation", "renew", str(clinic)], catch_exceptions=False)
    assert (clinic / "server.crt").read_bytes() != before
    read_certificate(clinic / "server.crt").verify_directly_issued_by(read_certificate(clinic / "ca.crt"))
    (clinic / "ca.key").unlink()
    said = CliRunner().invoke(app, ["federation", "renew", str(clinic)])
    assert isinstance(said.exception, FedVLError)
    assert "needed to sign" in str(said.exception)


def test_a_key_that_others_can_read_is_not_used(clinic):
    party = clinic / "parties" / "north"
    with pytest.raises(FedVLError, match="fedvl federation join"):
        check_key(party)
    make_join_request(party)
    check_key(party)
    (party / "state" / "key").chmod(0o640)
    with pytest.raises(FedVLError, match="Others can read"):
        check_key(party)
    (party / "state" / "key").unlink()
    with pytest.raises(FedVLError, match=r"has no key; make it with fedvl federation join .* --renew"):
        check_key(party)
    write_private(party / "state" / "key", make_key())
    with pytest.raises(
        FedVLError, match=r"key is not a secret that this client made: its SHA-256 is not in audit.jsonl"
    ):
        check_key(party)
