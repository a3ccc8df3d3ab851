"""Noise of the right size, cuts at the right norm, samples as they are accounted for, and a budget that ends."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.contents import record_of
from helpers.runs import prepare
from helpers.small import RAGGED, drawn, run_quietly, small_federation, small_method
from scipy.stats import beta

from fedvl.config import PrivacyConfig
from fedvl.deployment.audit_log import AuditLog
from fedvl.deployment.party import Party
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.federation import privacy
from fedvl.federation.accounting import Step, epsilon_of
from fedvl.federation.checks import length
from fedvl.federation.chunks import Chunk
from fedvl.federation.fixed_point import SUMMED_FIGURES, decode_updates, encode_update, from_whole, no_update, to_whole
from fedvl.federation.journal import Journal
from fedvl.federation.local import LocalEngine
from fedvl.federation.orders import rates_of_steps
from fedvl.federation.privacy import (
    ClientPrivacy,
    RecordPrivacy,
    Subspace,
    clipped_move,
    directions,
    normals,
    row_gradients,
    uniforms,
)
from fedvl.federation.records import Record
from fedvl.federation.round import Federation
from fedvl.federation.stacks import SampleRows
from fedvl.methods import method_names
from fedvl.methods.base import Batch, Samples, Update
from fedvl.methods.parts.losses import UNIT
from fedvl.runs import preparation
from fedvl.runs.experiment import local_engine, public_subspace
from fedvl.runs.requirements import check_privacy
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import count_elements, digest

CLIENTS = len(RAGGED)
ENDLESS = 1e30
BY_ROW = [name for name in method_names() if small_method(name).scope == "row" and name != "fedpp"]


def settings(unit="client", epsilon=3.0, clip=0.1, delta=1e-5):
    return PrivacyConfig.model_construct(unit=unit, epsilon=epsilon, delta=delta, clip=clip)


def hiding(config, rounds=3, expected=CLIENTS, seed=0, sigma=None, clients=CLIENTS, subspace=None):
    """What hides clients, with noise of a size of our own if it is given."""
    found = ClientPrivacy(config, rounds, clients, expected, seed, subspace)
    if sigma is not None:
        found.__dict__["sigma"] = sigma
    return found


def without_noise(method, clip=ENDLESS, **federation):
    """Under client-level privacy that spends everything: no noise, and updates cut at a norm that none has."""
    found = small_federation(method, privacy=settings(epsilon=math.inf, clip=clip), **federation)
    silent = hiding(found.engine.privacy, found.config.rounds, sigma=0.0)
    found.privacy = silent
    if found.engine.shared_noise:
        found.engine.shared_noise = silent
    return found


# --- random numbers


def test_numbers_are_uniform_and_normal_and_follow_from_seed_and_purpose():
    drawn = uniforms(200_000, 0, "test")
    assert 0 < drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.003
    normal = normals(200_001, 0, "test")
    assert len(normal) == 200_001
    assert abs(normal.mean()) < 0.01
    assert abs(normal.var() - 1) < 0.02
    assert abs((normal**4).mean() - 3) < 0.1
    assert abs((normal.abs() > 3).double().mean() - 0.0027) < 5e-4
    assert torch.equal(normals(10, 0, "test"), normals(10, 0, "test"))
    assert not torch.equal(normals(10, 0, "test"), normals(10, 1, "test"))
    assert not torch.equal(normals(10, 0, "test", 1), normals(10, 0, "test", 11))


def test_every_bit_of_a_secret_matters():
    """A party's secret has 256 bits; generators of 64 would throw most of them away."""
    secret = 2**255 + 1
    assert not torch.equal(uniforms(4, secret, "noise"), uniforms(4, secret - 2**200, "noise"))


# --- clients


def test_a_longer_move_is_cut_to_the_clip_and_a_shorter_one_stays_to_the_bit():
    received = {"w": torch.ones(3), "b": torch.zeros(1)}
    sent = {"w": torch.tensor([3.0, 1.0, 1.0]), "b": torch.tensor([1.5])}  # moves by 2 and 1.5: 2.5 together
    cut = clipped_move(sent, received, 0.5)
    assert length({name: cut[name] - received[name] for name in cut}) == pytest.approx(0.5, abs=1e-15)
    torch.testing.assert_close(cut["w"], torch.tensor([1.4, 1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(cut["b"], torch.tensor([0.3], dtype=torch.float64))
    assert clipped_move(sent, received, 2.5) is sent


def test_a_round_is_the_sum_of_the_cut_moves_by_a_fixed_number_of_clients():
    """By hand: of 5 expected clients two answer; one moves by 3, which is cut to 1, one by 0.5."""
    shared = {"w": torch.tensor([10.0, 0.0])}
    updates = [Update(0, {"w": torch.tensor([13.0, 0.0])}, 1.0), Update(3, {"w": torch.tensor([10.0, 0.5])}, 1.0)]
    mean, clip = hiding(settings(clip=1.0), sigma=0.0).merge(0, shared, updates, [])
    assert clip == 1.0
    torch.testing.assert_close(mean["w"], torch.tensor([10.2, 0.1]))
    nobody, _ = hiding(settings(clip=1.0), sigma=0.0).merge(0, shared, [], [])
    assert torch.equal(nobody["w"], shared["w"])
    six = [Update(client, {"w": torch.tensor([10.0, 0.5])}, 1.0) for client in range(6)]  # more than are expected
    torch.testing.assert_close(
        hiding(settings(clip=1.0), sigma=0.0).merge(0, shared, six, [])[0]["w"], torch.tensor([10.0, 0.6])
    )


def test_noise_of_the_mean_has_the_deviation_sigma_clip_by_clients():
    shared = {"w": torch.zeros(100_000), "b": torch.zeros(50_000)}
    hidden = hiding(settings(clip=0.7), sigma=4.0, expected=20, clients=50)
    noise, _ = hidden.merge(2, shared, [], [])
    both = torch.cat([noise["w"], noise["b"]])
    assert float(both.std()) == pytest.approx(4.0 * 0.7 / 20, rel=0.01)
    assert abs(float(both.mean())) < 0.002
    assert abs(float(torch.corrcoef(torch.stack([noise["w"][:50_000], noise["b"]]))[0, 1])) < 0.02
    again, _ = hidden.merge(2, shared, [], [])
    assert digest(again) == digest(noise)
    assert digest(hidden.merge(3, shared, [], [])[0]) != digest(noise)
    assert digest(replace(hidden, seed=1).add_noise(2, shared, 0.7)) != digest(noise)


# --- a public subspace


def test_updates_and_noise_stay_in_the_public_subspace():
    """By hand: rows may move along (3, 4) / 5 only; of a move of (1, 0) that leaves 0.6 x (0.6, 0.8)."""
    line = torch.tensor([[0.6], [0.8]], dtype=torch.float64)
    space = Subspace(line, frozenset({"w"}))
    hidden = hiding(settings(clip=9.0), sigma=0.0, subspace=space)
    shared = {"w": torch.zeros(1, 2), "b": torch.zeros(1)}
    updates = [Update(0, {"w": torch.tensor([[1.0, 0.0]]), "b": torch.tensor([2.0])}, 1.0)] * CLIENTS
    mean, _ = hidden.merge(0, shared, updates, [])
    torch.testing.assert_close(mean, {"w": torch.tensor([[0.36, 0.48]]), "b": torch.tensor([2.0])})
    many = {"w": torch.zeros(50_000, 2), "b": torch.zeros(50_000)}
    noise = hiding(settings(clip=9.0), sigma=3.0, subspace=space).add_noise(0, many, 1.0)
    across = noise["w"] @ torch.tensor([0.8, -0.6])
    along = noise["w"] @ torch.tensor([0.6, 0.8])
    assert float(across.abs().max()) < 1e-6
    assert float(along.std()) == pytest.approx(3.0 / CLIENTS, rel=0.02)
    assert float(noise["b"].std()) == pytest.approx(3.0 / CLIENTS, rel=0.02)


def test_the_clip_is_of_what_is_left_in_the_subspace():
    """Of a move of (30, 40, 0) all but (0, 40, 0) is outside; that is cut to 1 and shared by the clients."""
    middle = torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64)
    hidden = hiding(settings(clip=1.0), sigma=0.0, subspace=Subspace(middle, frozenset({"w"})))
    update = Update(0, {"w": torch.tensor([[30.0, 40.0, 0.0]])}, 1.0)
    mean, _ = hidden.merge(0, {"w": torch.zeros(1, 3)}, [update], [])
    torch.testing.assert_close(mean["w"], torch.tensor([[0.0, 1 / CLIENTS, 0.0]]))


def test_directions_are_those_in_which_features_differ_most():
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([1.0, 5.0, 0.1, 3.0])
    found = directions(100 + torch.randn(400, 4, generator=generator) * spread, 2)
    torch.testing.assert_close(found.T @ found, torch.eye(2, dtype=torch.float64))
    assert float(found[1, 0].abs()) > 0.99
    assert float(found[3, 1].abs()) > 0.99
    with pytest.raises(FedVLError, match="at most 4"):
        directions(torch.randn(10, 4), 5)


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_moves_in_directions_of_images_that_no_client_trains_on(secure):
    prepared = prepare(
        {
            "data": {"clients": 4, "shots": 20, "partition": "iid"},
            "federation": {"rounds": 2, "root_images": 30, "secure_sum": secure},
            "privacy": {"unit": "client", "epsilon": 5, "clip": 0.5, "subspace": 8},
        }
    )
    training, experiment, method = prepared.training, prepared.experiment, prepared.method
    assert len(training.root) == 30
    assert not torch.isin(training.root, torch.cat(training.rows)).any()
    start = method.start(torch_generator(0, "start"))
    space = public_subspace(experiment, method, start, training)
    assert space is not None
    hidden = privacy.privacy_of(experiment, 0, space)
    federation = Federation(method, local_engine(prepared), experiment.federation, 0, dict(start), privacy=hidden)
    federation.run()
    move = (federation.shared["weight"] - start["weight"]).double()
    assert float(length({"move": move})) > 0.01
    torch.testing.assert_close(move @ space.basis @ space.basis.T, move, atol=1e-5, rtol=0)


def test_sigma_is_what_the_account_asks_for():
    hidden = hiding(settings(clip=1.0, epsilon=2.0), rounds=7, expected=10, clients=40)
    assert (
        epsilon_of({Step(0.25, hidden.sigma): 7}, 1e-5) <= 2.0 < epsilon_of({Step(0.25, 0.998 * hidden.sigma): 7}, 1e-5)
    )
    searching = hiding(settings(clip=None, epsilon=2.0), rounds=7)
    # counts that one client changes by a half at most, each with its noise, and the sums: Gaussian mechanisms all
    first = 0.5 * searching.sigma * math.sqrt(6 / (0.1 * 7))  # 6 in the first round, one in each of the others
    later = 0.5 * searching.sigma / math.sqrt(0.02)
    together = (7 / searching.sigma**2 + 6 / (first / 0.5) ** 2 + 6 / (later / 0.5) ** 2) ** -0.5
    assert epsilon_of({Step(1.0, together): 1}, 1e-5) == pytest.approx(2.0, rel=0.005)


@pytest.mark.parametrize("name", ["promptfl", "fst-cbdg"])
def test_without_noise_and_cuts_the_model_is_that_of_plain_training_to_the_bit(name):
    """With clients that all have images, and equal weights: what is left of privacy is nothing."""
    method = small_method(name)
    method.weighting = "clients"
    sizes = (7, 4, 1, 8, 5)
    found = []
    for federation in (small_federation(method), without_noise(method)):
        federation.engine.rows = SampleRows.of(torch.arange(25).split(sizes))
        found.append(run_quietly(federation))
    plain, hidden = found
    assert digest(hidden.shared) == digest(plain.shared)
    assert [record.loss for record in hidden.records] == [None] * 3


def test_the_same_under_secure_sums():
    method = small_method("linear")
    sums: dict[str, Any] = {"secure_sum": True, "least_clients": 2}
    method.weighting = "clients"
    plain, hidden = small_federation(method, **sums), without_noise(method, **sums)
    for federation in (plain, hidden):
        federation.engine.rows = SampleRows.of(torch.arange(25).split((7, 4, 1, 8, 5)))
        run_quietly(federation)
    assert digest(hidden.shared) == digest(plain.shared)


def test_in_a_secure_sum_clients_cut_their_own_moves_so_that_rounding_cannot_lengthen_them():
    config = settings(clip=0.01)
    federation = small_federation(small_method("linear"), privacy=config, secure_sum=True, least_clients=2)
    norms = []
    for trained in federation.engine.train(0, range(CLIENTS), federation.shared):
        update = trained.update
        assert (update.weight, trained.loss, trained.examples) == (1.0, 0.0, 1)
        total = decode_updates(encode_update(update.tensors, federation.shared, 1.0, 0.0, CLIENTS), federation.shared)
        norms.append(length(total.moves))
    assert 0.0099 < max(norms) <= 0.01
    run_quietly(federation)
    assert [record.loss for record in federation.records] == [None] * 3


def test_noise_comes_in_shares_of_which_the_least_clients_add_all():
    federation = small_federation(small_method("linear"), privacy=settings(clip=0.5), secure_sum=True, least_clients=4)
    engine, hidden = federation.engine, hiding(settings(clip=0.5), sigma=2.0)
    engine.shared_noise = hidden
    numbers, least = 40_000, 4
    shares = [hidden.share(numbers, least, 0, 1, client) for client in range(CLIENTS)]
    # the noise of one, of the least that a sum may have, and of all: variances add up
    for clients, factor in ((1, 0.25), (4, 1.0), (CLIENTS, CLIENTS / 4)):
        deviation = float(torch.stack(shares[:clients]).sum(0).std())
        assert deviation == pytest.approx(2.0 * 0.5 * factor**0.5, rel=0.02)
    # a client's part is its own update and its share; one without images adds a share alone
    start = federation.shared
    trained = {result.update.client: result for result in engine.train(0, range(CLIENTS), start)}
    for client in range(CLIENTS):
        noise = hidden.share(count_elements(start), least, engine.private_seed, 0, client)
        given = trained.get(client)
        plain = no_update(start) if given is None else encode_update(given.update.tensors, start, 1.0, 0.0, CLIENTS)
        added = engine.part_of_sum(0, client, start, given) - plain
        assert torch.equal(added[:-SUMMED_FIGURES], to_whole(noise, CLIENTS))
    assert len(trained) < CLIENTS


def test_a_client_without_images_differs_from_others_in_nothing_but_what_noise_covers():
    """Else the server that the promise is made against would count those who trained."""
    federation = small_federation(small_method("linear"), privacy=settings(clip=0.5), secure_sum=True, least_clients=4)
    engine, start = federation.engine, federation.shared
    trained = {result.update.client: result for result in engine.train(0, range(CLIENTS), start)}
    parts = [engine.part_of_sum(0, client, start, trained.get(client)) for client in range(CLIENTS)]
    assert {tuple(from_whole(part[-SUMMED_FIGURES:]).tolist()) for part in parts} == {(1.0, 0.0, 1.0)}
    total = decode_updates(engine.sum_updates(0, range(CLIENTS), start).total, start)
    engine.rows = SampleRows.of([rows[:0] for rows in engine.rows])  # as if nobody had any
    nobody = decode_updates(engine.sum_updates(0, range(CLIENTS), start).total, start)
    assert total[1:] == nobody[1:] == (CLIENTS, 0.0, CLIENTS)


def test_the_server_of_a_secure_sum_adds_no_noise_of_its_own():
    runs = []
    for secret in (0, 1):
        federation = small_federation(small_method("linear"), privacy=settings(), secure_sum=True, least_clients=3)
        federation.privacy = hiding(settings(), seed=secret)
        runs.append(run_quietly(federation))
    assert digest(runs[0].shared) == digest(runs[1].shared)
    drawn = small_federation(small_method("linear"), privacy=settings(), secure_sum=True, least_clients=3)
    drawn.engine.private_seed = 1
    run_quietly(drawn)
    assert digest(drawn.shared) != digest(runs[0].shared)


def test_clients_weigh_the_same_and_tell_neither_loss_nor_examples():
    federation = small_federation(small_method("linear"), privacy=settings())
    for trained in federation.engine.train(0, range(CLIENTS), federation.shared):
        assert (trained.update.weight, trained.loss, trained.examples) == (1.0, 0.0, 1)


def test_cohorts_are_poisson_samples_that_the_secret_alone_decides():
    hidden = hiding(settings(), expected=20, clients=100)
    cohorts = [hidden.choose(index) for index in range(300)]
    sizes = torch.tensor([len(cohort) for cohort in cohorts], dtype=torch.float64)
    assert abs(float(sizes.mean()) - 20) < 1
    assert 12 < float(sizes.var()) < 21  # 100 * 0.2 * 0.8 = 16; a fixed size has none
    assert cohorts == [hidden.choose(index) for index in range(300)]
    assert cohorts != [replace(hidden, seed=1).choose(index) for index in range(300)]
    assert hiding(settings()).choose(0) == list(range(CLIENTS))


def test_a_round_of_nobody_is_a_round_of_noise_alone():
    federation = small_federation(small_method("linear"), privacy=settings(), per_round=1, rounds=8)
    run_quietly(federation)
    assert [] in [record.cohort for record in federation.records]
    assert len(federation.records) == 8


def test_the_clip_is_found_near_the_median_with_noise():
    norms = torch.logspace(-2, 0, 201).tolist()  # median 0.1
    hidden = hiding(settings(clip=None, epsilon=3.0), rounds=10, expected=201, clients=201)
    found = hidden.clip_of(0, [], norms)
    assert 0.05 < found < 0.2
    assert hidden.clip_of(0, [], [1e9] * 201) == pytest.approx(2**4, rel=0.2)
    assert hidden.clip_of(0, [], [0.0] * 201) == pytest.approx(2**-20, rel=0.2)
    lone = hiding(settings(clip=None, epsilon=0.1), rounds=10)  # five clients, and much noise
    assert len({replace(lone, seed=seed).clip_of(0, [], [0.1] * 5) for seed in range(20)}) > 5


def test_the_clip_follows_the_median_in_small_steps():
    hidden = hiding(settings(clip=None, epsilon=3.0), rounds=10, expected=201, clients=201, sigma=0.0)
    up, down = (hidden.clip_of(1, [record_of({"clip": 0.25})], [norm] * 201) for norm in (99.0, 0.01))
    assert up == pytest.approx(
        0.25 * math.exp(0.1)
    )  # all are above: half of them more than should be, at a rate of 0.2
    assert down == pytest.approx(0.25 * math.exp(-0.1))
    norms, records = torch.logspace(-2, 0, 201).tolist(), [record_of({"clip": 0.2})]
    noisy = replace(hidden)  # with the noise that epsilon asks for
    for index in range(1, 60):
        records.append(record_of({"clip": noisy.clip_of(index, records, norms)}))
    followed = [record.clip or 0.0 for record in records[20:]]
    assert 0.07 < sum(followed) / len(followed) < 0.14  # the median is 0.1
    assert len(set(followed)) > 10
    assert noisy.clip_of(5, [record_of({"clip": 2.0**4})], [1e9] * 201) == 2**4


def empirical_epsilon(present, absent, delta):
    """A lower bound of epsilon, at 95 %, from what an attacker of the best threshold gets right (Clopper and Pearson)."""
    found = 0.0
    for threshold in torch.linspace(float(absent.min()), float(present.max()), 60):
        hits, alarms = int((present > threshold).sum()), int((absent > threshold).sum())
        sure_hits = beta.ppf(0.025, hits, len(present) - hits + 1) if hits else 0.0
        most_alarms = beta.ppf(0.975, alarms + 1, len(absent) - alarms) if alarms < len(absent) else 1.0
        if sure_hits > delta:
            found = max(found, math.log((sure_hits - delta) / most_alarms))
    return found


@pytest.mark.parametrize("share, holds", [(1.0, True), (0.4, False)])
def test_an_attacker_learns_no_more_of_a_client_than_epsilon_says(share, holds):
    """The client moves as far as it may; the others are known. With too little noise the same attack finds more."""
    hidden = hiding(settings(clip=1.0, epsilon=1.0, delta=1e-3), rounds=1)
    hidden = hiding(hidden.config, rounds=1, sigma=share * hidden.sigma)
    shared, update = {"w": torch.zeros(1)}, Update(0, {"w": torch.ones(1) * 7}, 1.0)

    def released(updates, first):
        return torch.cat([hidden.merge(index, shared, updates, [])[0]["w"] for index in range(first, first + 4000)])

    found = empirical_epsilon(released([update], 0), released([], 4000), 1e-3)
    assert found > 0.4
    assert (found < 1.0) == holds


@pytest.mark.parametrize("share, holds", [(1.0, True), (0.4, False)])
def test_an_attacker_learns_no_more_of_an_image_than_epsilon_says(share, holds):
    """All steps of a run, where the image is in each by chance and has a gradient as long as it may have."""
    config = settings("record", clip=0.5, epsilon=2.0, delta=1e-3)
    training = small_federation(small_method("linear")).engine.training.model_copy(update={"local_epochs": 2})
    hidden = Scaled(config, training, 1)
    hidden.__dict__["share"] = share

    def released(there, first):
        totals = []
        for run in range(first, first + 1200):
            found = 0.0
            for step, batch in enumerate(hidden.draw(8, 0, run, 0)):
                gradient = torch.full((1,), 0.5 if there and 0 in batch else 0.0)
                found += float(hidden.noisy_mean({"w": gradient}, 8, 0, run, 0, step)["w"])
            totals.append(found)
        return torch.tensor(totals)

    found = empirical_epsilon(released(True, 0), released(False, 1200), 1e-3)
    assert found > 0.4
    assert (found < 2.0) == holds


class Scaled(RecordPrivacy):
    """With a share of the noise that is needed."""

    share = 1.0

    def sigma(self, images, rounds):
        return self.share * super().sigma(images, rounds)


# --- images


@pytest.mark.parametrize("name", BY_ROW)
def test_a_batch_is_the_mean_of_its_rows_where_a_method_says_so(name):
    method = small_method(name)
    federation = small_federation(method)
    samples = federation.engine.data.take(torch.arange(6))
    handed = method.hand_out(federation.shared, {}, 0)
    tensors = {**federation.engine.begun(0, handed), **handed}
    noise = drawn(method)

    def loss(rows):
        taken = samples.take(rows)
        batch = Batch(taken.inputs, taken.labels, torch.ones(len(rows)), rows, federation.shared, noise)
        return float(method.objective(tensors, batch)[0])

    rows = [loss(torch.tensor([row])) for row in range(6)]
    assert len(set(rows)) > 1
    assert loss(torch.arange(6)) == pytest.approx(sum(rows) / 6, rel=1e-5, abs=1e-6)


def test_each_image_is_cut_by_itself_over_all_tensors():
    """By hand: rows of norm 5 (3 and 4), 0.5 and, where the mask is 0, none at all."""
    gradients = {"w": torch.tensor([[3.0, 0.0], [0.3, 0.0], [9.0, 9.0]]), "b": torch.tensor([4.0, 0.4, 9.0])}
    total = row_gradients(gradients, torch.tensor([1.0, 1.0, 0.0]), 1.0)
    torch.testing.assert_close(total["w"], torch.tensor([0.6 + 0.3, 0.0]))
    torch.testing.assert_close(total["b"], torch.tensor(0.8 + 0.4))


def test_the_mean_of_a_units_images_is_cut_as_one():
    """By hand: of two rows of one unit the mean is (3, 4) and is cut to 1; the other's is (0.6, 0), and stays."""
    gradients = {"w": torch.tensor([[6.0, 0.0], [0.6, 0.0], [9.0, 9.0], [0.0, 8.0]])}
    units = torch.tensor([7, 2, 7, 7])  # the third row is padding
    total = row_gradients(gradients, torch.tensor([1.0, 1.0, 0.0, 1.0]), 1.0, units)
    torch.testing.assert_close(total["w"], torch.tensor([0.6 + 0.6, 0.8]))
    alone = row_gradients(gradients, torch.ones(4), 1.0, torch.arange(4))
    torch.testing.assert_close(alone, row_gradients(gradients, torch.ones(4), 1.0))


def by_unit(method, batch_size=2):
    """A federation whose client 3 has twelve images of four units, three each, and the others one image a unit."""
    config = settings("record", 3.0, 1.0)
    federation = small_federation(method, {"batch_size": batch_size}, config)
    plain = federation.engine
    units = torch.arange(100, 100 + len(plain.data))
    units[plain.rows[3]] = torch.arange(4).repeat(3)
    data = Samples({**plain.data.inputs, UNIT: units}, plain.data.labels)
    federation.engine = LocalEngine(method, data, plain.rows, plain.training, plain.federation, 0, config)
    return federation


def test_images_of_a_unit_are_drawn_together_and_counted_as_one():
    federation = by_unit(small_method("linear"))
    engine = federation.engine
    assert engine.sizes == [7, 0, 1, 4, 5]
    chunk = Chunk([3], [12], {}, [federation.shared])
    drawn = [engine._orders(index, chunk, torch.tensor([3]), 12) for index in range(300)]
    assert {tuple(orders.steps) for orders in drawn} == {(4,)}  # two epochs of two batches of two units
    steps = [step[step < 12] for orders in drawn for step in orders.positions[0]]
    for step in steps:
        assert torch.bincount(step % 4, minlength=4).tolist() == [
            3 * bool((step % 4 == unit).any()) for unit in range(4)
        ]
    share = torch.tensor([len(step) for step in steps]).double().mean() / 12
    assert abs(float(share) - 0.5) < 0.03


def test_the_budget_of_units_follows_from_their_number():
    federation = run_quietly(by_unit(small_method("linear")))
    hidden = federation.engine.hidden
    sigma = hidden.sigma(4, 3)
    assert epsilon_of({Step(0.5, sigma): 3 * 4}, 1e-5) == pytest.approx(3.0, rel=0.005)
    assert "each unit in a step" in hidden.spend([], federation.engine.sizes).sampling
    noise = hidden.noisy_mean({"w": torch.zeros(50_000)}, federation.engine.sizes[3], 0, 0, 3, 0)["w"]
    assert float(noise.std()) == pytest.approx(sigma / 2, rel=0.02)  # two units are expected in a step


class Noting(RecordPrivacy):
    """Which notes of how many records each step's noise is."""

    def noisy_mean(self, total, images, seed, *purpose):
        self.__dict__.setdefault("records", set()).add((purpose[1], images))
        return super().noisy_mean(total, images, seed, *purpose)


def test_noise_and_rates_of_a_step_are_of_units(monkeypatch):
    federation, records = by_unit(small_method("linear")), list[int]()
    engine = federation.engine
    engine.hidden = Noting(engine.privacy, engine.training, 3)

    def noting(settings, round_index, rounds, used, *further):
        records.extend(used)
        return rates_of_steps(settings, round_index, rounds, used, *further)

    monkeypatch.setattr("fedvl.federation.training.rates_of_steps", noting)
    engine.train(0, range(CLIENTS), federation.shared)
    assert engine.hidden.__dict__["records"] == {(0, 7), (2, 1), (3, 4), (4, 5)}
    assert sorted(records) == [1, 4, 5, 7]


class Quiet(RecordPrivacy):
    """Without noise."""

    def sigma(self, images, rounds):
        return 0.0


def quiet(method, clip=ENDLESS, **settings_of_training):
    found = small_federation(method, settings_of_training, settings("record", math.inf, clip))
    found.engine.hidden = Quiet(found.engine.privacy, found.engine.training, found.config.rounds)
    return found.engine


@pytest.mark.parametrize("name", ["linear", "promptfl", "cachefl", "fedprox"])
def test_without_noise_and_cuts_whole_batches_train_as_plain_ones(name):
    method, whole = small_method(name), {"batch_size": 50, "weight_decay": 0.01}
    plain, hidden = small_federation(method, whole), quiet(method, **whole)
    for left, right in zip(
        plain.engine.train(0, range(CLIENTS), plain.shared),
        hidden.train(0, range(CLIENTS), plain.shared),
        strict=True,
    ):
        assert left.update.weight == right.update.weight
        for key in plain.shared:
            torch.testing.assert_close(left.update.tensors[key], right.update.tensors[key], rtol=0, atol=2e-6)


def test_a_step_equals_a_plain_loop_over_images():
    """Independent code: gradients one by one by autograd, cut, added, divided by the images expected."""
    method = small_method("linear")
    engine = quiet(method, clip=2.0, batch_size=4, local_epochs=1, learning_rate=0.1, momentum=0.0)
    shared = method.start(torch_generator(0, "start"))
    (trained,) = engine.train(1, [3], shared)
    weight, bias = shared["weight"].clone(), shared["bias"].clone()
    samples = engine.data.take(engine.rows[3])
    for step in engine.hidden.draw(12, 0, 1, 3):
        total = [torch.zeros_like(weight), torch.zeros_like(bias)]
        for row in step:
            leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
            scores = 10.0 * samples.inputs["features"][row] @ leaves[0].T + leaves[1]
            loss = torch.nn.functional.cross_entropy(scores[None], samples.labels[row][None])
            found = torch.autograd.grad(loss, leaves)
            norm = math.sqrt(sum(float(part.pow(2).sum()) for part in found))
            for into, part in zip(total, found, strict=True):
                into += part * min(1.0, 2.0 / norm)
        weight, bias = weight - 0.1 * total[0] / 4, bias - 0.1 * total[1] / 4  # 12 images in 3 steps
    torch.testing.assert_close(trained.update.tensors["weight"], weight, rtol=0, atol=1e-5)
    torch.testing.assert_close(trained.update.tensors["bias"], bias, rtol=0, atol=1e-5)


def test_steps_are_poisson_samples_of_the_images():
    hidden = RecordPrivacy(settings("record"), small_federation(small_method("linear")).engine.training, 3)
    steps = [step for index in range(200) for step in hidden.draw(40, 0, index, 0)]  # 10 batches of 4, 2 epochs
    assert len(steps) == 200 * 20
    sizes = torch.tensor([len(step) for step in steps], dtype=torch.float64)
    assert abs(float(sizes.mean()) - 4) < 0.1
    assert abs(float(sizes.var()) - 3.6) < 0.4  # 40 * 0.1 * 0.9
    assert [step.tolist() for step in hidden.draw(4, 0, 0, 0)] == [[0, 1, 2, 3]] * 2


def test_noise_of_a_step_has_the_deviation_sigma_clip_by_images():
    config = settings("record", clip=0.5, epsilon=5.0)
    hidden = RecordPrivacy(config, small_federation(small_method("linear")).engine.training, 3)
    noise = hidden.noisy_mean({"w": torch.zeros(100_000)}, 12, 7, 0, 3, 0)["w"]
    sigma = hidden.sigma(12, 3)
    assert epsilon_of({Step(1 / 3, sigma): 3 * 2 * 3}, 1e-5) == pytest.approx(5.0, rel=0.005)
    assert float(noise.std()) == pytest.approx(sigma * 0.5 / 4, rel=0.01)
    again = hidden.noisy_mean({"w": torch.zeros(100_000)}, 12, 7, 0, 3, 1)["w"]
    assert abs(float(torch.corrcoef(torch.stack([noise, again]))[0, 1])) < 0.02


def test_hidden_images_train_the_same_whatever_the_chunk_and_tell_no_loss():
    found = []
    for chunk in (1, 10):
        federation = run_quietly(
            small_federation(small_method("linear"), privacy=settings("record", 8.0, 1.0), chunk=chunk)
        )
        assert [record.loss for record in federation.records] == [None] * 3
        assert federation.engine.train(0, [3], federation.shared)[0].loss == 0
        found.append(federation.shared)
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=0, atol=1e-6)


class Empty(RecordPrivacy):
    """Whose steps happen to take nothing."""

    def draw(self, images, seed, *purpose):
        return [torch.zeros(0, dtype=torch.long)] * 2


def test_a_step_without_images_is_a_step_of_noise_alone():
    federation = small_federation(small_method("linear"), privacy=settings("record", 8.0, 1.0))
    federation.engine.hidden = Empty(federation.engine.privacy, federation.engine.training, 3)
    (trained,) = federation.engine.train(0, [0], federation.shared)
    assert not torch.equal(trained.update.tensors["weight"], federation.shared["weight"])
    assert bool(trained.update.tensors["weight"].isfinite().all())


# --- the budget


@pytest.mark.parametrize("unit, clip", [("client", 0.1), ("client", None), ("record", 1.0)])
def test_the_budget_grows_round_by_round_and_is_spent_with_the_last(unit, clip):
    federation = run_quietly(small_federation(small_method("linear"), privacy=settings(unit, 3.0, clip)))
    spent = [record.privacy.epsilon for record in federation.records]
    assert spent == sorted(set(spent))
    assert 2.9 < spent[-1] <= 3.0
    assert {(record.privacy.unit, record.privacy.delta) for record in federation.records} == {(unit, 1e-5)}
    assert [Record.model_validate_json(record.to_json()) for record in federation.records] == federation.records


@pytest.mark.parametrize("unit", ["client", "record"])
def test_a_resumed_run_goes_on_counting_and_stops_before_its_ceiling(unit, tmp_path):
    config, journal = settings(unit, 3.0), Journal(tmp_path / "journal")
    run_quietly(replace(small_federation(small_method("linear"), privacy=config, rounds=2), journal=journal))
    longer = replace(small_federation(small_method("linear"), privacy=config, rounds=4), journal=journal)
    longer.restore()
    before = digest(longer.shared)
    with pytest.raises(FedVLError, match=r"Round 3 would take epsilon to 3\.\d+, above privacy\.epsilon \(3\)"):
        run_quietly(longer)
    assert (len(longer.records), digest(longer.shared)) == (2, before)


def test_a_restored_run_under_privacy_ends_in_the_same_bits(tmp_path):
    whole = run_quietly(small_federation(small_method("linear"), privacy=settings(clip=None), rounds=3))
    journal = Journal(tmp_path / "journal")
    stopped = replace(small_federation(small_method("linear"), privacy=settings(clip=None), rounds=3), journal=journal)

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.run(after_round=stop)
    resumed = replace(small_federation(small_method("linear"), privacy=settings(clip=None), rounds=3), journal=journal)
    resumed.restore()
    run_quietly(resumed)
    assert digest(resumed.shared) == digest(whole.shared)
    assert [record.privacy for record in resumed.records] == [record.privacy for record in whole.records]


def party(folder):
    federation = small_federation(small_method("linear"), privacy=settings("record", 3.0, 1.0))
    held = [rows if client == 3 else rows[:0] for client, rows in enumerate(federation.engine.rows)]
    federation.engine.rows = SampleRows.of(held)
    return Party(3, federation.engine, folder, log=AuditLog(folder / "audit.jsonl"))


def test_a_party_keeps_a_ledger_that_survives_it_and_stops_it(tmp_path):
    party(tmp_path).spend(0, "train")
    party(tmp_path).spend(1, "train")
    party(tmp_path).spend(1, "train")  # answered again: the same noise, and nothing more spent
    ledger = party(tmp_path).spent
    assert [entry.round for entry in ledger] == [1, 2]
    assert 0 < ledger[0].epsilon < ledger[1].epsilon < 3
    party(tmp_path).spend(2, "train")
    with pytest.raises(FedVLError, match="Round 4 would take epsilon"):
        party(tmp_path).spend(3, "train")
    assert len(party(tmp_path).spent) == 3
    (tmp_path / "salt").unlink()  # with another secret the same round is other noise, and spends again
    assert party(tmp_path).cost(0) is not None


def test_a_party_draws_its_noise_from_a_secret_of_256_bits(tmp_path):
    one, other = party(tmp_path / "a"), party(tmp_path / "b")
    assert one.engine.private_seed != other.engine.private_seed
    assert one.engine.private_seed.bit_length() > 200
    shared = one.engine.start
    sent = [found.engine.train(0, [3], shared)[0].update.tensors for found in (one, other, party(tmp_path / "a"))]
    assert digest(sent[0]) == digest(sent[2]) != digest(sent[1])


# --- what is refused


def refused(unit="client", *, clip=None, epsilon=3.0, subspace=None, **sections):
    given = {"unit": unit, "epsilon": epsilon, "clip": clip, "subspace": subspace}
    section = {key: value for key, value in given.items() if value is not None}
    with pytest.raises(FedVLError) as error:
        prepare({"privacy": section, "data": {"clients": 4, **sections.pop("data", {})}, **sections})
    return str(error.value)


def test_what_noise_does_not_cover_is_refused_in_a_sentence():
    assert "no updates" in refused(method={"name": "zero-shot"})
    assert "no updates" in refused(method={"name": "centralised"})
    assert "image counts in the loss or label" in refused("record", method={"name": "fst-cbdg"})
    assert "use --privacy client:eps=3" in refused("record", method={"name": "fedclip"})
    assert "image counts" in refused("record", method={"name": "fedpp"}, federation={"drift": False})
    assert "sends text other than as training left it" in refused(
        "record", method={"name": "fedmgp", "visual_tokens": 0}
    )
    assert "report class counts" in refused(method={"name": "fedpp"}, federation={"drift": False})
    assert "drift=false" in refused(federation={"drift": True})
    assert "choose --robust" in refused(federation={"robust": "median"})
    assert "sends perturbed_texts" in refused(method={"name": "fed-mp"})
    assert "gradients do not move" in refused(method={"name": "fedavg-nn"})
    assert "say to what norm" in refused(federation={"secure_sum": True})
    assert "leave --per-round out" in refused(federation={"secure_sum": True, "per_round": 3}, clip=0.1)
    assert "compare the images" in refused("record", data={"labels": "fpl"})
    assert "for the updates of clients" in refused("record", subspace=4)
    assert "no vectors that are compared" in refused(method={"name": "promptfl"}, subspace=4)
    hidden = prepare({"data": {"clients": 4}, "privacy": {"unit": "client"}}).experiment
    with pytest.raises(FedVLError, match="of each client, and client-level privacy hides each client"):
        check_privacy(small_method("fedmsplit-p"), hidden)


def test_a_public_subspace_is_refused_between_machines():
    hidden = resolve_experiment({"privacy": {"unit": "client", "subspace": 4}})
    with pytest.raises(FedVLError, match="only a simulation has"):
        preparation.prepare(hidden, Silent(), splits=("test",))


def test_settings_without_privacy_have_none():
    experiment = prepare({"data": {"clients": 4}}).experiment
    assert privacy.privacy_of(experiment, 0) is None
    hidden = experiment.model_copy(update={"privacy": settings(), "federation": experiment.federation})
    found = privacy.privacy_of(hidden, 9)
    assert isinstance(found, ClientPrivacy)
    assert (found.clients, found.expected, found.seed) == (4, 4, 9)
