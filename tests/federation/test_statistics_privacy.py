"""Noise on statistics: its size by hand, by distribution, in shares, and what it is spent on."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.small import CLASSES, RAGGED, WIDTH, small_federation, small_method, small_samples

from fedvl.config import FederationConfig, PrivacyConfig, TrainingConfig
from fedvl.errors import FedVLError
from fedvl.federation.accounting import sigma_for
from fedvl.federation.local import LocalEngine
from fedvl.federation.statistics import clipped_statistics, sum_of_statistics
from fedvl.federation.statistics_privacy import StatisticsPrivacy, statistics_privacy, sum_noise
from fedvl.methods import load_method
from fedvl.methods.base import SumNoise
from fedvl.runs.requirements import check_method, hides_statistics, rule_note, statistics_note
from fedvl.runs.settings import resolve_experiment

ROWS = list(torch.arange(sum(RAGGED)).split(list(RAGGED)))
MANY, FEW = 10**9, 1  # public numbers of images by which G and H, or class sums, are released


def noised_method(unit="record", images=MANY, clip=None, multiplier=1.0, name="ridge"):
    method = small_method(name)
    method.task = replace(method.task, noise=SumNoise(multiplier, images, clip if unit == "client" else None))
    return method


def engine_of(method, unit="record", epsilon=3.0, clip=None, seed=0, **federation):
    privacy = PrivacyConfig(unit=unit, epsilon=epsilon, clip=clip)
    found = LocalEngine(
        method, small_samples(method), ROWS, TrainingConfig(), FederationConfig(rounds=1, **federation), 0, privacy
    )
    found.private_seed = seed
    return found


def flat(tensors):
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def drawn(unit, runs=60, clip=None, **federation):
    """The noise on all sums of some runs: what is released less the sums without noise."""
    method = noised_method(unit, clip=clip)
    cohort, noise = range(len(RAGGED)), []
    for seed in range(runs):
        engine = engine_of(method, unit, clip=clip, seed=seed, **federation)
        parts = {client: clipped_statistics(engine.statistics_of(0, client, {}), clip) for client in cohort}
        exact = sum_of_statistics(parts, method.role.statistics_shapes, "cpu")[0].total
        noise.append(flat(engine.sum_statistics(0, cohort, engine.start).total) - flat(exact))
    return torch.stack(noise)


def test_sigma_is_the_analytic_gaussian_and_the_deviation_is_by_hand():
    """Delta of a Gaussian mechanism: Phi(1 / 2 s - eps s) - e^eps Phi(-1 / 2 s - eps s), Balle and Wang (2018)."""
    noise = statistics_privacy(noised_method(), PrivacyConfig(unit="record", epsilon=3.0), FederationConfig(rounds=1))
    assert noise is not None
    sigma = noise.sigma

    def normal(x):
        return 0.5 * math.erfc(-x / math.sqrt(2))

    delta = normal(0.5 / sigma - 3 * sigma) - math.exp(3) * normal(-0.5 / sigma - 3 * sigma)
    assert delta == pytest.approx(1e-5, rel=0.02)
    assert noise.sensitivity == pytest.approx(math.sqrt(1 + 1 + 1 / 16))  # of G, H, and a quarter of the count
    of_sums = statistics_privacy(noised_method(images=FEW), PrivacyConfig(unit="record"), FederationConfig(rounds=1))
    assert of_sums is not None
    assert of_sums.sensitivity == pytest.approx(math.sqrt(1 + 1 / 16))


@pytest.mark.parametrize(
    ("unit", "federation", "additions"),
    [
        ("record", {}, 4),  # each client with samples adds all of the noise
        ("record", {"secure_sum": True, "least_clients": 5}, 1),
        ("record", {"secure_sum": True, "least_clients": 2}, 2.5),
        ("client", {"secure_sum": True, "least_clients": 5}, 1),
    ],
)
def test_the_noise_on_a_sum_has_the_deviation_that_the_account_is_of(unit, federation, additions):
    clip = 2.0 if unit == "client" else None
    noise = drawn(unit, clip=clip, **federation)
    sensitivity = 2.0 if unit == "client" else math.sqrt(2.0625)
    expected = sigma_for(3.0, 1.0, 1, 1e-5) * sensitivity * math.sqrt(additions)
    count = noise.numel()
    assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * count))
    assert abs(float(noise.mean())) < 5 * expected / math.sqrt(count)
    correlated = torch.corrcoef(noise.T) - torch.eye(noise.shape[1])
    assert float(correlated.square().mean()) == pytest.approx(1 / len(noise), rel=0.3)  # as of independent numbers


def test_the_server_adds_the_noise_where_clients_are_hidden_without_secure_aggregation():
    method = noised_method("client", clip=2.0)
    privacy = PrivacyConfig(unit="client", epsilon=3.0, clip=2.0)
    found = []
    for seed in range(40):
        federation = small_federation(method, rounds=1)
        federation.engine = engine_of(method, "client", clip=2.0)
        federation.privacy = statistics_privacy(method, privacy, federation.config, seed)
        federation.run()
        exact = federation.engine.sum_statistics(0, range(len(RAGGED)), federation.engine.start).total
        found.append(flat(federation.server) - flat(exact))
    noise = torch.stack(found)
    expected = sigma_for(3.0, 1.0, 1, 1e-5) * 2.0
    assert float(noise.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * noise.numel()))
    assert federation.records[0].privacy.epsilon == pytest.approx(3.0, abs=0.01)


def test_statistics_of_a_client_are_clipped_as_a_whole():
    found = clipped_statistics({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
    torch.testing.assert_close(flat(found), torch.tensor([0.6, 0.8]))
    assert clipped_statistics({"a": torch.tensor([3.0])}, 3.0)["a"].tolist() == [3.0]
    total, _ = sum_of_statistics(
        {0: {"a": torch.tensor([3.0]).double()}, 1: {"a": torch.tensor([0.5]).double()}}, {"a": (1,)}, "cpu", 1.0
    )
    assert total.total["a"].tolist() == [1.5]


def test_another_exchange_than_planned_is_refused():
    noise = StatisticsPrivacy(PrivacyConfig(unit="record", epsilon=1.0), 1, 1, 1.0)
    spent = noise.spend([], [])
    assert (spent.unit, spent.rate) == ("record", 1.0)
    with pytest.raises(FedVLError, match="Round 2 would take epsilon to"):
        noise.spend([spent], [])


def test_noise_of_several_exchanges_composes():
    one, four = (StatisticsPrivacy(PrivacyConfig(unit="record", epsilon=1.0), count, 1, 1.0) for count in (1, 4))
    assert four.sigma == pytest.approx(2 * one.sigma, rel=0.01)


def test_the_noise_that_all_know_follows_from_who_adds_it():
    base = {"method": {"name": "ridge"}, "data": {"clients": 8}}
    secure = {"federation": {"secure_sum": True, "least_clients": 2}}
    record, client = ({"privacy": {"unit": unit, "epsilon": 3.0}} for unit in ("record", "client"))
    sigma = sigma_for(3.0, 1.0, 1, 1e-5)
    for settings, additions, clip in (
        (record, 8, None),
        (record | secure, 4, None),
        (client, 1, 50.0),
        (client | secure, 4, 50.0),
    ):
        noise = sum_noise(resolve_experiment(base | settings), 400)
        assert noise.multiplier == pytest.approx(sigma * math.sqrt(additions))
        assert (noise.clip, noise.images) == (clip, 400)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"privacy": {"unit": "record", "clip": 1.0}}, "leave clip out"),
        ({"privacy": {"unit": "record"}, "data": {"labels": "cps"}}, "use --set data.labels=zero-shot"),
        ({"privacy": {"unit": "record"}, "data": {"labels": "fpl"}}, "use --set data.labels=zero-shot"),
        ({"privacy": {"unit": "record"}, "data": {"unit": "patient"}}, "leave --unit out"),
        ({"privacy": {"unit": "client", "subspace": 4}}, "leave privacy.subspace out"),
    ],
)
def test_what_noise_does_not_cover_is_refused(settings, reason):
    with pytest.raises(FedVLError, match=reason):
        check_method(noised_method(), resolve_experiment({"method": {"name": "ridge"}, **settings}))


class NoNoise(load_method("gda")):  # type: ignore[misc]
    """Declares statistics whose noise its solution does not expect."""

    def roles(self):
        return {name: replace(role, noised=False) for name, role in super().roles().items()}


def test_a_method_whose_solution_does_not_expect_noise_is_refused():
    method = noised_method(name="gda")
    with pytest.raises(FedVLError, match="does not solve with noise on its statistics"):
        check_method(
            NoNoise(method.options, method.task),
            resolve_experiment({"method": {"name": "gda"}, "privacy": {"unit": "record"}}),
        )


@pytest.mark.parametrize("name", ["ridge", "gda", "fed-em"])
@pytest.mark.parametrize("images", [FEW, MANY])
def test_what_is_released_has_known_norms(name, images):
    roles = noised_method(images=images, name=name).role.statistics
    assert None not in [role.norm for role in roles.values()]
    assert roles["cross"].shape == (WIDTH, CLASSES)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, True),
        ({"federation": {"secure_sum": True}}, False),
        ({"privacy": {"unit": "record"}}, False),
        ({"privacy": {"unit": "client"}}, True),
        ({"method": {"name": "linear"}}, False),
    ],
)
def test_a_server_is_warned_of_single_statistics(settings, warned):
    experiment = resolve_experiment({"method": {"name": "ridge"}} | settings)
    assert hides_statistics(experiment) != warned or experiment.method.name == "linear"
    assert bool(statistics_note(experiment)) == warned
    if experiment.method.name == "ridge":
        assert "statistics" in rule_note(experiment).lower() or experiment.federation.secure_sum
