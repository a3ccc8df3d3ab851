"""The page of a client without a browser: a federation whose clients have joined, and one of them to act for."""

import shutil
from pathlib import Path
from typing import Any

from fedvl.deployment.files import resolve_for_parties
from fedvl.deployment.membership import admit_participant, create, make_join_request, read_federation, read_request
from fedvl.deployment.roster import roster_of, write_roster
from fedvl.deployment.site import Site
from fedvl.deployment.state import adopt_state
from fedvl.display import Silent

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "method": {"name": "linear"},
    "data": {"dataset": "cifar10-mini", "shots": 8, "test_shots": 10},
    "training": {"local_epochs": 1},
    "federation": {"rounds": 1, "threads": 1, "secure_sum": True},
}


def join_all(folder: Path) -> Path:
    """Make a federation on another machine, whose three clients have joined; roster.json is the operator's file."""
    create(folder, ["a", "b", "c"], "fed.example.org", 9443, resolve_for_parties(SETTINGS, 3))
    for name in ("a", "b", "c"):
        shutil.copytree(folder / "parties" / name, folder / f"{name} before")
        make_join_request(folder / "parties" / name)
        admit_participant(folder, read_request(folder / "parties" / name / f"{name}.request.json"))
    write_roster(folder / "roster.json", roster_of(folder, read_federation(folder)))
    return folder


def make_site(shared: Path, place: Path, joined: bool = True) -> Site:
    """Return the page of client a, in a folder of its own."""
    folder = shutil.copytree(shared / "parties" / "a" if joined else shared / "a before", place / "a")
    if joined:
        adopt_state(folder)
    return Site(folder, None, Silent(), stay=False)
