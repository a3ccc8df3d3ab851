"""fedvl audit, as it is typed."""

import json

import pytest
from helpers.audits import made_up_audit

from fedvl.errors import FedVLError


@pytest.fixture
def performed(monkeypatch):
    """The arguments of audits, none of which is performed."""
    calls = []

    def perform(experiment, display, clients, rounds, trained):
        calls.append((experiment, clients, rounds, trained))
        return made_up_audit()

    monkeypatch.setattr("fedvl.audit.perform.audit", perform)
    return calls


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[method]\nname = "cachefl"\n')
    return path


def test_an_experiment_is_audited_and_its_page_lies_beside_it(call, performed, file):
    done = call("audit", "mine.toml", "--clients", "3", "--rounds", "1", "--quiet")
    assert done.exit_code == 0
    assert "Page: mine.audit.html" in done.stdout
    assert "Membership can be told." in done.stdout
    assert (file.parent / "mine.audit.html").is_file()
    ((experiment, clients, rounds, trained),) = performed
    assert (experiment.method.name, clients, rounds, trained) == ("cachefl", 3, 1, None)


def test_a_finished_run_is_audited_with_its_model(call, performed, folder_of):
    folder = folder_of("linear")
    done = call("audit", str(folder), "--out", "here.html", "--json", "--quiet")
    assert json.loads(done.stdout)["findings"][0]["name"] == "membership"
    assert sorted(performed[0][3][0]) == ["bias", "weight"]


@pytest.mark.parametrize("limit, code", [("membership=0.6", 1), ("membership=0.77", 0)])
def test_a_figure_above_its_limit_ends_with_code_1(call, performed, file, limit, code):
    done = call("audit", "mine.toml", "--quiet", "--json", "--fail-above", limit)
    assert done.exit_code == code
    assert ("Above the limit: membership" in done.stderr) is (code == 1)
    assert bool(json.loads(done.stdout)["above"]) is (code == 1)


def test_a_limit_of_an_attack_that_was_not_made_ends_with_code_2(call, performed, file):
    done = call("audit", "mine.toml", "--quiet", "--fail-above", "feature-recovery=0.1")
    assert isinstance(done.exception, FedVLError)  # the command line ends with 2
    assert "feature-recovery cannot be checked, since that attack was not made. It was not tried." in str(
        done.exception
    )


@pytest.mark.parametrize(
    "words, says",
    [
        (["nowhere"], "neither the folder of a run nor a TOML file"),
        (["mine.toml", "--fail-above", "secrets=1"], "attacks are label-histogram"),
        (["."], "There is no run in ."),
    ],
)
def test_wrong_input_is_one_sentence_and_nothing_is_performed(call, performed, file, words, says):
    done = call("audit", *words)
    assert isinstance(done.exception, FedVLError)
    assert says in str(done.exception)
    assert performed == []


def test_a_run_between_machines_is_refused(call, performed, file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('[method]\nname = "linear"\n')
    (tmp_path / "run" / "federation.json").write_text('{"federation": "clinic", "run": "1"}')
    done = call("audit", "run")
    assert "on other machines" in str(done.exception)


def test_a_certificate_is_for_a_run_and_ends_with_code_1_if_it_is_not_issued(call, performed, folder_of, file):
    """The audit that is made up shows leaks; the run is repeated as it is."""
    done = call("audit", "mine.toml", "--certificate")
    assert "give the folder of a finished run, not mine.toml" in str(done.exception)
    folder = folder_of("linear")
    done = call("audit", str(folder), "--certificate", "--quiet", "--fail-above", "membership=0.9")
    assert done.exit_code == 1
    assert f"Certificate not issued: {folder / 'certificate.html'}" in done.stderr
    assert "  No attack examined gist, which leaves." in done.stderr
    told = json.loads((folder / "certificate.json").read_bytes())
    assert told["command"] == f"fedvl audit {folder} --certificate --clients 10 --rounds 2 --fail-above membership=0.9"
    assert told["checks"][0]["holds"]
