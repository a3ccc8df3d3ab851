"""Noise on clients' counts: the sampler against the exact distribution, its account, and neighbours."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small import RAGGED, run_quietly, small_federation, small_method
from scipy import stats

from fedvl.config import PrivacyConfig
from fedvl.errors import FedVLError
from fedvl.federation.accounting import Step, epsilon_of
from fedvl.federation.count_noise import (
    SHARE_FOR_COUNTS,
    Bits,
    CountNoise,
    bernoulli_exp,
    check_report,
    count_noise,
    discrete_gaussian,
    discrete_laplace,
    slack,
)
from fedvl.federation.privacy import ClientPrivacy
from fedvl.federation.records import Budget
from fedvl.federation.stacks import SampleRows
from fedvl.methods.parts.selection import MAX_RARE_WEIGHT, SHARE_PARTS
from fedvl.runs.requirements import check_privacy
from fedvl.runs.settings import resolve_experiment

CLIENTS = len(RAGGED)
ROWS = torch.arange(sum(RAGGED)).split(RAGGED)


def private(epsilon=3.0, clip=0.1):
    return PrivacyConfig(unit="client", epsilon=epsilon, delta=1e-5, clip=clip)


def totals(engine):
    """The true totals of the first reports."""
    return torch.stack([report.tensors["counts"] for report in engine.reports(0, {})[0]]).sum(0)


def fedpp(**options):
    return small_method("fedpp", visual_prompts=False, counts="shares", interval=1, **options)


# --- the sampler


def exact(variance, most):
    """Probabilities of -most to most, by the definition."""
    weights = np.exp(-(np.arange(-most, most + 1.0) ** 2) / (2 * variance))
    return weights / weights.sum()


@pytest.mark.parametrize(("variance", "count"), [(0.3, 4000), (2.25, 4000), (90.0, 4000), (1e6, 1500)])
def test_the_sampler_draws_the_discrete_gaussian(variance, count):
    """By a chi-square test of the whole distribution: a continuous Gaussian, rounded, fails it at 0.3."""
    bits = Bits(0, "test", str(variance))
    drawn = np.array([discrete_gaussian(variance, bits) for _ in range(count)])
    most = math.ceil(8 * variance**0.5) + 1
    assert abs(drawn).max() <= most
    edges = np.unique(np.quantile(drawn, np.linspace(0.01, 0.99, 20)).astype(int))
    cumulated = np.concatenate([[0.0], np.cumsum(exact(variance, most))[edges + most], [1.0]])
    found = np.bincount(np.searchsorted(edges, drawn), minlength=len(edges) + 1)
    assert stats.chisquare(found, np.diff(cumulated) * count).pvalue > 0.001
    rounded = np.diff(np.concatenate([[0.0], stats.norm.cdf(edges + 0.5, scale=variance**0.5), [1.0]]))
    if variance < 1:
        assert stats.chisquare(found, rounded * count).pvalue < 1e-6


def test_the_parts_of_the_sampler():
    bits = Bits(1)
    for numerator, denominator in ((0, 1), (1, 3), (1, 1), (7, 3)):
        found = sum(bernoulli_exp(numerator, denominator, bits) for _ in range(4000)) / 4000
        assert found == pytest.approx(math.exp(-numerator / denominator), abs=0.035)
    drawn = [discrete_laplace(3, bits) for _ in range(4000)]
    ratio = math.exp(-1 / 3)
    assert drawn.count(0) / 4000 == pytest.approx((1 - ratio) / (1 + ratio), abs=0.03)
    assert np.mean(np.abs(drawn)) == pytest.approx(2 * ratio / (1 - ratio**2), rel=0.06)
    assert abs(np.mean(drawn)) < 0.3
    assert Counter(bits.below(5) for _ in range(5000)).keys() == set(range(5))
    assert [bits.below(1) for _ in range(3)] == [0, 0, 0]


def test_draws_follow_from_the_whole_seed_and_the_purpose():
    noise = CountNoise(SHARE_PARTS, 4, (0,), alone=True)
    first = noise.draw(4, 2.0, 2**255 + 1, 3, 1)
    assert torch.equal(first, noise.draw(4, 2.0, 2**255 + 1, 3, 1))
    for other in ((2**255 + 1 - 2**200, 3, 1), (2**255 + 1, 3, 2), (2**255 + 1, 31)):
        assert not torch.equal(first, noise.draw(4, 2.0, *other))
    assert not noise.draw(4, 0.0, 0).any()


# --- the account


@pytest.mark.parametrize("sigma", [0.8, 1.5, 4.0])
@pytest.mark.parametrize("sensitivity", [1, 16])
def test_the_account_bounds_what_the_exact_distribution_loses(sigma, sensitivity):
    """delta of one number, summed over all outcomes, at the epsilon that is counted for it: below 1e-5."""
    noise = CountNoise(sensitivity, 1, (0,), alone=True)
    epsilon = epsilon_of({noise.step(sigma): 1}, 1e-5, "rdp")
    variance = noise.variance(sigma)
    most = math.ceil(12 * variance**0.5) + sensitivity
    outcomes = exact(variance, most)
    shifted = np.concatenate([np.zeros(sensitivity), outcomes[:-sensitivity]])
    assert np.maximum(outcomes - math.exp(epsilon) * shifted, 0)[sensitivity:].sum() <= 1e-5
    assert np.maximum(outcomes - math.exp(epsilon / 2) * shifted, 0)[sensitivity:].sum() > 1e-5  # nor is it far off


def test_shares_add_up_and_their_slack_is_counted():
    noise = CountNoise(SHARE_PARTS, 10, (0,), alone=True, shares=4)
    assert noise.variance(2.0) * 4 == (2.0 * SHARE_PARTS) ** 2
    shares = torch.stack([noise.draw(2000, 0.05, 0, client) for client in range(4)]).double()
    assert float(shares.sum(0).std()) == pytest.approx(0.05 * SHARE_PARTS, rel=0.06)
    # tau by hand: three terms for four shares; with little noise a report counts as more than it would alone
    by_hand = 10 * sum(math.exp(-2 * math.pi**2 * 0.25 * part) for part in (1 / 2, 2 / 3, 3 / 4))
    assert slack(0.25, 4) == pytest.approx(by_hand)
    assert slack(0.25, 1) == 0
    assert noise.step(2.0) == Step(1.0, 2.0)  # of this size it is below the last digit
    small = CountNoise(1, 10, (0,), alone=True, shares=4)
    assert 1 / small.step(1.0).sigma == pytest.approx(1.0 + by_hand * math.sqrt(10))


def test_counts_and_updates_share_one_budget():
    counts = CountNoise(SHARE_PARTS, 4, (0, 5), alone=False)
    hidden = ClientPrivacy(private(), 10, 100, 100, 0, counts=counts)
    assert 2 / hidden._of_counts(hidden.sigma) ** 2 == pytest.approx(SHARE_FOR_COUNTS * 10 / hidden.sigma**2)
    spent: list[float] = []
    before: list[Budget] = []
    for _ in range(10):
        before.append(hidden.spend(before, []))
        spent.append(before[-1].epsilon)
    assert spent == sorted(spent)
    assert 2.99 < spent[-1] <= 3.0
    with pytest.raises(FedVLError, match="Round 11 would take epsilon to 3"):
        hidden.spend(before, [])
    # without the counts the same noise spends less; with them it is one Gaussian mechanism of all
    alone = math.sqrt(1 / (10 / hidden.sigma**2 + 2 / hidden._of_counts(hidden.sigma) ** 2))
    assert epsilon_of({Step(1.0, alone): 1}, 1e-5, "rdp") == pytest.approx(spent[-1])
    assert epsilon_of({Step(1.0, hidden.sigma): 10}, 1e-5, "rdp") < 0.95 * spent[-1]


def test_an_epsilon_beyond_the_accountant_is_refused():
    hidden = ClientPrivacy(private(1e-3), 10, 100, 100, 0, counts=CountNoise(SHARE_PARTS, 4, (0,), alone=False))
    with pytest.raises(FedVLError, match=r"0\.001 at delta 1e-05 is too small"):
        _ = hidden.sigma


def test_in_sampled_rounds_counts_are_of_everybody():
    hidden = ClientPrivacy(private(), 10, 100, 20, 0, counts=CountNoise(SHARE_PARTS, 4, (0,), alone=False))
    steps = Counter(hidden._plan(hidden.sigma))
    assert steps[Step(0.2, hidden.sigma)] == 10
    assert steps[Step(1.0, hidden._of_counts(hidden.sigma))] == 1
    assert hidden._of_counts(hidden.sigma) == pytest.approx(0.2 * hidden.sigma * math.sqrt(1 / (SHARE_FOR_COUNTS * 10)))


def test_where_nothing_else_is_sent_counts_have_the_whole_budget():
    method = fedpp()
    assert not method.start(torch.Generator())
    noise = count_noise(method, {}, 3)
    assert noise == CountNoise(SHARE_PARTS, 4, (0, 1, 2), alone=True)
    hidden = ClientPrivacy(private(), 3, CLIENTS, CLIENTS, 0, counts=noise)
    assert epsilon_of({Step(1.0, hidden.sigma): 3}, 1e-5, "rdp") == pytest.approx(3.0, rel=2e-3)
    federation = small_federation(method, privacy=private(), rounds=3)
    assert [record.privacy.counts for record in run_quietly(federation).records] == [hidden.sigma] * 3
    assert federation.records[-1].privacy.epsilon <= 3.0
    assert count_noise(small_method("linear"), {}, 3) is None


# --- what noise is measured by


def test_one_client_moves_the_sum_of_reports_by_the_sensitivity_at_most():
    """Neighbours: all clients, and all but one; the second time each client has images of one class."""
    moved = []
    for labels in (None, 0):
        method = fedpp(filters="none")
        federation = small_federation(method, privacy=private(), rounds=1)
        engine = federation.engine
        if labels is not None:
            engine.data.inputs["features"].copy_(method.task.text_features[labels].expand(len(engine.data), -1))
        everybody = engine.report(0, {})[0][0].tensors
        assert everybody.keys() == {"counts"}  # neither a number of images nor anything else
        for left in (0, 2, 3, 4):  # client 1 has no images
            engine.rows = SampleRows.of([rows[: 0 if client == left else None] for client, rows in enumerate(ROWS)])
            fewer = engine.report(0, {})[0][0].tensors
            moved.append(float(torch.linalg.vector_norm(everybody["counts"] - fewer["counts"])))
    assert min(moved) > 0
    assert max(moved) <= SHARE_PARTS
    assert moved[4:] == [SHARE_PARTS] * 4  # the bound is met


def test_a_report_beyond_the_bound_is_refused():
    check_report({"counts": torch.tensor([3.0, 4.0])}, 5)
    for wrong in ([3.0, 4.0, 1.0], [0.5, 0.0], [math.nan, 0.0]):
        with pytest.raises(FedVLError, match="whole numbers of a norm of at most 5"):
            check_report({"counts": torch.tensor(wrong)}, 5)


@pytest.mark.parametrize("secure", [False, True])
def test_the_server_learns_noisy_totals_alone(secure):
    """The totals without noise, less those of the run, are noise of the size that the account asks for."""
    sums: dict[str, Any] = {"secure_sum": True, "least_clients": CLIENTS} if secure else {}
    differences = []
    for seed in range(40):
        federation = small_federation(fedpp(), privacy=private(epsilon=100.0), rounds=1, **sums)
        federation.engine.private_seed = seed
        noise = count_noise(federation.method, {}, 1, CLIENTS if secure else 1)
        assert noise is not None
        hidden = ClientPrivacy(private(epsilon=100.0), 1, CLIENTS, CLIENTS, seed, counts=noise)
        plain = totals(federation.engine)
        reports, _ = federation.engine.report(0, {})
        total = reports[0].tensors
        if not secure:
            assert torch.equal(total["counts"], plain)
            total = noise.added(total, hidden._of_counts(hidden.sigma), hidden.seed, 0)
        differences.append(total["counts"] - plain)
    spread = torch.stack(differences)
    expected = hidden._of_counts(hidden.sigma) * SHARE_PARTS
    assert float(spread.std()) == pytest.approx(expected, rel=0.2)
    assert len(torch.unique(spread)) > 20


@pytest.mark.parametrize("secure", [False, True])
def test_clients_are_told_totals_with_noise(secure, monkeypatch):
    """Of a run: the answer that all clients adopt follows from noisy totals, drawn anew for each round."""
    told = {}
    for epsilon in (100.0, 0.05):
        sums: dict[str, Any] = {"secure_sum": True, "least_clients": CLIENTS} if secure else {}
        federation = small_federation(fedpp(), privacy=private(epsilon), rounds=2, **sums)
        adopt, answers = federation.engine.adopt, list[torch.Tensor]()
        monkeypatch.setattr(
            federation.engine,
            "adopt",
            lambda found, adopt=adopt, answers=answers: (answers.append(found[None]["totals"]), adopt(found)),
        )
        run_quietly(federation)
        told[epsilon] = answers
    plain = federation.method.selection.settle(0, {"counts": totals(federation.engine)}, None)
    assert not torch.equal(told[100.0][0], plain["totals"])
    assert not torch.equal(told[100.0][0], told[100.0][1])
    torch.testing.assert_close(told[100.0][0], plain["totals"], rtol=0, atol=0.5 * SHARE_PARTS)
    assert (torch.stack(told[0.05]) >= CLIENTS * SHARE_PARTS / 4 / MAX_RARE_WEIGHT - 1e-3).all()


def test_what_is_noise_is_taken_out_of_the_totals():
    noise = CountNoise(1, 10, (0,), alone=True)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(200, 10, generator=generator) * 5
    flat = torch.stack([noise.denoised(100 + row, 5.0) for row in drawn])
    assert float((flat.max(1).values - flat.min(1).values).median()) == 0  # noise alone says nothing of classes
    real = torch.linspace(0, 2000, 10)
    assert torch.equal(noise.denoised(real + drawn[0], 5.0).argsort(), torch.arange(10))
    assert float(noise.denoised(torch.tensor([-50.0, 50.0]), 0.1).min()) == 0


# --- what is refused


def test_counts_without_a_bound_are_refused_and_shares_are_not():
    hidden = resolve_experiment(
        {"method": {"name": "fedpp"}, "privacy": {"unit": "client"}, "federation": {"drift": False}}
    )
    with pytest.raises(FedVLError, match=r"method\.counts=shares"):
        check_privacy(small_method("fedpp"), hidden)
    check_privacy(small_method("fedpp", counts="shares"), hidden)
    check_privacy(fedpp(), hidden)
    by_record = resolve_experiment({"method": {"name": "fedpp"}, "privacy": {"unit": "record"}})
    with pytest.raises(FedVLError, match="sends no updates"):
        check_privacy(fedpp(), by_record)
