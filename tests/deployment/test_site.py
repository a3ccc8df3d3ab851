"""The page of a client: its actions are those of the terminal."""

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
from PIL import Image

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.sites import join_all, make_site

from fedvl.data.faults import FAULT_KINDS
from fedvl.deployment import site as module
from fedvl.deployment.audit_log import read_log
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


def test_what_the_page_does_not_send_is_refused(site):
    for path, given in (("/join", {"more": 1}), ("/pin", {}), ("/start", {"stay": True}), ("/policy", {"content": 3})):
        with pytest.raises(FedVLError, match=r"Give '\w+' as the page does: "):
            site.act(path, given)
    assert not site.state().busy


def test_another_key_takes_the_place_of_the_first(site):
    first, request = site.state().key, (site.folder / "a.request.json").read_text()
    site.act("/join", {"renew": True})
    assert site.state().key not in ("", first)
    assert (site.folder / "a.request.json").read_text() != request
    secrets = [entry["file"] for entry in read_log(site.folder).chain.entries if entry["kind"] == "secret"]
    assert secrets == ["key", "key"]


def test_the_check_of_images_shows_faults_and_their_files(site, tmp_path):
    site.act("/check", {})
    site.do(*site.jobs.get())
    assert site.state().failed.startswith("There are no images to check")
    for label, shade in (("cat", 50), ("dog", 200)):
        for number in range(3):
            path = tmp_path / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), (shade, 9 * number, 70)).save(path)
    (tmp_path / "images" / "cat" / "torn.png").write_bytes(b"not a picture")
    site.data = str(tmp_path / "images")
    site.act("/check", {})
    site.do(*site.jobs.get())
    assert site.state().failed == ""
    found = {each.title: each for each in site.state().faults}
    assert found[FAULT_KINDS["unreadable"].title].files == ["cat/torn.png"]
    assert found[FAULT_KINDS["unreadable"].title].fix == FAULT_KINDS["unreadable"].fix


class Serving:
    """A client that serves until it is stopped, or once."""

    site: Any
    made: list[Any] = []

    def __init__(self, folder, data, say, survey=False):
        self.survey, self.stopping, self.served = survey, True, []
        self.made.append(self)

    def watch(self, bundle):
        return nullcontext("the watch")

    def prepare(self, display):
        assert self.site.connected is None, "it answers nothing before its images are ready"

    def serve(self, watch, stay):
        self.served.append((watch, stay, self.stopping))
        assert self.site.state().connected
        self.site.act("/stop", {})


@pytest.mark.parametrize("path, survey, stay", [("/start", False, True), ("/survey", True, False)])
def test_stop_ends_the_client_that_answers_runs_or_a_survey(path, survey, stay, site, monkeypatch):
    monkeypatch.setattr(module, "Client", Serving)
    monkeypatch.setattr(Serving, "made", [])
    monkeypatch.setattr(Serving, "site", site, raising=False)
    site.stay = True
    site.act("/stop", {})  # of nothing
    site.act(path, {})
    site.do(*site.jobs.get())
    assert site.state().failed == ""
    (client,) = Serving.made
    assert (client.survey, client.served, client.stopping) == (survey, [("the watch", stay, False)], True)
    assert not site.state().connected
