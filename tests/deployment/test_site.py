"""The page of a client: what it shows of its folder, and that its actions are those of the terminal."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.sites import join_all, make_site

from fedvl.deployment.audit_log import read_log
from fedvl.deployment.membership import make_join_request
from fedvl.deployment.policy import check_approved, read_experiments, read_policy
from fedvl.deployment.roster import pinned_roster
from fedvl.deployment.state import log_of
from fedvl.errors import FedVLError


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Three clients of a federation with secure aggregation, elsewhere, who have joined; nothing is pinned or approved."""
    return join_all(tmp_path_factory.mktemp("clinic") / "clinic")


@pytest.fixture
def site(shared, tmp_path):
    return make_site(shared, tmp_path)


def roster_text(shared):
    return (shared / "roster.json").read_text()


def test_the_page_joins_as_the_terminal_does(shared, tmp_path):
    site = make_site(shared, tmp_path, joined=False)
    before = site.state()
    assert (before.joined, before.key, before.policy, before.participants) == (False, "", "", None)
    assert [each.decision for each in before.experiments] == ["open"]
    site.act("/join", {})
    after = site.state()
    assert after.joined
    assert after.key.startswith("SHA256:") or len(after.key) > 20
    assert (site.folder / "a.request.json").is_file()
    assert "evaluations" in after.policy
    with pytest.raises(FedVLError, match="exists"):
        site.act("/join", {})


def test_a_roster_is_imported_compared_and_pinned(site, shared):
    assert site.state().experiments[0].problem.startswith("Secure aggregation needs a pinned roster")
    with pytest.raises(FedVLError, match="This is not a roster"):
        site.act("/roster", {"content": "{}"})
    site.act("/roster", {"content": roster_text(shared)})
    found: Any = site.state().participants
    assert not found.pinned
    assert [each.name for each in found.members] == ["a", "b", "c"]
    with pytest.raises(FedVLError, match="compare its fingerprint again"):
        site.act("/pin", {"fingerprint": "another"})
    site.act("/pin", {"fingerprint": found.fingerprint})
    assert pinned_roster(site.folder).fingerprint == found.fingerprint
    assert site.state().participants.pinned


def pinned(site, shared):
    site.act("/roster", {"content": roster_text(shared)})
    site.act("/pin", {"fingerprint": site.state().participants.fingerprint})
    return site.state().experiments[0]


def test_approval_is_for_what_was_shown_and_a_refusal_ends_it_with_a_reason(site, shared):
    asked = pinned(site, shared)
    assert (asked.secure_sum, asked.rounds, asked.clients, asked.decision) == (True, 1, 3, "open")
    for changed in ({"identity": "0" * 64}, {"roster": "another"}):
        with pytest.raises(FedVLError, match="since it was shown"):
            site.act("/approve", {"identity": asked.identity, "roster": asked.roster, **changed})
    site.act("/approve", {"identity": asked.identity, "roster": asked.roster})
    log = log_of(site.folder)
    check_approved(log, asked.identity, asked.roster, site.folder)
    assert site.state().experiments[0].decision == "approved"
    for reason in ("", " ", 3, "x" * 301):
        with pytest.raises(FedVLError, match="Give 'reason'"):
            site.act("/refuse", {"identity": asked.identity, "reason": reason})
    site.act("/refuse", {"identity": asked.identity, "reason": "Not before the ethics vote."})
    assert (site.state().experiments[0].decision, site.state().experiments[0].reason) == (
        "refused",
        "Not before the ethics vote.",
    )
    with pytest.raises(FedVLError, match=r"refuses the experiment .*: Not before the ethics vote"):
        check_approved(log, asked.identity, asked.roster, site.folder)
    site.act("/approve", {"identity": asked.identity, "roster": asked.roster})
    check_approved(log, asked.identity, asked.roster, site.folder)
    kinds = [entry["kind"] for entry in read_log(site.folder).chain.entries]
    assert kinds[-3:] == ["approved", "declined", "approved"]
    assert [line.kind for line in site.state().log[:3]] == kinds[:-4:-1]


def test_an_experiment_that_changed_after_it_was_shown_is_not_approved(site, shared):
    asked = pinned(site, shared)
    path = next((site.folder / "experiments").glob("*.toml"))
    path.write_text(path.read_text().replace("rounds = 1", "rounds = 900"))
    with pytest.raises(FedVLError, match="has changed since it was shown"):
        site.act("/approve", {"identity": asked.identity, "roster": asked.roster})
    assert read_experiments(site.folder)["linear"].federation.rounds == 900
    assert site.state().experiments[0].decision == "open"


def test_a_policy_is_written_only_if_it_is_valid(site):
    site.act("/policy", {"content": "least_images = 77\n"})
    assert read_policy(site.folder / "state").least_images == 77
    for wrong in ("least_images = -1", "no_such_line = 1", "= = ="):
        with pytest.raises(FedVLError):
            site.act("/policy", {"content": wrong})
    assert read_policy(site.folder / "state").least_images == 77
    assert not list((site.folder / "state").glob("*.new"))


def test_jobs_are_done_one_after_the_other_and_their_errors_are_shown(site):
    site.act("/start", {})
    assert site.state().busy
    with pytest.raises(FedVLError, match="Wait until this is done"):
        site.act("/rehearse", {})
    site.do(*site.jobs.get())
    assert not site.state().busy
    assert site.state().failed, "it has neither a roster nor an approval"
    with pytest.raises(FedVLError, match="There is no action /other"):
        site.act("/other", {})


def test_a_dry_run_shows_what_would_leave_and_what_attacks_learn(site, shared):
    pinned(site, shared)
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
