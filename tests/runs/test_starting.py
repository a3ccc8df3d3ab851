"""A run that starts from the class weights of another: its first scores, and what is refused."""

import pytest
import torch
from helpers.closed_form import finished, settings
from helpers.runs import OPENER

from fedvl.deployment.files import resolve_for_parties
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.runs.contributions import check_coalitions
from fedvl.runs.preparation import prepare
from fedvl.runs.settings import resolve_experiment, resume_key
from fedvl.runs.withdrawal import without_client
from fedvl.serve.model import TrainedModel


@pytest.fixture(scope="module")
def ridge(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("start") / "ridge", resolve_experiment(settings()))


def starting(folder, name="linear", rounds=0, **further):
    start = {"method": {"name": name}, "training": {"start_from": str(folder.path)}}
    federation = {**settings()["federation"], "rounds": rounds}
    return resolve_experiment({**settings(), **start, "federation": federation, **further})


@pytest.mark.parametrize("name", ["linear", "fst-cbdg", "adapterfl"])
def test_before_the_first_round_it_has_the_accuracy_of_the_run(ridge, name, tmp_path):
    options = {"method": {"name": name, **({"ratio": 0.0} if name == "adapterfl" else {})}}
    run = finished(tmp_path / name, starting(ridge, name, **options))
    assert run.result.accuracy == ridge.result.accuracy
    (note,) = [note for note in run.result.notes if "started from" in note]
    assert "of ridge" in note
    assert ridge.result.state_sha256[:12] in note


def test_what_was_trained_from_it_answers_without_it(ridge, tmp_path):
    source = finished(tmp_path / "source", ridge.experiment)
    run = finished(tmp_path / "run", starting(source, "cachefl", 1, method={"name": "cachefl", "cache_shots": 2}))
    source.path.rename(tmp_path / "elsewhere")
    asked = prepare(ridge.experiment, Silent(), OPENER).test.samples.inputs["features"][:8]
    answered = TrainedModel(run).user().conversation.ask({"features": asked}).scores
    plain = answered - answered.mean(1, keepdim=True)
    shared, _ = ridge.tensors()
    head = shared["scale"] * (asked.double() @ shared["weight"] + shared["bias"])
    assert torch.corrcoef(torch.stack([plain.flatten().double(), head.flatten()]))[0, 1] > 0.9


def test_another_start_is_another_run_and_old_keys_stay(ridge):
    assert resume_key(starting(ridge)) != resume_key(resolve_experiment({**settings(), "method": {"name": "linear"}}))


@pytest.mark.parametrize(
    ("name", "further", "sentence"),
    [
        ("promptfl", {}, "does not start from class weights"),
        ("linear", {"privacy": {"unit": "client", "epsilon": 3}}, "does not hide the images of the run"),
        ("linear", {"data": {**settings()["data"], "dataset": "emoji-mini"}}, "has other classes"),
    ],
)
def test_what_cannot_start_from_it_is_refused(ridge, name, further, sentence):
    with pytest.raises(FedVLError, match=sentence):
        prepare(starting(ridge, name, **further), Silent(), OPENER)


def test_scores_that_are_not_linear_are_refused(ridge, tmp_path):
    waves = finished(
        tmp_path / "waves", resolve_experiment({**settings(), "method": {"name": "ridge", "dimensions": 8}})
    )
    with pytest.raises(FedVLError, match="not linear in the vectors"):
        prepare(starting(waves), Silent(), OPENER)


def test_a_missing_run_is_one_sentence(tmp_path):
    experiment = resolve_experiment({**settings(), "method": {"name": "linear"}, "training": {"start_from": "no/such"}})
    with pytest.raises(FedVLError, match="no run in no/such"):
        prepare(experiment, Silent(), OPENER)


def test_clients_of_the_start_neither_withdraw_from_it_nor_share_its_accuracy(ridge, tmp_path):
    run = finished(tmp_path / "run", starting(ridge))
    with pytest.raises(FedVLError, match="in which the client counts too"):
        without_client(run.experiment, 1)
    with pytest.raises(FedVLError, match=r"run without training\.start_from"):
        check_coalitions(run)


def test_parties_have_no_such_run(ridge):
    with pytest.raises(FedVLError, match="parties do not have it"):
        resolve_for_parties({"method": {"name": "linear"}, "training": {"start_from": str(ridge.path)}}, 3)
