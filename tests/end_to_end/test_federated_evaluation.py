"""A run is evaluated at real sites: figures of sums equal those of pooled scores, and a server that lies learns no more."""

import json
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.machines import LATEST, ended, fedvl, kill, make_federation, of_folder, start_server, wait_until
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.data.sources import open_dataset
from fedvl.deployment import evaluation
from fedvl.deployment.audit_log import read_log
from fedvl.deployment.evaluation import evaluate_sites
from fedvl.deployment.files import resolve_for_parties
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.calibration import calibration_error
from fedvl.runs.evaluation import FROM_SERVER, prepare_others, read_evaluation, read_thresholds, shares_of
from fedvl.runs.folder import RunFolder

TESTED = {"east": 12, "north": 6, "south": 4}  # images of each class
SITES = list(TESTED)
COMMON = {"threads": 1, "chunk": 1, "deadline": 45, "rounds": 1, "least_clients": 2, "sum_threshold": 0.6}
ROUNDING = 1e-9
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_images(folder):
    """Each site gets other images of five classes: 4 of each for training, and for the test as TESTED says."""
    split = open_dataset("cifar10-mini").splits["train"]
    names = open_dataset("cifar10-mini").class_names
    left = {
        site: {"train": dict.fromkeys(range(5), 4), "test": dict.fromkeys(range(5), tested)}
        for site, tested in TESTED.items()
    }
    for row, label in enumerate(split.labels.tolist()):
        for site in SITES:
            part = next((part for part in ("train", "test") if left[site][part].get(label, 0)), None)
            if part is not None:
                left[site][part][label] -= 1
                path = folder / site / part / names[label]
                path.mkdir(parents=True, exist_ok=True)
                split.read(row).save(path / f"{row}.png")
                break


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three sites at work, with one finished run of secure sums and one without."""
    root = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVL_CACHE", str(root / "cache"))
        write_images(root / "images")
        experiments = [
            resolve_for_parties(
                {"device": "cpu", "method": {"name": name}, "training": {"local_epochs": 1}, "federation": federation},
                3,
            )
            for name, federation in (("linear", {**COMMON, "secure_sum": True}), ("fst-cbdg", COMMON))
        ]
        folder = make_federation(root / "clinic", dict.fromkeys(SITES, experiments))
        place = SimpleNamespace(root=root, folder=folder, clients={}, logs=root)
        place.start = lambda site: place.clients.update({site: start_site(place, site)})
        for site in SITES:
            place.start(site)
        try:
            for name in ("linear", "fst-cbdg"):
                server = start_server(place, name, root / name)
                with ended([server]):
                    assert server.wait(LATEST) == 0, (root / f"{name}.log").read_text()
            yield place
        finally:
            with ended(list(place.clients.values())):
                pass


def start_site(place, site):
    party, images = place.folder / "parties" / site, place.root / "images" / site
    return fedvl("client", party, "--data", images, "--stay", log=place.logs / f"{site}.log")


def site_runs(place, run, sites):
    return [place.folder / "parties" / site / "state" / "runs" / run.federation.run for site in sites]


def scores_of(place, run, sites):
    """The labels and shares of all test images, in one place: what the server never sees."""
    found = []
    for site, path in zip(sites, site_runs(place, run, sites), strict=True):
        own = RunFolder.open(path)
        prepared = prepare_others(own, str(place.root / "images" / site), Silent())
        found.append(shares_of(prepared, *own.tensors(), own))
    return tuple(np.concatenate(part) for part in zip(*found, strict=True))


def assert_equal_within_binning(found, labels, shares):
    for number, each in enumerate(found.classes):
        truth = labels == number
        if not truth.any():
            assert each.auroc is None
            continue
        assert abs(each.auroc.value - metrics.roc_auc_score(truth, shares[:, number])) <= each.auroc.binning + ROUNDING
        wanted = metrics.average_precision_score(truth, shares[:, number])
        assert abs(each.average_precision.value - wanted) <= each.average_precision.binning + ROUNDING
        said = shares[:, number] >= each.threshold
        assert each.sensitivity.value == pytest.approx(100 * metrics.recall_score(truth, said))
        assert each.specificity.value == pytest.approx(100 * metrics.recall_score(~truth, ~said))


def test_figures_of_one_secure_sum_are_those_of_the_pooled_scores_without_a_site_that_drops_out(place):
    """The third site is killed in the middle of the sum."""
    run = place.root / "linear"
    log = place.folder / "audit.jsonl"
    words = ("evaluate", place.folder, run, "--against", place.root / "fst-cbdg", "--json")
    evaluated = fedvl(*words, log=place.root / "evaluate.log")
    with ended([evaluated]):
        asked = '"message": "share_evaluate"'
        wait_until(lambda: any(asked in line and '"sent"' in line for line in log.read_text().splitlines()))
        kill(*of_folder(place.folder / "parties" / "south"))
        assert evaluated.wait(LATEST) == 0, (place.root / "evaluate.log").read_text()
    place.start("south")
    found: Any = read_evaluation(RunFolder(run))
    assert found.secure_sum
    assert found.by_site == {}
    assert {*found.sites, *found.missing} == set(SITES)
    labels, shares = scores_of(place, RunFolder(run), found.sites)
    assert found.pooled.images == len(labels)
    assert_equal_within_binning(found.pooled, labels, shares)
    answers = shares.argmax(1)
    assert found.pooled.accuracy.value == pytest.approx(100 * (answers == labels).mean())
    wanted = calibration_error(shares.max(1), answers == labels)
    assert abs(found.pooled.ece.value - wanted) <= found.pooled.ece.binning + ROUNDING
    page = (run / "evaluation.html").read_text()
    assert "AUROC" in page
    _, others = scores_of(place, RunFolder(place.root / "fst-cbdg"), found.sites)
    gained, lost = (
        (answers == labels) & (others.argmax(1) != labels),
        (answers != labels) & (others.argmax(1) == labels),
    )
    assert (found.against.gained, found.against.lost, found.against.images) == (gained.sum(), lost.sum(), len(labels))
    assert found.against.p == pytest.approx(stats.binomtest(int(gained.sum()), int((gained | lost).sum())).pvalue)
    chosen = [read_thresholds(RunFolder(path)) for path in (run, *site_runs(place, RunFolder(run), found.sites))]
    assert all(each.shares == chosen[0].shares for each in chosen)
    assert [each.chosen for each in chosen[1:]] == [FROM_SERVER] * len(found.sites)
    assert "DeLong&#39;s test of areas needs the scores of single images" in page


def test_counts_that_leave_by_themselves_have_no_small_cells(place):
    run = RunFolder(place.root / "fst-cbdg")
    found = evaluate_sites(run, 1, Silent())
    assert found.sites == SITES
    assert not found.missing
    assert not found.secure_sum
    assert set(found.by_site) == set(SITES)
    # four images of a class are fewer than least_cell = 5
    assert [found.by_site[site].images for site in SITES] == [60, 30, 0]
    assert found.pooled.images == 90
    labels, shares = scores_of(place, run, ["east", "north"])
    assert_within_binning(found.pooled, labels, shares)
    with pytest.raises(FedVLError, match="clients send counts of both in a secure sum only"):
        evaluate_sites(run, 1, Silent(), RunFolder(place.root / "linear"))


def assert_within_binning(found, labels, shares):
    for number, each in enumerate(found.classes):
        if each.auroc is not None:
            wanted = metrics.roc_auc_score(labels == number, shares[:, number])
            assert abs(each.auroc.value - wanted) <= each.auroc.binning + ROUNDING


def test_a_server_that_asks_again_after_images_came_gets_the_same_counts(place):
    """The difference of two answers would tell about the new image."""
    run = RunFolder(place.root / "fst-cbdg")
    before = evaluate_sites(run, 1, Silent())
    added = sorted((place.root / "images" / "east" / "train").rglob("*.png"))[0]
    (place.root / "images" / "east" / "test" / added.parent.name / "new.png").write_bytes(added.read_bytes())
    kill(*of_folder(place.folder / "parties" / "east"))
    place.clients["east"].wait(20)
    place.start("east")
    again = evaluate_sites(run, 1, Silent())
    assert again.by_site == before.by_site
    assert again.pooled == before.pooled
    with pytest.raises(FedVLError, match=r"The line evaluations of this party's policy\.toml is 1"):
        evaluate_sites(run, 2, Silent())
    for site in SITES:
        policy = place.folder / "parties" / site / "state" / "policy.toml"
        policy.write_text(policy.read_text().replace("evaluations = 1", "evaluations = 2"))
    noisy: Any = evaluate_sites(run, 2, Silent(), noise=(8.0, 1e-5))
    assert (noisy.sites, noisy.epsilon, noisy.refused) == (SITES, 8.0, [])
    assert 0 < noisy.pooled.accuracy.noise < noisy.by_site["south"].accuracy.noise
    labels, shares = scores_of(place, run, SITES)
    wanted = 100 * (shares.argmax(1) == labels).mean()
    assert noisy.pooled.accuracy.low <= wanted <= noisy.pooled.accuracy.high
    for site in SITES:
        budgets = read_log(place.folder / "parties" / site).chain.entries
        assert [entry["of"] for entry in budgets if entry["kind"] == "budget"] == ["evaluate"]


@pytest.mark.parametrize("name", ["linear", "fst-cbdg"])
def test_a_server_cannot_have_a_model_of_its_choice_evaluated(place, name, monkeypatch):
    run = RunFolder(place.root / name)
    crafted = {key: tensor + 1 for key, tensor in run.tensors()[0].items()}
    honest: Any = vars(evaluation)["request_of"]
    monkeypatch.setattr(evaluation, "request_of", lambda shared, *words, **named: honest(crafted, *words, **named))
    for site in SITES:  # as if they had not been asked before
        for path in (place.folder / "parties" / site / "state" / "runs").glob("*/000002-*"):
            path.unlink()
    for path in run.path.glob("evaluation-sums.*"):
        path.unlink()
    with pytest.raises(FedVLError, match=r"of another model|needs 2 clients"):
        evaluate_sites(run, 1, Silent())
    said = [json.loads(line) for line in (place.folder / "audit.jsonl").read_text().splitlines()]
    assert any("of another model than the one" in entry.get("reason", "") for entry in said)


def test_the_logs_of_all_sides_agree(place):
    shown = CliRunner().invoke(
        app, ["audit", "verify", *map(str, [place.folder, *(place.folder / "parties").iterdir()])]
    )
    assert shown.exit_code == 0, shown.output
