"""The egress certificate: issued for a run that is whole and gives nothing away, and for no other."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.audited import evidence_of
from helpers.audits import made_up_audit, made_up_epsilon
from helpers.finished import RUNS, finish

from fedvl.audit import certificate as module
from fedvl.audit import label_histogram, membership, membership_replay, perform
from fedvl.audit.canaries import EPSILON_FINDING
from fedvl.audit.certificate import (
    Certificate,
    Check,
    assessment,
    certify,
    check_attacks,
    check_epsilon,
    check_examined,
    check_leaks,
    check_run,
    write_certificate,
)
from fedvl.audit.finding import CLIENT, SERVER, Audit, Finding, Unmeasured
from fedvl.audit.perform import ATTACKS
from fedvl.data.sources import OPEN_ANEW
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder
from fedvl.tensors import load, save

FIRST = [kind.NAMES[0] for kind in ATTACKS]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate") / "run"
    finish(folder, RUNS["linear"])
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return RunFolder(shutil.copytree(finished, tmp_path / "run"))


def finding(name, value, interval, view=SERVER, chance=0.5):
    return Finding(name, view, "AUC", value, interval, chance, "A sentence.")


def sound() -> Audit:
    """An audit by which results may leave: everything was examined, nothing shown."""
    findings = [finding("membership", 0.5, (0.45, 0.54)), finding("label-histogram", 0.0, (-0.2, 0.04), chance=0.0)]
    made = {each.name for each in findings}
    leaves = [row for row in made_up_audit().leaves if row.examined]
    untried = [Unmeasured(name, SERVER, "It does not apply.") for name in FIRST if name not in made]
    return made_up_audit().model_copy(update={"findings": findings, "unmeasured": untried, "leaves": leaves})


def test_a_whole_run_that_gives_nothing_away_is_certified_with_its_hashes(run, tmp_path):
    found = certify(run, sound(), {}, Silent(), "fedvl audit run --certificate")
    assert (found.issued, found.reasons) == (True, [])
    assert [check.holds for check in found.checks] == [True] * 5
    assert found.sha256["config.toml"] == run.settings_sha256
    assert found.sha256["state"] == run.result.state_sha256
    assert found.sha256["model.safetensors"] == run.result.files_sha256["model.safetensors"]
    page = write_certificate(found, run.result, tmp_path)
    text = page.read_text()
    assert "Issued: all conditions hold." in text
    assert "&lt;b&gt;evil&lt;/b&gt;" in text
    assert "0.45 to 0.54" in text
    assert "It does not apply." in text
    assert "fedvl audit run --certificate" in text
    assert Certificate.model_validate_json((tmp_path / "certificate.json").read_bytes()) == found
    draft = (tmp_path / "assessment.md").read_text()
    assert "\\<b\\>evil" in draft
    assert draft.count("*To be completed by the controller.*") == 8
    assert "membership, seen by the server: 0.50 (0.45 to 0.54; chance level 0.50)" in draft


# --- a manipulated run


def rewrite(run, **changes):
    content = json.loads((run.path / "result.json").read_bytes())
    (run.path / "result.json").write_text(json.dumps({**content, **changes}))
    return RunFolder(run.path)


def test_a_better_accuracy_is_noticed(run):
    found = check_run(rewrite(run, accuracy=99.0), Silent(), OPEN_ANEW)
    assert (found.holds, "differs in accuracy:" in found.sentence) == (False, True)


def test_a_changed_model_is_noticed(run):
    path = run.path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "model.safetensors" in check_run(run, Silent(), OPEN_ANEW).sentence
    assert not check_run(run, Silent(), OPEN_ANEW).holds


def test_a_model_with_its_hash_is_noticed(run):
    """Whoever changes the model can change the hash that lies beside it: the run is repeated."""
    path = run.path / "model.safetensors"
    sha256 = save(path, {name: tensor + 0.01 for name, tensor in load(path).items()})
    hashes = {**run.result.files_sha256, "model.safetensors": sha256}
    found = check_run(rewrite(run, files_sha256=hashes), Silent(), OPEN_ANEW)
    assert (found.holds, "differs in files_sha256:" in found.sentence) == (False, True)


def test_other_settings_are_noticed(run):
    path = run.path / "config.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    found = check_run(RunFolder(run.path), Silent(), OPEN_ANEW)
    assert not found.holds
    assert "state_sha256" in found.sentence


def test_a_run_that_is_not_finished_has_no_certificate(run):
    (run.path / "result.json").unlink()
    with pytest.raises(FedVLError, match="is not finished; a certificate is for a finished run"):
        certify(RunFolder(run.path), sound(), {}, Silent(), "")


# --- leaks, and what was not examined


def test_a_leak_that_is_shown_fails_unless_its_interval_is_accepted():
    found = sound().model_copy(update={"findings": [finding("membership", 0.77, (0.70, 0.84))]})
    refused = check_leaks(found, {})
    assert (refused.holds, refused.sentence) == (
        False,
        "Leaks are shown, or above their limit: membership by the server (0.77, 0.70 to 0.84).",
    )
    assert not check_leaks(found, {"membership": 0.83}).holds  # the value is below, its interval is not
    accepted = check_leaks(found, {"membership": 0.84})
    assert (accepted.holds, accepted.sentence) == (
        True,
        "Accepted by the person who ran the audit: membership up to 0.84.",
    )


def test_a_limit_holds_for_what_is_not_shown_too():
    found = sound().model_copy(update={"findings": [finding("membership", 0.5, (0.30, 0.70))]})
    assert check_leaks(found, {}).holds
    assert not check_leaks(found, {"membership": 0.6}).holds


def test_an_item_that_no_attack_examined_fails():
    assert check_examined(made_up_audit()) == Check(
        name="Everything that leaves was examined", holds=False, sentence="No attack examined gist, which leaves."
    )
    constant = made_up_audit().leaves[1].model_copy(update={"note": "the same for all clients"})
    assert check_examined(made_up_audit().model_copy(update={"leaves": [constant]})).holds


@pytest.mark.parametrize("missing", FIRST)
def test_an_attack_without_value_or_reason_fails(missing):
    found = sound()
    for kind in ("findings", "unmeasured"):
        found = found.model_copy(update={kind: [each for each in getattr(found, kind) if each.name != missing]})
    told = check_attacks(found)
    assert not told.holds
    assert told.sentence.startswith(f"There is no result of {missing}.")


def test_an_attack_that_the_methods_code_stopped_fails():
    reason = "The method fails for an imitated client of 3 images: no."
    found = sound().model_copy(update={"unmeasured": [*sound().unmeasured, Unmeasured("picture", SERVER, reason)]})
    assert check_attacks(found).sentence == "The method's code failed in picture."


def test_identification_must_have_been_measured_by_the_server():
    found = sound().model_copy(update={"findings": [finding("membership", 0.5, (0.45, 0.54), view=CLIENT)]})
    untried = [*found.unmeasured, Unmeasured("label-histogram", SERVER, "It does not apply.")]
    found = found.model_copy(update={"unmeasured": untried})
    assert "Whether images can be identified was not measured" in check_attacks(found).sentence
    assert check_attacks(found.model_copy(update={"leaves": []})).holds  # nothing leaves


def test_a_budget_that_is_exceeded_or_was_not_tested_fails():
    assert check_epsilon(sound()).holds
    assert check_epsilon(sound().model_copy(update={"epsilon": made_up_epsilon(violated=False)})).holds
    assert not check_epsilon(sound().model_copy(update={"epsilon": made_up_epsilon()})).holds
    untested = Unmeasured(EPSILON_FINDING, SERVER, "Canaries are placed in training.")
    assert not check_epsilon(sound().model_copy(update={"unmeasured": [untested]})).holds


def test_a_certificate_that_is_not_issued_says_so_everywhere(run, tmp_path, monkeypatch):
    whole = Check(name="The run is what its folder says", holds=True, sentence="Yes.")
    monkeypatch.setattr(module, "check_run", lambda *words: whole)
    found = certify(run, made_up_audit(), {}, Silent(), "fedvl audit run --certificate")
    assert not found.issued
    assert len(found.reasons) == 3
    text = write_certificate(found, run.result, tmp_path).read_text()
    assert "Not issued: do not release these results." in text
    assert "not examined" in text
    assert "which is **not issued**" in assessment(found, run.result)
    assert json.loads((tmp_path / "certificate.json").read_bytes())["issued"] is False


def test_a_planted_leak_in_a_methods_messages_is_refused(monkeypatch):
    """The audit of a method that sends a hash of its images, as it really is."""
    path = Path(__file__).parents[1] / "helpers" / "leaks" / "class_means.py"
    kinds = (label_histogram, membership, membership_replay)
    monkeypatch.setattr(perform, "ATTACKS", kinds)
    evidence = evidence_of(path)
    findings = [each for each in perform.make_attacks(evidence, Silent()) if isinstance(each, Finding)]
    leaves = perform.leaves(evidence, findings)
    found = made_up_audit().model_copy(update={"findings": findings, "leaves": leaves})
    checks = [check_leaks(found, {}), check_examined(found)]
    assert not all(check.holds for check in checks)
