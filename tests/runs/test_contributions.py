"""The value of coalitions: from sums and by retraining, against runs of the coalitions themselves."""

import pytest
from helpers.closed_form import finished, settings
from helpers.runs import run

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.runs.contents import Federation
from fedvl.runs.contributions import by_retraining, by_sent_statistics, by_statistics, plan_of, value_coalitions
from fedvl.runs.settings import resolve_experiment

LINEAR = {
    "method": {"name": "linear"},
    "data": {"shots": 6, "clients": 3, "minimum": 0},
    "federation": {"rounds": 2, "threads": 1},
}


def accuracy_without(asked, clients):
    return run({**asked, "federation": {**asked["federation"], "withdrawn": clients}}).accuracy


@pytest.mark.parametrize(("game", "asked"), [(by_statistics, settings()), (by_retraining, LINEAR)])
def test_a_coalition_is_worth_the_accuracy_of_a_run_without_the_others(game, asked):
    value = game(resolve_experiment(asked))
    everyone = frozenset(range(asked["data"]["clients"]))
    assert value(everyone) == run(asked).accuracy
    assert value(everyone - {1}) == accuracy_without(asked, [1])
    assert value(frozenset()) == run(asked).zero_shot_accuracy


def test_sums_and_retraining_agree():
    experiment = resolve_experiment(settings())
    from_sums, retrained = by_statistics(experiment), by_retraining(experiment)
    for coalition in (frozenset({0}), frozenset({1, 4}), frozenset({0, 2, 3})):
        assert from_sums(coalition) == retrained(coalition)


def test_shares_of_a_run_add_up_and_are_kept_in_its_folder(tmp_path):
    folder = finished(tmp_path / "run", resolve_experiment(settings()))
    plan = plan_of(folder, None)
    assert (plan.orders, plan.coalitions, plan.retrains) == (0, 32, False)
    found = value_coalitions(folder, plan, Silent())
    assert found.total == folder.result.accuracy
    assert sum(found.shapley) == pytest.approx(found.total - found.empty, abs=1e-9)
    folder.write_contributions(found)
    assert folder.contributions is not None
    assert folder.contributions.shapley == pytest.approx(list(found.shapley))


def between_machines(path, experiment, monkeypatch, sent):
    """A run whose server keeps the sums that each client sent, or only their sum."""
    of_all = LocalEngine.sum_statistics

    def sum_statistics(engine, number, cohort, shared):
        each = {client: engine.sent_statistics(number, client, shared) for client in cohort} if sent else {}
        return of_all(engine, number, cohort, shared)._replace(each=each)

    monkeypatch.setattr(LocalEngine, "sum_statistics", sum_statistics)
    folder = finished(path, experiment)
    folder.write_federation(Federation(federation="clinic", run="a" * 32))
    return folder


def test_between_machines_coalitions_are_those_of_the_sums_that_clients_sent(tmp_path, monkeypatch):
    experiment = resolve_experiment(settings())
    folder = between_machines(tmp_path / "run", experiment, monkeypatch, sent=True)
    plan = plan_of(folder, None)
    assert (plan.players, plan.coalitions, plan.retrains) == ((0, 1, 2, 3, 4), 32, False)
    simulated, sent = by_statistics(experiment), by_sent_statistics(folder)
    for coalition in (frozenset(), frozenset({0}), frozenset({1, 4}), frozenset({0, 2, 3}), frozenset(range(5))):
        assert sent(coalition) == simulated(coalition)
    found = value_coalitions(folder, plan, Silent())
    assert found.total == folder.result.accuracy
    assert sum(found.shapley) == pytest.approx(found.total - found.empty, abs=1e-9)


def test_between_machines_a_server_without_single_sums_values_nobody(tmp_path, monkeypatch):
    folder = between_machines(tmp_path / "run", resolve_experiment(settings()), monkeypatch, sent=False)
    with pytest.raises(FedVLError, match="no sums of single clients"):
        plan_of(folder, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"federation": {"per_round": 2, "rounds": 2, "threads": 1}}, "--per-round 3"),
        ({"evaluation": {"protocol": "personal"}}, "one accuracy on one test"),
    ],
)
def test_runs_without_a_common_value_are_refused(tmp_path, changes, message):
    folder = finished(tmp_path / "run", resolve_experiment({**LINEAR, **changes}))
    with pytest.raises(FedVLError, match=message):
        plan_of(folder, None)
