"""scaffold: three rounds against a plain PyTorch loop, and the settings that it is right for."""

from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import RAGGED, run_quietly, small_federation, small_method
from torch.nn.functional import cross_entropy

from fedvl.errors import FedVLError
from fedvl.federation.journal import Journal
from fedvl.federation.orders import order_of
from fedvl.runs.requirements import check_method
from fedvl.runs.settings import resolve_experiment
from fedvl.tensors import digest, flatten

RATE, EPOCHS, BATCH, SERVER_RATE = 0.05, 2, 4, 0.7
TRAINING = {"learning_rate": RATE, "local_epochs": EPOCHS, "batch_size": BATCH, "momentum": 0.0}


def reference(federation, rounds, cohorts):
    """Algorithm 1 with option II, one client after the other, in autograd and double precision."""
    engine, scale = federation.engine, federation.method.scale
    x = {name: federation.shared[name].double() for name in ("weight", "bias")}
    c = {name: torch.zeros_like(tensor) for name, tensor in x.items()}
    own = [{name: torch.zeros_like(tensor) for name, tensor in x.items()} for _ in RAGGED]
    for index in range(rounds):
        moves, changes = [], []
        for client in cohorts[index]:
            rows = engine.rows[client]
            features, labels = engine.data.inputs["features"][rows].double(), engine.data.labels[rows]
            y, steps = {name: tensor.clone() for name, tensor in x.items()}, 0
            for epoch in range(EPOCHS):
                order = order_of(0, index, client, len(rows), epoch)
                for batch in order.split(min(BATCH, max(RAGGED))):
                    leaves = [tensor.requires_grad_() for tensor in y.values()]
                    loss = cross_entropy(scale * features[batch] @ y["weight"].T + y["bias"], labels[batch])
                    gradients = dict(zip(y, torch.autograd.grad(loss, leaves), strict=True))
                    y = {n: (y[n] - RATE * (gradients[n] - own[client][n] + c[n])).detach() for n in y}
                    steps += 1
            new = {n: own[client][n] - c[n] + (x[n] - y[n]) / (steps * RATE) for n in x}
            moves.append({n: y[n] - x[n] for n in x})
            changes.append({n: new[n] - own[client][n] for n in x})
            own[client] = new
        count = len(cohorts[index])
        x = {n: x[n] + SERVER_RATE * sum(move[n] for move in moves) / count for n in x}
        c = {n: c[n] + sum(change[n] for change in changes) / len(RAGGED) for n in x}
    return x, c, own


@pytest.mark.parametrize("settings", [{}, {"per_round": 3}, {"one_by_one": True}, {"secure_sum": True}])
def test_three_rounds_equal_a_plain_loop(settings):
    federation = small_federation(small_method("scaffold", server_rate=SERVER_RATE, scale=1.0), TRAINING, **settings)
    engine = federation.engine
    expected = small_federation(small_method("scaffold", scale=1.0), TRAINING)
    run_quietly(federation)
    cohorts = [[c for c in record.cohort if RAGGED[c]] for record in federation.records]
    x, c, own = reference(expected, 3, cohorts)
    exact = 1e-6
    for name, tensor in x.items():
        torch.testing.assert_close(federation.shared[name].double(), tensor, rtol=0, atol=exact)
        torch.testing.assert_close(federation.shared[f"c.{name}"].double(), c[name], rtol=0, atol=exact)
        for client in engine.private:
            kept = engine.private[client][f"c_i.{name}"].double()
            torch.testing.assert_close(kept, own[client][name], rtol=0, atol=exact)
    assert len(engine.private) == len({client for cohort in cohorts for client in cohort})
    assert any(tensor.abs().max() > 0.01 for tensor in c.values())


def test_a_resumed_run_has_the_same_weights_and_variates(tmp_path):
    whole = run_quietly(small_federation(small_method("scaffold"), TRAINING, rounds=4))
    journal = Journal(tmp_path / "journal")
    run_quietly(replace(small_federation(small_method("scaffold"), TRAINING, rounds=2), journal=journal))
    resumed = replace(small_federation(small_method("scaffold"), TRAINING, rounds=4), journal=journal)
    resumed.restore()
    run_quietly(resumed)
    assert digest(resumed.shared) == digest(whole.shared)
    assert digest(flatten(resumed.engine.private)) == digest(flatten(whole.engine.private))


@pytest.mark.parametrize(
    ("training", "setting"),
    [
        ({"optimiser": "adam"}, "optimiser=sgd"),
        ({"momentum": 0.9}, "momentum=0.0"),
        ({"schedule": "cosine"}, "schedule"),
    ],
)
def test_optimisers_for_which_the_variates_are_wrong_are_refused(training, setting):
    experiment = resolve_experiment({"method": {"name": "scaffold"}, "training": training})
    with pytest.raises(FedVLError, match=f"'scaffold' is derived for training.{setting}"):
        check_method(small_method("scaffold"), experiment)
    check_method(small_method("scaffold"), resolve_experiment({"method": {"name": "scaffold"}}))


def test_it_declares_what_the_table_says():
    assert_declared("scaffold")
