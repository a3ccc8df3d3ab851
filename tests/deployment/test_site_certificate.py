"""The certificate of a site: issued for a run that is as its log says and gives nothing away, and for no other."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.parties import HEAD, RUN

from fedvl.audit.certificate import Certificate
from fedvl.audit.finding import SERVER, Finding, OwnAudit, Unmeasured
from fedvl.audit.own_update import ALONE, NOT_TRIED, OWN_ATTACKS, PLAIN
from fedvl.audit.perform import NAMES
from fedvl.cli import app
from fedvl.data.sources import open_dataset
from fedvl.deployment.audit_log import read_log
from fedvl.deployment.client import Client
from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.membership import create
from fedvl.deployment.messages import Header, Message, pack_tensors
from fedvl.deployment.site_certificate import (
    certificate_of,
    check_figures,
    check_leaving,
    check_own_attacks,
    check_site_model,
    check_spent,
    leaving_rows,
    site_run,
    what_leaves,
)
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder
from fedvl.tensors import load, save

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "method": {"name": "linear"},
    "training": {"local_epochs": 1},
    "federation": {"rounds": 1, "threads": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A client's folder whose run is over, and its images: 40 for training and 40 for the test."""
    root = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(root / "cache"))
        split = open_dataset("cifar10-mini").splits["train"]
        for label in range(4):
            for number, row in enumerate(np.flatnonzero(split.labels == label)[:20].tolist()):
                path = (
                    root
                    / "images"
                    / ("train" if number % 2 else "test")
                    / open_dataset("cifar10-mini").class_names[label]
                )
                path.mkdir(parents=True, exist_ok=True)
                split.read(row).save(path / f"{row}.png")
        create(root / "clinic", ["north", "south"], "127.0.0.1", 9443, resolve_for_parties(SETTINGS, 2))
        party = root / "clinic" / "parties" / "north"
        client = Client(party, str(root / "images"), print)
        client.prepare(Silent())
        ((identity, ready),) = client.ready.items()
        shared = ready.prepared.method.first_shared(ready.prepared.experiment.seed)
        asked: Any = {"run": RUN, "experiment": identity, "attempt": 7, "client": 0, "log": HEAD}
        trained = client.answer(Message(Header(**asked, round=0, kind="train"), pack_tensors(shared)))
        assert not trained.header.problem
        client.answer(Message(Header(**asked, round=1, kind="finish"), trained.payload))
        yield root


@pytest.fixture(scope="module")
def client(place):
    found = Client(place / "clinic/parties/north", str(place / "images"), print)
    found.prepare(Silent())
    return found


@pytest.fixture
def run(client, tmp_path):
    """The run of the client, in a folder that a test may change."""
    found = site_run(client)
    return replace(found, folder=RunFolder(shutil.copytree(found.folder.path, tmp_path / RUN)))


@pytest.fixture(scope="module")
def certified(place):
    """What the command says, and the certificate that it writes, with every leak accepted."""
    party = place / "clinic/parties/north"
    words = ["audit", str(party), "--certificate", "--dataset", str(place / "images"), "--quiet"]
    done = CliRunner().invoke(app, [*words, *(f"--fail-above={name}=1" for name in NAMES)])
    path = RunFolder.open(party).path
    return done, Certificate.model_validate_json((path / "certificate.json").read_bytes()), path


def test_a_run_that_is_as_its_log_says_is_certified_at_its_site(certified, client):
    done, found, path = certified
    assert (found.issued, found.reasons, done.exit_code) == (True, [], 0), done.output
    assert [check.holds for check in found.checks] == [True] * 6
    assert found.sha256["config.toml"] == RunFolder(path).settings_sha256
    assert found.sha256["last line of the log"] == read_log(client.folder).chain.head
    assert "--certificate --dataset" in found.command
    rows = {row.name: row for row in found.leaving}
    assert (rows["weight"].shape, rows["weight"].bytes, rows["weight"].masked) == ("10 x 256", 10240, False)
    assert rows["number of examples"].examined == ["the number of images alone"]
    assert any(each.name.startswith("membership") and each.interval for each in found.attacks)
    assert "Issued: all conditions hold." in (path / "certificate.html").read_text()
    assert "the images of north" in (path / "assessment.md").read_text()


def test_without_accepted_leaks_a_shown_one_refuses_the_certificate(certified, run):
    """The same figures, with no limit that a person gave."""
    _, found, _ = certified
    shown = [each for each in found.attacks if each.verdict == "shown"]
    assert shown, "training images of a linear head can be told from its update"
    finding = Finding("membership", SERVER, "AUC", 0.9, (0.8, 0.95), 0.5, "A sentence.", of=PLAIN)
    refused = certificate_of(run, audit_of([finding]), [], {}, "")
    assert not refused.issued
    assert any("Leaks are shown" in sentence for sentence in refused.reasons)


# --- a manipulated run


def test_the_model_is_that_of_the_servers_last_message(run):
    assert check_site_model(run).holds
    found = check_site_model(replace(run, entries=[]))
    assert (found.holds, "no last message" in found.sentence) == (False, True)
    path = run.folder.path / "model.safetensors"
    changed = {name: tensor + 0.01 for name, tensor in load(path).items()}
    sha256 = save(path, changed)
    assert "model.safetensors" in check_site_model(replace(run, folder=RunFolder(run.folder.path))).sentence
    rewrite(run, files_sha256={**run.folder.result.files_sha256, "model.safetensors": sha256})
    found = check_site_model(replace(run, folder=RunFolder(run.folder.path)))
    assert (found.holds, "the model was changed" in found.sentence) == (False, True)


def rewrite(run, **changes):
    content = json.loads((run.folder.path / "result.json").read_bytes())
    (run.folder.path / "result.json").write_text(json.dumps({**content, **changes}))


def test_the_model_is_tested_again(run):
    assert check_figures(run).holds
    rewrite(run, accuracy=99.0)
    found = check_figures(replace(run, folder=RunFolder(run.folder.path)))
    assert (found.holds, "The result says 99.0 %" in found.sentence) == (False, True)


def test_a_run_of_an_experiment_that_is_gone_has_no_certificate(client):
    ready, client.ready = client.ready, {}
    try:
        with pytest.raises(FedVLError, match="does not hold the experiment of the run in"):
            site_run(client)
    finally:
        client.ready = ready


# --- what was not examined


def audit_of(findings, unmeasured=()):
    return OwnAudit(
        findings=list(findings),
        unmeasured=list(unmeasured),
        images=30,
        attackers_images=30,
        held_out=False,
        remedies=[],
        budget=None,
        seconds=1.0,
    )


def finding(name, of=PLAIN, items=()):
    return Finding(name, SERVER, "AUC", 0.5, (0.4, 0.52), 0.5, "A sentence.", items=items, of=of)


def untried(*names, sentence="It does not apply."):
    return [Unmeasured(name, SERVER, sentence, PLAIN) for name in names]


def test_an_attack_without_a_result_or_without_time_fails_the_certificate():
    names = [name for name in OWN_ATTACKS if name != "membership"]
    assert check_own_attacks(audit_of([finding("membership")], untried(*names))).holds
    absent = check_own_attacks(audit_of([finding("membership")], untried(*names[1:])))
    assert (absent.holds, absent.sentence) == (False, f"There is no result of {names[0]}.")
    late = untried(*names, sentence=f"{NOT_TRIED}: 120 seconds were over.")
    assert "had no time" in check_own_attacks(audit_of([finding("membership")], late)).sentence
    few = check_own_attacks(audit_of([], untried(*OWN_ATTACKS)))
    assert (few.holds, few.sentence) == (False, "Whether images can be identified was not measured.")


def test_what_leaves_by_itself_is_attacked_and_what_a_mask_hides_does_not_count():
    sums = "a sum with 2 imitated others"
    audit = audit_of([finding("membership", ALONE, ("weight",)), finding("membership", sums, ("bias",))])
    assert [each.of for each in what_leaves(audit).findings] == [sums]
    sent = {"train": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}}
    numbers = {"weight": 30.0, "examples": 30, "loss": 0.5}
    rows = leaving_rows({"audit": audit, "leaves": sent, "numbers": numbers, "images": 30, "least_clients": 3})
    assert [(row.name, row.bytes, row.masked) for row in rows[:2]] == [("bias", 8, True), ("weight", 24, True)]
    found = check_leaving(rows)
    assert (found.holds, found.sentence) == (False, "No attack examined weight, training loss, which leaves.")


def test_what_was_spent_is_compared_with_what_was_agreed(run):
    assert check_spent(run).holds
    private = run.prepared.experiment.privacy.model_copy(update={"unit": "record", "epsilon": 3.0})
    experiment = run.prepared.experiment.model_copy(update={"privacy": private})
    noisy = replace(run, prepared=replace(run.prepared, experiment=experiment))
    assert not check_spent(noisy).holds, "the log has no noise"
    spent = [{"kind": "budget", "epsilon": epsilon} for epsilon in (1.5, 2.9)]
    assert check_spent(replace(noisy, entries=spent)).sentence.startswith("The log has epsilon 2.90 of 3 that")
    assert check_spent(replace(noisy, entries=spent)).holds
    assert not check_spent(replace(noisy, entries=[*spent, {"kind": "budget", "epsilon": 3.1}])).holds
