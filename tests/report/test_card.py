"""The card of a model, against what the files of its run say."""

import hashlib
import json
from dataclasses import asdict, replace

import pytest
from scipy.stats import binomtest

from fedvl.config import Experiment
from fedvl.report.card import card_text, lineage, merging
from fedvl.runs.folder import RunFolder

HASH = "ab" * 32
BUDGET = {"unit": "client", "epsilon": 2.5, "delta": 1e-5, "sampling": "every client in every round"}
RESULT = {
    "method": "linear",
    "dataset": "cifar10-mini",
    "protocol": "closed",
    "rounds": 2,
    "seed": 7,
    "accuracy": 75.0,
    "zero_shot_accuracy": 62.5,
    "confusion": [[4, 1], [1, 2]],
    "class_names": ["cat", "dog"],
    "templates": ["a photo of a {}."],
    "model_fingerprint": "cd" * 32,
    "partition_class_names": ["cat", "dog"],
    "partition_counts": [[3, 4], [5, 0], [0, 9]],
    "state_sha256": HASH,
    "files_sha256": {"model.safetensors": "ef" * 32},
    "privacy": None,
    "finished": "2030-01-02T03:04:05+00:00",
}
ROUNDS = [
    {"round": 1, "cohort": [0, 1, 2], "dropped": [], "refused": []},
    {"round": 2, "cohort": [0, 2], "dropped": [2], "refused": [{"client": 0, "reason": "late"}]},
]


@pytest.fixture
def run(tmp_path):
    """A function that writes a run folder."""

    def write(federation=None, data=None, status=None, **changes):
        settings = {"seed": 7, "data": {"clients": 3, **(data or {})}, "federation": federation or {}}
        (tmp_path / "config.toml").write_text(Experiment.model_validate(settings).to_toml())
        (tmp_path / "result.json").write_text(json.dumps({**RESULT, **changes}))
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ROUNDS))
        if status:
            (tmp_path / "federation.json").write_text(json.dumps({"federation": "/srv/clinic", "run": "a"}))
            (tmp_path / "status.json").write_text(json.dumps(status))
        return RunFolder(tmp_path)

    return write


def card(folder, classes=("cat", "dog"), client=None, measured=None):
    found = lineage(folder, list(classes), client, {"classifier.safetensors": "01" * 32}, measured)
    assert json.loads(json.dumps(asdict(found))) == asdict(found)
    text = card_text("mine", found)
    rows = dict(
        line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| ") and line != "| | |"
    )
    return found, text, rows


def wilson(hits, images):
    low, high = binomtest(hits, images).proportion_ci(method="wilson")
    return [100 * low, 100 * high]


def test_a_simulation(run):
    found, text, rows = card(run())
    assert found.accuracy.percent == 75.0
    assert found.accuracy.interval == pytest.approx(wilson(6, 8))
    assert found.accuracy.zero_shot.percent == 62.5
    assert found.accuracy.zero_shot.interval == pytest.approx(wilson(5, 8))
    assert found.data.training_images == 21
    assert found.federation.answered == {"0": 2, "1": 1, "2": 1}
    assert rows["Rounds missed"] == "2: 1"
    assert rows["Refused updates"] == "0: 1"
    assert rows["Clients"] == "3 in a simulation, partition dirichlet:0.5"
    assert rows["Privacy budget"].startswith("none: no noise was added")
    assert rows["Secure sums"].startswith("off")
    assert (rows["Seed"], rows["state"], rows["Rule of merging"]) == ("7", HASH, "mean")
    assert rows["config.toml"] == hashlib.sha256(run().file("config.toml").read_bytes()).hexdigest()
    assert rows["classifier.safetensors of this folder"] == "01" * 32
    assert "Krizhevsky" in rows["Licence of the images"]
    assert "is not CLIP" in text
    assert "Accuracy of this export: the figure above is the run's own" in text
    measured = replace(found.accuracy, percent=50.0, of=" of client 1")
    _, text, rows = card(run(), measured=measured)
    assert rows["Accuracy"].startswith("50.00 %")
    assert "of 8 test images of client 1, protocol closed" in rows["Accuracy"]
    assert "Accuracy of this export" not in text


def test_a_federation_names_its_parties_and_nothing_of_this_machine(run):
    folder = run(
        {"secure_sum": True, "least_clients": 3, "robust": "median"},
        {"dataset": "/home/somebody/skin"},
        {"parties": ["north", "south", "west"]},
        privacy={**BUDGET, "simulated": False},
        partition_counts=[[0, 0]] * 3,
    )
    found, text, rows = card(folder)
    assert rows["Clients"] == "north, south, west"
    assert rows["Answers"] == "north: 2, south: 1, west: 1"
    assert rows["Rounds missed"] == "west: 1"
    assert rows["Privacy budget"].startswith(
        "epsilon 2.50, delta 1e-05, of each client; every client in every round. Neighbouring datasets: with all images of "
    )
    assert rows["Secure sums"] == "on: the server learned sums over at least 3 clients"
    assert rows["Rule of merging"] == "median"
    assert rows["Data"] == "skin; how many training images, the parties know"
    assert rows["Licence of the images"] == "not known to FedVL; ask its owners"
    assert not any(part in text + json.dumps(asdict(found)) for part in ("somebody", "/srv", str(folder.path)))


def test_a_revoked_party_is_listed_with_the_date_and_one_that_sent_nothing_took_no_part(run):
    parties = [
        {"name": "north", "bytes_up": 9, "bytes_down": 9, "revoked": "2026-02-03T04:05:06+00:00"},
        {"name": "south", "bytes_up": 0, "bytes_down": 9, "revoked": "2026-01-03T04:05:06+00:00"},
        {"name": "west", "bytes_up": 9, "bytes_down": 9},
    ]
    folder = run({}, {}, {"parties": ["north", "south", "west"]}, parties=parties)
    _, _, rows = card(folder)
    assert rows["Clients"] == "north, west"
    assert rows["Revoked"] == "north (2026-02-03), south (2026-01-03)"


def test_the_runs_recall_and_calibration_error_are_on_the_card(run):
    found, text, rows = card(run(per_class_recall=[80.0, None], ece=4.25))
    assert rows["Calibration error (ECE) of the run"] == "4.2 points"
    assert "| cat | 80.0 % |\n| dog | no test image |\n" in text
    assert found.recall == {"cat": 80.0, "dog": None}
    assert "## Recall" not in card(run())[1]
    assert card(run())[2]["Calibration error (ECE) of the run"] == "not known"


def test_noise_that_follows_from_a_known_seed_is_not_called_a_protection(run):
    told = "Epsilon assumes that the noise is secret; in this simulation the seed is published"
    item = {"name": "class counts", "keys": ["partition_counts"], "state": "not covered", "why": "It is a simulation."}
    for budget in (BUDGET, {**BUDGET, "simulated": True, "released": [item]}):
        found, text, rows = card(run(privacy=budget))
        assert told in rows["Privacy budget"]
        assert found.privacy.not_covered == ["class counts"] * ("released" in budget)
    assert "Privacy for what the budget does not cover: class counts." in text


def test_other_classes_or_a_personal_model_were_not_tested(run):
    for found in (card(run(), ["cat", "ship"]), card(run(), client=1)):
        assert "Accuracy of this export: the figure above is the run's own, of its own classes and models." in found[1]
    personal = {"protocol": "personal", "accuracy": 80.0, "zero_shot_weighted_accuracy": 50.0}
    found = card(run(**personal))[0].accuracy
    assert (found.percent, found.mean_over_clients, found.zero_shot.percent) == (75.0, 80.0, 50.0)
    untested = card(run(accuracy=None, confusion=[], zero_shot_accuracy=None))[2]
    assert (untested["Accuracy"], untested["Zero-shot accuracy"]) == ("not tested", "not tested")


def test_a_party_exports_its_own(run):
    rows = card(run(party="north"))[2]
    assert rows["Clients"] == "3; this is the model of north"
    assert rows["Data"].endswith("the parties know")


@pytest.mark.parametrize(("sha256", "this"), [(HASH, "without it."), ("cd" * 32, "**with it: use the one without**.")])
def test_a_withdrawal_says_which_of_the_two_models_this_is(run, sha256, this):
    folder = run()
    runs = {"folder": "/home/somebody/run", "accuracy": 75.0}
    folder.note_withdrawal(
        {
            "client": 1,
            "party": None,
            "run": {**runs, "state_sha256": "01" * 32},
            "without": {**runs, "state_sha256": sha256},
            "images": 8,
            "difference": -12.5,
            "difference_interval": [-40.0, 15.0],
            "changed": 25.0,
            "changed_interval": [3.0, 65.0],
            "distance": 1.0,
            "moved": 2.0,
            "same_draws": True,
        }
    )
    found, text, _ = card(folder)
    assert f"client 1 withdrew; this model is {this} Leaving it out changed the accuracy by -12.50 points" in text
    assert "somebody" not in text + json.dumps(asdict(found))


def test_names_of_others_are_text(run):
    names = ["a|b", "<script>", "[x](javascript:1)", "two\nlines", "`code`"]
    _, text, rows = card(run(class_names=names, confusion=[[1] * 5] * 5, partition_class_names=names,
                             partition_counts=[[1] * 5] * 3), names)  # fmt: skip
    assert rows["Classes"] == r"5: a\|b, \<script\>, \[x\]\(javascript:1\), two lines, \`code\`"
    assert "<script>" not in text


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("linear", {}, "mean"),
        ("linear", {"robust": "median"}, "median"),
        ("ridge", {}, "sums of statistics, solved by ridge"),
        ("fed-prime", {}, "fed-prime's own rule"),
        ("scaffold", {}, "mean of the updates, then scaffold's step of the server"),
        ("centralised", {}, "none: all images were in one place"),
    ],
)
def test_the_rule_of_merging_is_the_methods_own(method, settings, expected):
    assert merging(Experiment.model_validate({"method": {"name": method}, "federation": settings})) == expected


def test_of_many_names_the_first_twenty_are_shown(run, monkeypatch):
    names = [f"class {number}" for number in range(22)]
    rounds = [{"round": 1, "cohort": list(range(23)), "dropped": [], "refused": []}]
    monkeypatch.setattr(f"{__name__}.ROUNDS", rounds)
    _, _, rows = card(
        run(
            {"withdrawn": [3, 5], "attack": "noise:0.2"}, {"clients": 23}, class_names=names, confusion=[[0] * 22] * 22
        ),
        names,
    )
    assert rows["Classes"] == f"22: {', '.join(names[:20])} and 2 more in classes.json"
    assert rows["Answers"] == ", ".join(f"{number}: 1" for number in range(20)) + " and 3 more clients"
    assert rows["Rounds missed"] == rows["Refused updates"] == "none"
    assert (rows["Withdrawn"], rows["Simulated attack"]) == ("by number: 3, 5", "noise:0.2")
