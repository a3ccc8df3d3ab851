import math
from dataclasses import replace

import pytest
import torch
from helpers.small import RAGGED, run_quietly, small_federation, small_method

from fedvl.errors import FedVLError
from fedvl.federation.journal import Journal
from fedvl.federation.local import LocalEngine
from fedvl.methods import method_names
from fedvl.methods.linear import Linear
from fedvl.tensors import digest, flatten

# Methods whose clients keep what they trained.
KEEPING = [name for name in method_names() if small_method(name).role.trained_private]


def test_a_round_is_the_mean_of_the_clients_weighted_by_their_examples():
    federation = small_federation(small_method("linear"), rounds=1)
    trained = federation.engine.train(0, range(5), federation.shared)
    total = sum(RAGGED)
    expected = torch.zeros(4, 6, dtype=torch.float64)
    for result in trained:
        expected += result.update.tensors["weight"].double() * RAGGED[result.update.client] / total
    merged = run_quietly(federation).shared["weight"]
    torch.testing.assert_close(merged, expected.float(), rtol=0, atol=1e-7)


class Stepping(Linear):
    """Moves the weight twice as far as the mean, and leaves the bias where it is."""

    def step(self, shared, mean):
        return {"weight": 2 * mean["weight"] - shared["weight"], "bias": shared["bias"]}


@pytest.mark.parametrize(
    "way", [{}, {"secure_sum": True}, {"one_step": True}, {"robust": "median"}, {"sequential": True}]
)
def test_the_servers_step_is_taken_on_the_mean_however_it_was_found(way):
    training = {"batch_size": 99, "local_epochs": 1}
    plain = run_quietly(small_federation(small_method("linear"), training, rounds=1, **way))
    stepped = small_federation(Stepping(plain.method.options, plain.method.task), training, rounds=1, **way)
    start = stepped.shared["weight"]
    run_quietly(stepped)
    torch.testing.assert_close(stepped.shared["weight"], 2 * plain.shared["weight"] - start)
    assert not stepped.shared["bias"].any()
    assert plain.shared["bias"].any()


def test_partial_participation_is_drawn_from_the_seed():
    cohorts = []
    for seed in (0, 0, 1):
        federation = replace(small_federation(small_method("linear"), per_round=2, rounds=6), seed=seed)
        cohorts.append([record["cohort"] for record in run_quietly(federation).records])
    assert cohorts[0] == cohorts[1] != cohorts[2]
    assert all(len(cohort) == 2 for cohort in cohorts[0])
    assert len({tuple(cohort) for cohort in cohorts[0]}) > 1


class Spoilt(LocalEngine):
    """Client 3 sends NaN in round 2."""

    def train(self, round_index, cohort, shared, own=None):
        trained = super().train(round_index, cohort, shared, own)
        if round_index == 1:
            for result in trained:
                if result.update.client == 3:
                    result.update.tensors["weight"][0, 0] = math.nan
        return trained


class Without(LocalEngine):
    """Client 3 does not answer in round 2."""

    def train(self, round_index, cohort, shared, own=None):
        return super().train(round_index, [c for c in cohort if (round_index, c) != (1, 3)], shared, own)


def with_engine(kind, **settings):
    federation = small_federation(small_method("linear"), **settings)
    engine = federation.engine
    federation.engine = kind(engine.method, engine.data, engine.rows, engine.training, engine.federation, 0)
    return federation


def test_one_bad_client_changes_nothing_and_is_named():
    spoilt = run_quietly(with_engine(Spoilt))
    assert digest(spoilt.shared) == digest(run_quietly(with_engine(Without)).shared)
    assert [record["refused"] for record in spoilt.records] == [
        [],
        [{"client": 3, "reason": "'weight' holds values that are not finite"}],
        [],
    ]


def test_the_steps_of_a_round_are_counted_to_their_end():
    seen: list[tuple[int, int]] = []
    federation = small_federation(small_method("linear"), rounds=2, chunk=2)
    federation.engine.progress = lambda done, total: seen.append((done, total))
    run_quietly(federation)
    total = seen[0][1]
    assert seen == [(done, total) for done in range(1, total + 1)] * 2


class Silent(LocalEngine):
    def train(self, round_index, cohort, shared, own=None):
        return []


def test_a_round_without_updates_is_an_error_never_a_round():
    federation = with_engine(Silent)
    with pytest.raises(FedVLError, match="got 0 usable updates"):
        run_quietly(federation)
    assert federation.records == []


def test_too_few_updates_are_drawn_again_and_then_stop_the_run():
    with pytest.raises(FedVLError, match="quorum of 5"):  # client 1 has no data and never answers
        run_quietly(small_federation(small_method("linear"), quorum=5))
    assert len(run_quietly(small_federation(small_method("linear"), quorum=4)).records) == 3


def test_dropped_clients_are_left_out_and_named():
    federation = run_quietly(small_federation(small_method("linear"), dropout=0.4, rounds=8))
    dropped = [set(record["dropped"]) for record in federation.records]
    assert any(clients - {1} for clients in dropped)  # client 1 has no data, so it is always among them
    assert all(clients < set(record["cohort"]) for clients, record in zip(dropped, federation.records, strict=True))


@pytest.mark.parametrize("committed", [1, 2])
def test_a_restored_run_ends_in_the_same_bits(tmp_path, committed):
    whole = run_quietly(small_federation(small_method("linear"), rounds=4))
    journal = Journal(tmp_path / "journal")
    stopped = replace(small_federation(small_method("linear"), rounds=committed), journal=journal)
    run_quietly(stopped)
    resumed = replace(small_federation(small_method("linear"), rounds=4), journal=journal)
    resumed.restore()
    assert len(resumed.records) == committed
    run_quietly(resumed)
    assert digest(resumed.shared) == digest(whole.shared)
    assert [r["loss"] for r in resumed.records] == [r["loss"] for r in whole.records]


@pytest.mark.parametrize("name", KEEPING)
def test_what_clients_keep_is_restored_too(name, tmp_path):
    whole = run_quietly(small_federation(small_method(name), rounds=2))
    journal = Journal(tmp_path / "journal")
    run_quietly(replace(small_federation(small_method(name), rounds=1), journal=journal))
    resumed = replace(small_federation(small_method(name), rounds=2), journal=journal)
    resumed.restore()
    run_quietly(resumed)
    assert digest(resumed.shared) == digest(whole.shared)
    assert digest(flatten(resumed.engine.private)) == digest(flatten(whole.engine.private))


def test_in_sequence_each_client_goes_on_from_the_one_before_and_the_last_one_counts():
    together = run_quietly(small_federation(small_method("linear"), rounds=1, sequential=True))
    assert digest(together.shared) == digest(run_quietly(small_federation(small_method("linear"), rounds=1)).shared)
    federation = small_federation(small_method("linear"), rounds=2, sequential=True)
    run_quietly(federation)
    tensors, engine = together.shared, federation.engine
    for client in (client for client, size in enumerate(RAGGED) if size):
        (result,) = engine.train(1, [client], tensors)
        tensors = result.update.tensors
    for name, tensor in federation.shared.items():
        torch.testing.assert_close(tensor, tensors[name])
