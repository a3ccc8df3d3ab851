"""What the page of a client shows of its folder."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.sites import join_all, make_site

from fedvl.deployment.membership import make_join_request
from fedvl.deployment.site_view import Work
from fedvl.deployment.state import log_of
from fedvl.errors import FedVLError


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Three clients of a federation with secure aggregation, elsewhere, who have joined; nothing is pinned or approved."""
    return join_all(tmp_path_factory.mktemp("clinic") / "clinic")


@pytest.fixture
def site(shared, tmp_path):
    return make_site(shared, tmp_path)


def test_a_dry_run_shows_what_would_leave_and_what_attacks_learn(site, shared):
    site.act("/roster", {"content": (shared / "roster.json").read_text()})
    site.act("/pin", {"fingerprint": site.state().participants.fingerprint})
    site.act("/rehearse", {})
    site.do(*site.jobs.get())
    assert site.state().failed == ""
    (asked,) = site.state().experiments
    found: Any = asked.dry_run
    assert [(each.kind, each.shape) for each in found.leaves] == [("train", [10]), ("train", [10, 256])]
    assert sum(each.bytes for each in found.leaves) == 4 * 10 * 257
    assert found.attacks
    assert "this is a rehearsal" in found.refusal
    json.dumps(site.state().model_dump())


def test_a_folder_from_elsewhere_is_shown_as_such_until_its_person_adopts_it(shared, tmp_path):
    site = make_site(shared, tmp_path, joined=False)
    make_join_request(site.folder)
    (site.folder / "state" / "origin.json").unlink()
    assert "was not made here" in site.state().problem
    with pytest.raises(FedVLError, match="was not made here"):
        site.act("/policy", {"content": "least_images = 1"})
    site.act("/join", {"moved": True})
    assert site.state().problem == ""


def test_the_log_is_shown_newest_first_with_hashes_shortened_and_nothing_unseen(site):
    log_of(site.folder).append("declined", experiment="e" * 64, reason="no\u202e\x1b")
    first, second = site.state().log[:2]
    assert (first.kind, first.text) == ("declined", "experiment eeeeeeeeeeee..., reason no\\u202e\\x1b")
    assert second.kind == "moved"
    assert len(first.time) == len("2026-01-02 03:04:05")


def test_a_spent_budget_is_shown_as_the_log_has_it(site):
    told = {"run": "a" * 32, "round": 2, "unit": "record", "epsilon": 1.5, "delta": 1e-5}
    log_of(site.folder).append("budget", **told, of="train", sampling="", rate=0.1, sigma=2.0, steps=3, account="pld")
    (found,) = site.state().budget
    assert found.model_dump() == told


def test_what_is_being_done_is_shown_beside_the_folder(site):
    work = Work(data="x", work="dry run", busy=True, ready=False, connected=True, failed="no", said=["b"], faults=None)
    shown = site.view.state(work, {})
    assert Work(**shown.model_dump(include=set(Work.model_fields))) == work
    assert (shown.name, shown.names, shown.server) == ("a", ["a", "b", "c"], "fed.example.org:9443")


def test_a_survey_is_not_shown_as_a_run(site):
    log = log_of(site.folder)
    for run in ("a" * 32, "b" * 32):
        log.append("begun", run=run, experiment="e" * 64)
    log.append("surveyed", run="a" * 32)
    assert [(each.run, each.finished) for each in site.state().runs] == [("b" * 32, False)]
