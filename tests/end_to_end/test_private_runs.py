"""Runs under differential privacy: from a flag to the report, and with every client a party of its own."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
from helpers.small import RAGGED, run_quietly
from PIL import Image
from typer.testing import CliRunner

import fedvl
from fedvl.cli import app
from fedvl.config import PrivacyConfig
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder

SMALL: dict[str, Any] = {"clients": 5, "rounds": 2, "quiet": True, "shots": 20, "training.batch_size": 200}
SECURE: dict[str, Any] = {"secure_sum": True, "least_clients": 2}
RECORD, CLIENT = PrivacyConfig(unit="record", epsilon=8), PrivacyConfig(unit="client", epsilon=8, clip=0.05)
WITH_DATA = [client for client, size in enumerate(RAGGED) if size]


@pytest.mark.parametrize(
    "flag, unit, sampling",
    [
        ("client:eps=3", "client", "every client in every round"),
        ("record:eps=8,delta=1e-6,clip=5", "record", "each image in a step by a secret chance"),
    ],
)
def test_a_run_says_in_its_result_and_report_what_it_spent(flag, unit, sampling, tmp_path):
    done = fedvl.run(out=str(tmp_path / "run"), privacy=flag, **SMALL)
    result = RunFolder(tmp_path / "run").result
    spent, ceiling = result.privacy, float(flag.split("=")[1].split(",")[0])
    assert (spent.unit, spent.delta) == (unit, 1e-6 if "delta" in flag else 1e-5)
    assert spent.sampling.startswith(sampling)
    assert 0.98 * ceiling < spent.epsilon <= ceiling
    page = (tmp_path / "run" / "report.html").read_text()
    of = "image" if unit == "record" else unit
    assert f"epsilon {spent.epsilon:.2f}, delta {spent.delta:g}, of each {of}; {spent.sampling}" in page
    assert spent.simulated
    assert "Epsilon assumes that the noise is secret; in this simulation the seed is published" in page
    assert "Neighbouring datasets: with" in page
    assert ("Add --secure-sum" in page) == (unit == "record")
    listed = {item.name: item.state for item in spent.released}
    assert listed["class counts, names of images"] == "not covered"
    for name, state in listed.items():
        assert f"<td>{name}</td><td>{state}</td>" in page
    assert result.per_round_loss == [None, None]
    assert "privacy.unit" in result.command
    again = fedvl.run(out=str(tmp_path / "again"), privacy=flag, **SMALL)
    assert RunFolder(tmp_path / "again").result.state_sha256 == result.state_sha256
    assert again.accuracy == done.accuracy


def test_a_budget_may_be_of_each_patient(tmp_path):
    lines = ["path,label,split,patient"]
    for index in range(24):
        Image.new("RGB", (8, 8), (10 * index, 255 - 10 * index, 100)).save(tmp_path / f"{index}.png")
        lines.append(f"{index}.png,{'cat' if index % 2 else 'dog'},{'test' if index > 19 else 'train'},p{index // 4}")
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    given = {**SMALL, "dataset": str(tmp_path), "clients": 2, "partition": "iid", "privacy": "record:eps=3"}
    del given["shots"]
    for unit, group in (
        (None, "With --unit patient the budget is of each patient."),
        ("patient", "of each patient; each patient in"),
    ):
        fedvl.run(out=str(tmp_path / f"by {unit}"), unit=unit, **given)
        spent = json.loads((tmp_path / f"by {unit}" / "result.json").read_text())["privacy"]
        assert spent["of"] == (unit or "image")
        assert spent["group"]["column"] == "patient"
        assert spent["group"]["largest"] == 4 if unit else 2 <= spent["group"]["largest"] <= 4
        assert group in (tmp_path / f"by {unit}" / "report.html").read_text()
    with pytest.raises(FedVLError, match="--unit patient is for record-level privacy"):
        fedvl.run(unit="patient", **{**given, "privacy": "client:eps=3"})


def test_a_run_without_privacy_says_nothing_of_it(tmp_path):
    fedvl.run(out=str(tmp_path / "run"), **SMALL)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["privacy"] is None
    assert "Differential privacy" not in (tmp_path / "run" / "report.html").read_text()


def test_what_cannot_be_private_is_told_on_the_command_line():
    done = CliRunner().invoke(app, ["run", "--method", "fst-cbdg", "--privacy", "record:eps=8", "--quiet"])
    assert isinstance(done.exception, FedVLError)
    assert "an image counts in the loss or label of other images" in str(done.exception)


# --- between machines

if find_spec("flwr") is not None:
    from helpers.parties import local_federation, remote_federation, same


@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
@pytest.mark.parametrize("updates", [True, False])
def test_a_partys_ledger_has_its_reports_beside_its_updates(updates, tmp_path):
    """FedPP's counts have discrete noise in shares; each party books what the server's record of the run counts."""
    options = {"visual_prompts": updates, "counts": "shares", "interval": 1}
    remote, grid = remote_federation("fedpp", tmp_path, options=options, privacy=CLIENT, **SECURE)
    run_quietly(remote)
    spent = remote.records[-1].privacy
    for party in grid.parties:
        ledger = party.log.entries("budget")
        if party.number not in WITH_DATA:
            assert ledger == []
            continue
        trained = [record.round for record in remote.records if updates]
        assert [entry["round"] for entry in ledger if entry["of"] == "train"] == trained
        reports = [entry for entry in ledger if entry["of"] == "report"]
        assert [entry["round"] for entry in reports] == [
            r.round for r in remote.records if r.privacy.counts is not None
        ]
        assert len(reports) > 1
        counted = {record.privacy.counts for record in remote.records if record.privacy.counts is not None}
        assert {entry["sigma"] for entry in reports} == counted
        assert all(entry["sigma"] == spent.sigma for entry in ledger if entry["of"] == "train")
        assert {entry["account"] for entry in ledger} == {"rdp"}
        assert ledger[-1]["epsilon"] == pytest.approx(spent.epsilon)
        assert ledger[-1]["epsilon"] <= CLIENT.epsilon


@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed")
@pytest.mark.parametrize("privacy, settings", [(RECORD, {}), (RECORD, SECURE), (CLIENT, SECURE), (CLIENT, {})], ids=str)
def test_parties_give_the_bits_of_the_local_engine(privacy, settings, tmp_path):
    remote, grid = remote_federation("linear", tmp_path, privacy=privacy, **settings)
    local = run_quietly(local_federation("linear", privacy=privacy, **settings))
    assert same(run_quietly(remote), local)
    for party in grid.parties:
        for path in party.folder.glob("*-train.json"):
            told = json.loads(path.read_text())
            assert told["loss"] == 0
            assert told["weight"] in ((0, 1) if privacy is CLIENT else (0, *RAGGED))
        rounds = [entry.round for entry in party.spent]
        own_noise = privacy is RECORD or settings is SECURE  # a share of it at client level
        assert rounds == ([1, 2, 3] if own_noise and party.number in WITH_DATA else [])
    if own_noise:
        assert 7.8 < max(grid.parties[client].spent[-1].epsilon for client in WITH_DATA) <= 8
