"""A site answers a survey, takes part and stops in a real federation from its page alone, and reads its figures there."""

import json
import re
import urllib.request
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.machines import LATEST, as_users_start, ended, make_federation, wait_until

from fedvl.data.sources import open_dataset
from fedvl.deployment.files import resolve_for_parties

SITES = ("east", "west")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "method": {"name": "linear"},
    "training": {"local_epochs": 1},
    "federation": {"rounds": 1, "threads": 1, "deadline": 45},
}


def write_images(folder):
    """Six training and four test images of three classes for each site, in turn."""
    split, names = open_dataset("cifar10-mini").splits["train"], open_dataset("cifar10-mini").class_names
    for label in range(3):
        for place, row in enumerate(np.flatnonzero(split.labels == label)[:20].tolist()):
            path = folder / SITES[place % 2] / ("train" if place < 12 else "test") / names[label]
            path.mkdir(parents=True, exist_ok=True)
            split.read(row).save(path / f"{row}.png")


def call(address, token, path, given=None):
    body = None if given is None else json.dumps(given).encode()
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address + path, body, headers)) as answer:
        return json.load(answer)


def test_a_site_refuses_then_approves_answers_a_survey_takes_part_and_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    write_images(tmp_path / "images")
    experiment = resolve_for_parties(SETTINGS, 2)
    folder = make_federation(tmp_path / "clinic", {site: [experiment] for site in SITES})
    log = tmp_path / "page.log"
    parties = folder / "parties"
    page = as_users_start("client", parties / "east", "--data", tmp_path / "images/east", "--page", log=log)
    other = as_users_start("client", parties / "west", "--data", tmp_path / "images/west", log=tmp_path / "west.log")
    survey = as_users_start("survey", folder, "--out", tmp_path / "survey", log=tmp_path / "survey.log")
    with ended([page, other, survey]):
        wait_until(lambda: "#token=" in log.read_text(), page)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/#token=(\S+)", log.read_text())
        assert found is not None
        address, token = found.groups()

        def state() -> Any:
            return call(address, token, "/state")

        asked = state()["experiments"][0]
        assert asked["decision"] == "approved", "all is on this machine"
        call(address, token, "/refuse", {"identity": asked["identity"], "reason": "Not yet."})
        assert state()["experiments"][0]["decision"] == "refused"
        call(address, token, "/approve", {"identity": asked["identity"], "roster": asked["roster"]})
        call(address, token, "/survey", {})
        assert survey.wait(LATEST) == 0, (tmp_path / "survey.log").read_text()
        wait_until(lambda: not state()["busy"], page)
        surveyed = json.loads((tmp_path / "survey" / "survey.json").read_text())
        assert (surveyed["sites"], surveyed["images"]) == (["east"], 30), "30 images: the policy rounds to fives"
        assert surveyed["refused"][0].startswith("west: it says: This client is not there for a survey")
        assert (parties / "east" / "state" / "survey.html").is_file()
        server = as_users_start("server", folder, "--out", tmp_path / "run", "--quiet", log=tmp_path / "run.log")
        with ended([server]):
            call(address, token, "/start", {})
            assert server.wait(LATEST) == 0, (tmp_path / "run.log").read_text()
        wait_until(lambda: not state()["busy"], page)
        told = state()
        call(address, token, "/start", {})
        wait_until(lambda: state()["connected"], page)
        call(address, token, "/stop", {})
        wait_until(lambda: not state()["busy"], page)
        assert not state()["connected"]
    assert told["failed"] == ""
    (run,) = told["runs"]
    assert (run["finished"], run["method"], run["rounds"]) == (True, "linear", 1)
    assert [(each["round"], bool(each["bytes_up"]), each["refused"]) for each in run["told"]] == [(1, True, [])]
    figures = dict(run["figures"])
    result = json.loads((parties / "east/state/runs" / run["run"] / "result.json").read_text())
    assert run["images"] == sum(map(sum, result["confusion"])) == 12
    assert figures["Accuracy, %"]["value"] == pytest.approx(result["accuracy"])
