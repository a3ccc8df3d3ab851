"""fedvl doctor: one line per finding, and what to do about it."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from fedvl import __version__
from fedvl.commands import doctor
from fedvl.commands.federation import approve_runs
from fedvl.deployment import extras, keys
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.keys import days_left
from fedvl.deployment.membership import admit_participant, create, make_join_request, read_federation
from fedvl.errors import FedVLError

LINEAR = {"method": {"name": "linear"}, "data": {"dataset": "cifar10-mini"}}
EVERY = ("python", "torch_build", "torchvision", "embedded_models", "embedded_images", "cache_folder", "npm", "extras")


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """A federation of two parties, of which north has joined."""
    folder = tmp_path_factory.mktemp("founded") / "clinic"
    create(folder, ["north", "south"], "fed.example.org", 9443, resolve_for_parties(LINEAR, 2))
    admit_participant(folder, make_join_request(folder / "parties" / "north"))
    return folder


@pytest.mark.parametrize("kind, sound", [("good", True), ("note", True), ("bad", False)])
def test_a_bad_finding_is_what_makes_an_installation_unsound(kind, sound, monkeypatch, capsys):
    for name in EVERY:
        monkeypatch.setattr(doctor, name, lambda: [("good", "fine")])
    monkeypatch.setattr(doctor, "npm", lambda: [(kind, "a sentence [in brackets]")])
    assert doctor.examine() is sound
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EVERY)
    assert lines.count("ok   fine") == len(EVERY) - 1
    mark = {"good": "ok  ", "note": "note", "bad": "bad "}[kind]
    assert lines[6] == f"{mark} a sentence [in brackets]"


def test_a_federations_folder_is_examined_if_it_is_given(clinic, monkeypatch, capsys):
    for name in EVERY:
        monkeypatch.setattr(doctor, name, lambda: [])
    assert doctor.examine(clinic)
    assert "1 of 2 parties are admitted" in capsys.readouterr().out


@pytest.mark.parametrize("error", [FedVLError("it is damaged."), OSError("it is damaged.")])
def test_an_error_is_a_bad_finding(error):
    def check():
        raise error

    assert doctor.guarded(check) == [("bad", "it is damaged.")]


def test_versions_of_fedvl_and_python_are_named():
    ((kind, sentence),) = doctor.python()
    assert (kind, sentence) == (
        "good",
        f"fedvl {__version__} on Python {sys.version_info[0]}.{sys.version_info[1]}.{sys.version_info[2]}",
    )


@pytest.mark.parametrize("gpu", ["NVIDIA H200", None])
def test_the_processor_that_torch_uses_is_named(gpu, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert doctor.torch_build() == [("good", f"torch {torch.__version__}, {gpu or 'no GPU, the CPU is used'}")]


@pytest.mark.parametrize("error, kinds", [(None, []), (ImportError, ["note"]), (RuntimeError, ["note"])])
def test_a_torchvision_that_cannot_be_imported_is_noted(error, kinds, monkeypatch):
    def load(name):
        if error:
            raise error

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", load)
    assert [kind for kind, _ in doctor.torchvision()] == kinds


def test_no_torchvision_is_nothing_to_tell(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor.torchvision() == []


def test_embedded_models_and_images_are_opened():
    models, images = doctor.embedded_models(), doctor.embedded_images()
    assert {kind for kind, _ in (*models, *images)} == {"good"}
    assert [sentence.split()[2] for _, sentence in models] == ["fedvl-tiny", "fedvl-tiny-vilt"]
    assert "cifar10-mini" in " ".join(sentence for _, sentence in images)


@pytest.mark.parametrize("free, kind", [(2 * 10**9, "good"), (2 * 10**9 - 1, "note")])
def test_a_cache_with_less_than_two_gigabytes_is_noted(free, kind, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free if path == tmp_path else 0))
    ((found, sentence),) = doctor.cache_folder()
    assert found == kind
    assert sentence.startswith(f"feature cache {tmp_path / 'not' / 'yet'}, 2 GB free")
    assert sentence.endswith("set FEDVL_CACHE to another folder") == (kind == "note")


def test_a_cache_that_cannot_be_written_is_bad(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    sentence = f"the feature cache {tmp_path / 'cache'} is not writable: set FEDVL_CACHE to a writable folder"
    assert doctor.cache_folder() == [("bad", sentence)]
    assert asked == [(tmp_path, os.W_OK)]


@pytest.mark.parametrize("path, kind", [("/usr/bin/npm", "good"), (None, "note")])
def test_npm_is_needed_to_get_data_alone(path, kind, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: path)
    assert [kind for kind, _ in doctor.npm()] == [kind]


def test_an_extra_that_is_not_installed_is_noted_with_its_command(monkeypatch):
    def version(package):
        if package == "pillow-heif":
            raise importlib.metadata.PackageNotFoundError
        return "1.2"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = doctor.extras()
    assert ("good", "extra parquet: pyarrow 1.2") in found
    assert [each for each in found if each[0] != "good"] == [
        ("note", 'extra heic is not installed: pip install "pillow-heif>=1.1" if you want it')
    ]


def test_a_federation_shows_how_long_certificates_are_valid_and_who_is_missing(clinic, monkeypatch):
    assert days_left(clinic / "server.crt") in (824, 825)
    findings = doctor.federation_folder(clinic)
    assert len(read_federation(clinic).parties) == 2
    assert ("good", "1 of 2 parties are admitted") in findings
    assert ("note", "not admitted: south (fedvl federation join, then admit)") in findings
    assert any(kind == "good" and "the server's certificate is valid for 82" in said for kind, said in findings)


@pytest.mark.parametrize(
    "days, kind, sentence",
    [
        (-3, "bad", "certificate has expired for 3 days"),
        (-1, "bad", "certificate has expired for 1 days"),
        (0, "note", "certificate is valid for 0 days"),
        (59, "note", "certificate is valid for 59 days"),
        (60, "good", "certificate is valid for 60 days"),
    ],
)
def test_a_certificate_that_expires_soon_is_noted_and_the_servers_can_be_renewed(
    days, kind, sentence, clinic, monkeypatch
):
    monkeypatch.setattr("fedvl.deployment.keys.days_left", lambda path: days)
    renew = "" if kind == "good" else f"; fedvl federation renew {clinic}"
    assert doctor.federation_folder(clinic)[:2] == [
        (kind, f"the authority's {sentence}"),
        (kind, f"the server's {sentence}{renew}"),
    ]


def test_a_partys_folder_has_its_key(clinic):
    party = clinic / "parties" / "north"
    findings = doctor.federation_folder(party)
    assert [sentence.split()[1] for _, sentence in findings[:2]] == ["authority's", "party's"]
    with pytest.raises(FedVLError, match="fedvl federation join"):
        doctor.federation_folder(clinic / "parties" / "south")


def test_experiments_are_examined_with_extras_policy_and_approval(tmp_path, monkeypatch):
    create(tmp_path / "clinic", ["north", "south"], "fed.example.org", 9443, resolve_for_parties(LINEAR, 2))
    party = tmp_path / "clinic" / "parties" / "north"
    make_join_request(party)
    approve = f"fedvl federation approve {party}"
    *_, policy, experiment = doctor.federation_folder(party)
    assert policy == ("good", "policy.toml is valid")
    assert experiment == ("note", f"experiment linear is not approved: {approve}")
    policy_file = party / "state" / "policy.toml"
    policy_file.write_text("most_rounds = 3\n")
    assert "The line most_rounds of this party's policy.toml is 3" in doctor.federation_folder(party)[-1][1]
    policy_file.write_text("most_rounds = many\n")
    with pytest.raises(FedVLError, match="is not valid TOML"):
        doctor.federation_folder(party)
    policy_file.unlink()
    assert ("note", f"there is no policy.toml yet: {approve} writes one") in doctor.federation_folder(party)

    private = resolve_for_parties({**LINEAR, "privacy": {"unit": "record"}, "method": {"name": "linear"}}, 2)
    (party / "experiments" / "private.toml").write_text(private.to_toml())
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    kind, told = doctor.federation_folder(party)[-1]
    assert kind == "bad"
    assert told.startswith("experiment private: Differential privacy (--privacy) needs dp_accounting: pip install")


def test_a_clock_before_the_certificate_is_named(clinic, monkeypatch):
    monkeypatch.setattr(keys, "datetime", SimpleNamespace(now=lambda zone: datetime.now(zone) - timedelta(days=3)))
    with pytest.raises(FedVLError, match=r"The clock of this machine says .* is valid from .*: set the clock\."):
        doctor.federation_folder(clinic)
    with pytest.raises(FedVLError, match="set the clock"):
        approve_runs(clinic / "parties" / "north", yes=True)


def test_an_expired_certificate_is_named_before_approval(clinic, monkeypatch):
    monkeypatch.setattr(keys, "datetime", SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(days=20_000)))
    with pytest.raises(FedVLError, match=r"ca\.crt expired on 20.*the server's operator makes a new one"):
        approve_runs(clinic / "parties" / "north", yes=True)
