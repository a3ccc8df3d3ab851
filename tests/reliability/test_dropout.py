"""Clients that do not answer: who is there is averaged, too few are asked again, and then the run stops."""

from contextlib import nullcontext

import pytest
import torch
from helpers.small import small_method, small_samples

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.federation.records import RoundFigures
from fedvl.federation.round import Federation
from fedvl.seeding import numpy_generator, torch_generator

SIZES = (3, 5, 2, 4, 6, 3, 5, 2, 4, 6)
ROUNDS, ATTEMPTS = 4, 3


class Listening(LocalEngine):
    """Writes down what each call of a round brought."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.heard = {}

    def train(self, round_index, cohort, shared, own=None):
        trained = super().train(round_index, cohort, shared, own)
        self.heard.setdefault(round_index, []).append({r.update.client: r.update.tensors for r in trained})
        return trained


def federation_of_ten(dropout, quorum):
    method = small_method("linear")
    config = FederationConfig(rounds=ROUNDS, dropout=dropout, quorum=quorum, attempts=ATTEMPTS)
    training = TrainingConfig(batch_size=4, learning_rate=0.05)
    rows = torch.arange(sum(SIZES)).split(SIZES)
    engine = Listening(method, small_samples(method, sum(SIZES)), rows, training, config, 0)
    return Federation(method, engine, config, 0, method.start(torch_generator(0, "start")))


DROPOUTS, QUORUMS = (0.0, 0.1, 0.3, 0.6, 0.9), (1, 3, 5, 8, 10)


def rounds_to_expect(dropout, quorum):
    """From the draws alone: rounds until one in which every attempt finds too few."""
    for index in range(ROUNDS):
        draws = [numpy_generator(0, "dropout", index, attempt).random(len(SIZES)) for attempt in range(ATTEMPTS)]
        if all((draw >= dropout).sum() < quorum for draw in draws):
            return index
    return ROUNDS


@pytest.mark.parametrize("quorum", QUORUMS)
@pytest.mark.parametrize("dropout", DROPOUTS)
def test_those_present_are_averaged_or_the_run_stops(dropout, quorum):
    federation = federation_of_ten(dropout, quorum)
    models = [federation.shared]
    expected_rounds = rounds_to_expect(dropout, quorum)
    stops = pytest.raises(FedVLError, match=f"quorum of {quorum}") if expected_rounds < ROUNDS else nullcontext()

    def note(shared, kept, number):
        models.append(shared)
        return RoundFigures()

    with stops:
        federation.run(note, lambda record: None)
    heard = federation.engine.heard
    for index, merged in enumerate(models[1:]):
        present = heard[index][-1]
        assert len(present) >= quorum
        assert all(len(before) < quorum for before in heard[index][:-1])
        total = sum(SIZES[client] for client in present)
        for name, tensor in merged.items():
            expected = sum(sent[name].double() * SIZES[client] for client, sent in present.items()) / total
            torch.testing.assert_close(tensor, expected.float(), rtol=0, atol=1e-7)
        assert not torch.equal(merged["weight"], models[index]["weight"])
        assert federation.records[index].dropped == sorted(set(range(10)) - present.keys())
    committed = len(models) - 1
    assert len(federation.records) == committed
    assert federation.shared is models[-1]
    if committed < ROUNDS:  # it stopped: after as many attempts as it may have, none of which was enough
        assert [len(present) < quorum for present in heard[committed]] == [True] * ATTEMPTS
        assert len(heard) == committed + 1
    assert committed == expected_rounds


def test_the_cases_have_both_ends():
    ends = [rounds_to_expect(dropout, quorum) for dropout in DROPOUTS for quorum in QUORUMS]
    assert ends.count(ROUNDS) >= 10
    assert sum(end < ROUNDS for end in ends) >= 5
