"""A survey of three real sites under secure aggregation: twelve planted faults are found, and none at clean sites."""

import json
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from data.test_check import PLANTED
from helpers import planted
from helpers.machines import LATEST, ended, fedvl, make_federation

from fedvl.deployment.files import resolve_for_parties

SITES = ("east", "north", "south")
COMMON = {"threads": 1, "deadline": 300, "rounds": 1, "least_clients": 3, "secure_sum": True}
DATA = {"dataset": "cifar10-mini", "classes": list(planted.CLASSES)}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_survey(place, name: str) -> dict[str, Any]:
    logs = [place.root / f"{name}-{site}.log" for site in SITES]
    clients = [
        fedvl("client", place.folder / "parties" / site, "--data", place.root / name / site, "--survey", log=log)
        for site, log in zip(SITES, logs, strict=True)
    ]
    out = place.root / f"survey-{name}"
    server = fedvl("survey", place.folder, "--class-names", "--out", out, log=place.root / f"{name}.log")
    with ended([server, *clients]):
        assert server.wait(LATEST) == 0, (place.root / f"{name}.log").read_text() + logs[0].read_text()
    return dict(json.loads((out / "survey.json").read_text()))


def test_planted_faults_are_found_by_kind_and_only_their_site_is_shown_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    for name in ("clean", "planted"):
        planted.write_sites(tmp_path / name, SITES)
    for number, plant in reversed(list(enumerate(PLANTED))):
        plant(tmp_path / "planted" / SITES[number % 3])
    experiment = resolve_for_parties(
        {"device": "cpu", "method": {"name": "linear"}, "data": DATA, "federation": COMMON}, 3
    )
    folder = make_federation(tmp_path / "clinic", {site: [experiment] for site in SITES})
    place = SimpleNamespace(root=tmp_path, folder=folder)
    for site in ("east", "south"):
        policy = folder / "parties" / site / "state" / "policy.toml"
        policy.write_text(policy.read_text().replace("class_names = false", "class_names = true"))
    found = run_survey(place, "planted")
    assert found["secure_sum"]
    assert found["compared"] == ["east", "south"]
    assert found["refused"][0].startswith("north: it says: The line class_names of this party's policy.toml is false")
    assert found["sites"] == list(SITES)
    assert {each["kind"]: each["sites"] for each in found["faults"]} == dict.fromkeys(set.union(*PLANTED.values()), 1)
    page = (folder / "parties" / "east" / "state" / "survey.html").read_text()
    assert 'data-kind="unreadable"' in page
    assert 'data-kind="unreadable"' not in (folder / "parties" / "north" / "state" / "survey.html").read_text()
    for site in SITES:  # the policy of each allows one survey; this is another
        policy = folder / "parties" / site / "state" / "policy.toml"
        policy.write_text(policy.read_text().replace("surveys = 1", "surveys = 2"))
    clean = run_survey(place, "clean")
    assert (clean["faults"], clean["strangers"], clean["rare"]) == ([], 0, [])
    assert clean["images"] == clean["readable"] == 270
