import math
from dataclasses import replace

import pytest
import torch
from helpers.small import RAGGED, run_quietly, small_federation, small_method

from fedvl.config import PrivacyConfig
from fedvl.errors import FedVLError
from fedvl.federation.journal import Journal
from fedvl.federation.local import LocalEngine
from fedvl.federation.records import Refused
from fedvl.methods import method_names
from fedvl.methods.linear import Linear
from fedvl.methods.roles import Server
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
        cohorts.append([record.cohort for record in run_quietly(federation).records])
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
    assert [record.refused for record in spoilt.records] == [
        [],
        [Refused(client=3, reason="'weight' holds values that are not finite")],
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
    dropped = [set(record.dropped) for record in federation.records]
    assert any(clients - {1} for clients in dropped)  # client 1 has no data, so it is always among them
    assert all(clients < set(record.cohort) for clients, record in zip(dropped, federation.records, strict=True))


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
    assert [r.loss for r in resumed.records] == [r.loss for r in whole.records]


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


# --- tensors that stay on the server


class Counting(Linear, same_loss_as=Linear):
    """The linear classifier, with the number of rounds and the sum of all moves on the server."""

    def roles(self):
        return {"rounds": Server(), "moves.*": Server()}

    def start(self, generator):
        start = super().start(generator)
        return {**start, "rounds": torch.zeros(()), **{f"moves.{name}": 0 * tensor for name, tensor in start.items()}}

    def step(self, shared, mean):
        self.seen = {"names": shared.keys(), "mean": mean.keys(), "share": mean.share}
        moves = {f"moves.{name}": shared[f"moves.{name}"] + tensor - shared[name] for name, tensor in mean.items()}
        return {**mean, **moves, "rounds": shared["rounds"] + 1}


def counting(**settings):
    return small_federation(Counting(Linear.options_type(), small_method("linear").task), **settings)


@pytest.mark.parametrize("settings", [{}, {"secure_sum": True}, {"privacy": PrivacyConfig(unit="client", epsilon=9)}])
def test_tensors_of_the_server_take_part_in_the_step_and_never_travel(settings):
    federation = run_quietly(counting(**settings))
    plain = run_quietly(small_federation(small_method("linear"), **settings))
    assert digest(federation.shared) == digest(plain.shared)  # no other noise, no other order of names
    for record, other in zip(federation.records, plain.records, strict=True):
        assert (record.bytes_up, record.bytes_down) == (other.bytes_up, other.bytes_down)
    assert federation.method.seen["names"] == {*plain.shared, *federation.server}
    assert federation.method.seen["mean"] == plain.shared.keys()
    assert federation.server["rounds"] == 3
    for name, tensor in federation.shared.items():
        start = small_method("linear").start(torch.Generator())[name]
        torch.testing.assert_close(federation.server[f"moves.{name}"], tensor - start)


def test_the_mean_says_of_which_share_of_the_clients_it_is():
    federation = run_quietly(counting(rounds=1))
    assert federation.method.seen["share"] == 4 / 5  # client 1 has no data
    assert run_quietly(counting(rounds=1, secure_sum=True)).method.seen["share"] == 4 / 5
    hidden = PrivacyConfig(unit="client", epsilon=9)
    assert run_quietly(counting(rounds=1, privacy=hidden, per_round=3)).method.seen["share"] == 3 / 5  # on average


def test_tensors_of_the_server_are_restored(tmp_path):
    whole = run_quietly(counting(rounds=4))
    journal = Journal(tmp_path / "journal")
    run_quietly(replace(counting(rounds=2), journal=journal))
    found = journal.latest()
    assert found is not None
    assert {name for name in found[0] if name.startswith("server/")} == {f"server/{name}" for name in whole.server}
    resumed = replace(counting(rounds=4), journal=journal)
    resumed.restore()
    assert resumed.server["rounds"] == 2
    assert digest(run_quietly(resumed).server) == digest(whole.server)
    assert digest(resumed.shared) == digest(whole.shared)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ({"other": torch.zeros(1)}, "returns 'other' of shape"),
        ({"bias": torch.zeros(1)}, "returns 'bias' of shape"),
        ({"rounds": torch.tensor(math.nan)}, "'rounds' is not finite after the server's step of round 1"),
    ],
)
def test_a_step_returns_finite_tensors_of_start(monkeypatch, returned, sentence):
    monkeypatch.setattr(Counting, "step", lambda self, shared, mean: returned)
    with pytest.raises(FedVLError, match=sentence):
        run_quietly(counting(rounds=1))


def test_what_a_step_does_not_return_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(Counting, "step", lambda self, shared, mean: {"bias": mean["bias"]})
    federation, start = counting(rounds=1), counting()
    run_quietly(federation)
    assert torch.equal(federation.shared["weight"], start.shared["weight"])
    assert not torch.equal(federation.shared["bias"], start.shared["bias"])
    assert federation.server["rounds"] == 0
