"""What server and client agree on before the first round."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("flwr") is None:
    pytest.skip("Flower is not installed", allow_module_level=True)

from helpers.small import small_method

from fedvl.config import Experiment
from fedvl.deployment.files import experiment_id, resolve_for_parties
from fedvl.methods import load_method, method_names
from fedvl.runs.requirements import check_method, rule_between_machines
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator


def test_server_and_client_must_have_the_same_settings_and_weights():
    def identity(weights, **settings):
        encoder: Any = SimpleNamespace(fingerprint=weights)
        return experiment_id(resolve_experiment(settings), encoder)

    assert identity("abc", seed=0) == identity("abc", seed=0) == identity("abc")  # 0 is the default
    assert len({identity("abc", seed=0), identity("abc", seed=1), identity("abd", seed=0)}) == 3


def test_between_machines_updates_are_merged_by_a_rule_that_withstands_hostile_clients():
    def rule(clients=3, method="linear", **settings):
        return resolve_for_parties({"method": {"name": method}, **settings}, clients).federation.robust

    assert rule() == rule(clients=10) == "centred-clipping"
    assert rule(federation={"robust": "median"}) == "median"
    assert rule(federation={"robust": "mean"}) == "mean"
    assert rule(federation={"secure_sum": True}) == "mean"
    assert rule(privacy={"unit": "record"}) == rule(privacy={"unit": "client"}) == "mean"
    assert rule(clients=2) == rule(federation={"per_round": 2}) == rule(federation={"sequential": True}) == "mean"
    assert rule(method="fed-prime", evaluation={"protocol": "missing"}) == rule(method="zero-shot") == "mean"
    assert rule(method="ridge") == "mean"  # there is no rule for sums of statistics
    assert resolve_experiment({}).federation.robust == "mean"  # of a simulation


@pytest.mark.parametrize("name", [name for name in method_names() if small_method(name).role.statistics])
def test_a_federation_of_statistics_can_be_prepared_without_any_option(name):
    experiment = resolve_for_parties({"method": {"name": name}}, 3)
    check_method(small_method(name), experiment)


@pytest.mark.parametrize("name", method_names())
def test_the_rule_is_for_methods_of_which_the_server_needs_sums_alone(name):
    method = small_method(name)
    start = method.start(torch_generator(0, "start"))
    if rule_between_machines(load_method(name), Experiment()) != "mean":
        assert {method.role.needs(tensor) for tensor in start} == {"sum"}
        assert not method.role.sent
