"""The server's part of a survey: counts are added up, and who is missing is named."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from fedvl.data.survey import survey_shapes
from fedvl.deployment import survey as module
from fedvl.deployment.survey import survey_sites
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.contents import Federation
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment


def tables(images: int):
    found = {name: np.zeros(shape, np.int64) for name, shape in survey_shapes(2).items()}
    found["images"][0, 0], found["totals"][:] = images, (1, images, images)
    return found


@pytest.fixture
def folder(tmp_path):
    found = RunFolder(tmp_path / "survey")
    found.path.mkdir()
    found.describe(resolve_experiment({"method": {"name": "linear"}}))
    found.write_federation(Federation(federation=str(tmp_path), run="0" * 32))
    return found


def connect(monkeypatch, found, refusals=()):
    engine = SimpleNamespace(
        names=["east", "north"],
        reporters=[client for client in found if client is not None],
        survey=lambda classes: found,
        class_names=lambda: {1: ["keratosys", "b"], 0: ["Keratosis", "a"]},
        refused=lambda: list(refusals),
    )

    @contextmanager
    def connected(folder, display, notes):
        assert notes == "survey-sums.json", "its secure sums have a file of their own"
        yield engine, None

    monkeypatch.setattr(module, "connected", connected)
    monkeypatch.setattr(module, "read_federation", lambda place: SimpleNamespace(class_names=("a", "b")))
    monkeypatch.setattr(module, "wait_for_all", lambda engine, federation: None)


def test_counts_are_added_up_and_written(folder, monkeypatch):
    connect(monkeypatch, {0: tables(20), 1: tables(30)})
    found = survey_sites(folder, Silent())
    assert (found.images, found.classes[0].train, found.rare, found.missing) == (50, 50, ["b"], [])
    assert json.loads((folder.path / "survey.json").read_text())["sites"] == ["east", "north"]
    assert (found.compared, found.alike) == ([], []), "names are not requested unless the operator asks"


def test_class_names_of_sites_are_compared_if_the_operator_asks(folder, monkeypatch):
    connect(monkeypatch, {None: tables(50)})
    found = survey_sites(folder, Silent(), with_names=True)
    assert found.compared == ["east", "north"]
    assert [(each.one, each.other, each.sites) for each in found.alike] == [
        ("Keratosis", "keratosys", ["east", "north"])
    ]
    assert not found.clean


def test_missing_sites_and_refusals_are_named(folder, monkeypatch):
    refusal = SimpleNamespace(client=1, reason="its policy forbids it.")
    connect(monkeypatch, {0: tables(20)}, [refusal])
    found = survey_sites(folder, Silent())
    assert (found.missing, found.refused) == (["north"], ["north: its policy forbids it."])
    connect(monkeypatch, {}, [refusal])
    with pytest.raises(FedVLError, match=r"No site sent counts\. north: its policy forbids it\."):
        survey_sites(folder, Silent())


def test_a_private_experiment_is_not_surveyed(folder):
    private = folder.experiment.privacy.model_copy(update={"unit": "client"})
    folder.experiment = folder.experiment.model_copy(update={"privacy": private})
    with pytest.raises(FedVLError, match="The counts of a survey have no noise"):
        survey_sites(folder, Silent())
