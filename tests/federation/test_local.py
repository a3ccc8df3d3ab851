"""Batched clients against one at a time, against a plain PyTorch loop, and against each other."""

import math
from functools import cache

import pytest
import torch
from helpers.small import RAGGED, run_quietly, small_federation, small_method, small_samples

from fedvl.federation.orders import order_of
from fedvl.methods import method_names
from fedvl.methods.base import Method
from fedvl.methods.roles import Given, Private, Shared
from fedvl.seeding import Uniform, derived_seed, keys_of
from fedvl.tensors import Tensors, digest

UNTRAINED = {"zero-shot"}  # has nothing that is shared
TRAINED = [name for name in method_names() if name not in UNTRAINED]
# Factors on tolerances: what is trained acts in all layers of a random tower, which magnifies rounding. In double
# precision both agree to 1e-9 (fedlora: tests/methods/test_fedlora.py).
MAGNIFIED = {"fedtpg": 3.0, "fedlora": 20.0}


@cache
def final(name, **settings):
    """What two rounds end with, for all that is compared with it."""
    return run_quietly(small_federation(small_method(name), rounds=2, **settings)).shared


def assert_near(left, right, tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance)


def test_what_is_tried_below_is_every_method_that_shares_something():
    assert [name for name in method_names() if small_method(name).start(torch.Generator())] == TRAINED


@pytest.mark.parametrize("name", TRAINED)
def test_batched_equals_one_by_one_with_ragged_and_empty_clients(name):
    assert_near(final(name), final(name, one_by_one=True), 1e-4 if name in MAGNIFIED else 1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_the_chunk_does_not_change_the_result(name):
    tolerance = 1e-6 * MAGNIFIED.get(name, 1.0)  # 1.1e-6 was seen: more rows may add in another order
    for chunk in (1, 3):
        assert_near(final(name, chunk=chunk), final(name), tolerance)


@pytest.mark.parametrize("name", TRAINED)
def test_training_moves_every_tensor(name):
    method = small_method(name)
    start = method.first_shared(0)
    moved = final(name)
    still = [key for key in start if torch.equal(start[key], moved[key])]
    assert set(still) <= {"attention.0.bias"}  # batch norm follows it: its gradient is 0 but for rounding


def test_local_training_equals_a_plain_loop_with_torch_optim():
    """Independent code: nn.Linear, torch.optim.SGD, batches cut from the same orders."""
    method = small_method("linear")
    federation = small_federation(method, {"momentum": 0.9, "weight_decay": 0.01, "learning_rate": 0.02})
    (trained,) = federation.engine.train(2, [3], federation.shared)
    samples = small_samples(method)
    start = sum(RAGGED[:3])
    features, labels = samples.inputs["features"][start : start + 12], samples.labels[start : start + 12]
    layer = torch.nn.Linear(features.shape[1], 4)
    layer.load_state_dict(federation.shared)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)
    for epoch in range(2):
        for rows in order_of(0, round_index=2, client=3, samples=12, epoch=epoch).split(4):
            weights = layer.weight, layer.bias
            scores = 10.0 * features[rows] @ weights[0].T + weights[1]
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(scores, labels[rows]).backward()
            optimiser.step()
    assert_near(trained.update.tensors, {"weight": layer.weight.detach(), "bias": layer.bias.detach()}, 1e-5)
    assert trained.update.weight == 12


def test_empty_clients_send_nothing():
    federation = small_federation(small_method("linear"))
    trained = federation.engine.train(0, [0, 1, 2], federation.shared)
    assert [result.update.client for result in trained] == [0, 2]


class Counting(Method):
    """Counts in a private tensor how often each sample was used; its noise must differ by client and step."""

    def roles(self):
        return {"uses": Private(per_sample=True)}

    def start(self, generator):
        return {"w": torch.zeros(2)}

    def join(self, samples, generator):
        return {"uses": torch.zeros(len(samples)), "noise_seen": torch.zeros(3)}

    def noise(self):
        return {"draw": Uniform((3,))}

    def objective(self, tensors, batch):
        used = torch.zeros_like(tensors["uses"]).scatter_add(0, batch.position, batch.mask)
        changed = {"uses": tensors["uses"] + used, "noise_seen": tensors["noise_seen"] + batch.noise["draw"]}
        return (tensors["w"] ** 2).sum() + tensors["w"].sum(), changed


@pytest.mark.parametrize("one_by_one", [False, True])
def test_private_tensors_stay_whole_and_every_sample_is_used_once_an_epoch(one_by_one):
    method = Counting(Method.options_type(), small_method("linear").task)
    federation = run_quietly(small_federation(method, one_by_one=one_by_one))
    private = federation.engine.private
    assert sorted(private) == [0, 2, 3, 4]
    for client, tensors in private.items():
        assert tensors["uses"].tolist() == [6.0] * RAGGED[client]  # 3 rounds of 2 epochs
    generator_sums = []
    for client in private:
        total = torch.zeros(3)
        for round_index in range(3):
            seed = derived_seed(0, "noise", "draw", round_index)
            for step in range(2 * -(-RAGGED[client] // 4)):
                total += Uniform((3,))(keys_of(seed, torch.tensor([client]), step))[0]
        torch.testing.assert_close(private[client]["noise_seen"], total)
        generator_sums.append(tuple(total.tolist()))
    assert len(set(generator_sums)) == 4


def test_flops_are_those_of_the_matrix_products():
    federation = small_federation(small_method("linear"))
    # 12 samples in batches of 4, 2 epochs: 6 steps of scores (2*4*6*4) and of the gradient of the weight (the same again)
    assert federation.engine.local_flops(federation.shared) == 6 * 2 * (2 * 4 * 6 * 4)


def test_rates_fall_from_epoch_to_epoch_for_each_client_by_its_own_batches():
    """Independent code: torch.optim.SGD for clients of 3 and 2 batches an epoch that are trained in one kernel."""
    method = small_method("linear")
    training = {"schedule": "cosine-restarts", "restart_rounds": 3, "learning_rate": 0.02}
    federation = small_federation(method, training)
    samples = small_samples(method)
    for result in federation.engine.train(1, [0, 3, 4], federation.shared):
        client = result.update.client
        first = sum(RAGGED[:client])
        rows = torch.arange(first, first + RAGGED[client])
        parameters = [federation.shared[name].clone().requires_grad_() for name in ("weight", "bias")]
        optimiser = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
        for epoch in range(2):
            optimiser.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * (2 + epoch) / 6))
            for chosen in rows[order_of(0, 1, client, len(rows), epoch)].split(4):
                scores = 10.0 * samples.inputs["features"][chosen] @ parameters[0].T + parameters[1]
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(scores, samples.labels[chosen]).backward()
                optimiser.step()
        expected = {"weight": parameters[0].detach(), "bias": parameters[1].detach()}
        assert_near(result.update.tensors, expected, 1e-5)


class Odd(Counting):
    """Trains on every other sample; a client of one has none at position 1."""

    def roles(self):
        return {**super().roles(), "labels": Private(per_sample=True)}

    def join(self, samples, generator):
        return {**super().join(samples, generator), "labels": torch.arange(len(samples)) % 2 - 1}


@pytest.mark.parametrize("one_by_one", [False, True])
def test_only_chosen_samples_are_trained_on_and_counted(one_by_one):
    method = Odd(Method.options_type(), small_method("linear").task)
    federation = run_quietly(small_federation(method, one_by_one=one_by_one, chunk=2))
    assert sorted(federation.engine.private) == [0, 3, 4]  # client 2 has chosen nothing: it sat out
    for client, tensors in federation.engine.private.items():
        assert tensors["uses"].tolist() == [6.0 * (place % 2) for place in range(RAGGED[client])]
    trained = federation.engine.train(0, range(5), federation.shared)
    assert [(result.update.client, result.update.weight) for result in trained] == [(0, 3), (3, 6), (4, 2)]
    assert federation.records[0].dropped == [1, 2]
    assert federation.records[0].refused == []


@pytest.mark.parametrize("name", [name for name in TRAINED if not small_method(name).role.statistics])
def test_a_private_tensor_cannot_leave(name, monkeypatch):
    """Whatever a method keeps for its client, an update holds the shared tensors and the declared extras, and nothing else."""
    method = small_method(name)
    federation = small_federation(method, rounds=1)
    sent: list[tuple[Tensors, Tensors]] = []
    train = federation.engine.train

    def listening(*arguments):
        trained = train(*arguments)
        sent.extend((result.update.tensors, result.private) for result in trained)
        return trained

    monkeypatch.setattr(federation.engine, "train", listening)
    run_quietly(federation)
    assert sent
    for tensors, private in sent:
        assert tensors.keys() == federation.shared.keys() | method.role.sent.keys()
        assert not tensors.keys() & private.keys()


# --- rates, hand-outs and shapes by tensor


class TwoRates(Method):
    """w and own are each drawn to 1 by half the square: a step of plain SGD moves them by rate (1 - value)."""

    scope = "row"

    def roles(self):
        return {"w": Shared(rate=3.0), "own": Private(trained=True, rate=0.5), "still": Shared(trained=False)}

    def start(self, generator):
        return {"w": torch.zeros(2), "plain": torch.zeros(2), "still": torch.zeros(2)}

    def join(self, samples, generator):
        return {"own": torch.zeros(1)}

    def loss(self, tensors, batch):
        return sum(((tensors[name] - 1) ** 2).sum() / 2 for name in ("w", "plain", "own", "still"))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_each_tensor_has_its_own_rate(one_by_one):
    method = TwoRates(Method.options_type(), small_method("linear").task)
    steps = {"batch_size": 100, "local_epochs": 1, "learning_rate": 0.1, "momentum": 0.0}
    federation = small_federation(method, steps, rounds=1, one_by_one=one_by_one)
    for result in federation.engine.train(0, range(5), federation.shared):
        sent = result.update.tensors
        torch.testing.assert_close(sent["w"], torch.full((2,), 0.3))
        torch.testing.assert_close(sent["plain"], torch.full((2,), 0.1))
        torch.testing.assert_close(result.private["own"], torch.full((1,), 0.05))
        assert not sent["still"].any()


class Guided(Method):
    """The server gives each client a number of its own beside w, which the client's loss draws w to."""

    def roles(self):
        return {"goal": Given((1,))}

    def start(self, generator):
        return {"w": torch.zeros(1)}

    def hand_out(self, shared, last, client):
        return {**shared, "goal": torch.tensor([float(client)])}

    def loss(self, tensors, batch):
        return ((tensors["w"] - batch.received["goal"]) ** 2).sum() / 2 + 0 * tensors["goal"].sum()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_hand_out_may_hold_tensors_that_clients_only_read(one_by_one):
    method = Guided(Method.options_type(), small_method("linear").task)
    steps = {"batch_size": 100, "local_epochs": 1, "learning_rate": 0.1, "momentum": 0.0}
    federation = run_quietly(small_federation(method, steps, rounds=1, one_by_one=one_by_one))
    with_data = {client: size for client, size in enumerate(RAGGED) if size}
    mean = sum(0.1 * client * size for client, size in with_data.items()) / sum(with_data.values())
    torch.testing.assert_close(federation.shared["w"], torch.tensor([mean]))
    (record,) = federation.records
    assert record.bytes_up == 4 * len(with_data)  # w alone comes back
    assert record.bytes_down == 8 * len(RAGGED)


class Making(Method):
    """It doubles what it is given before training; when that ends it sends the sum of its numbers for w, and keeps others."""

    def roles(self):
        return {
            "w": Shared(end=lambda name, tensors, received, samples: tensors["w"] + tensors["own"] + len(samples)),
            "own": Private(trained=True),
            "twice": Private(
                lasts=False, begin=lambda name, tensors, received, samples: 2 * tensors["goal"] + tensors["w"]
            ),
            "seen": Private(
                end=lambda name, tensors, received, samples: tensors["w"] * tensors["goal"] + tensors["twice"]
            ),
            "goal": Given((1,)),
        }

    def start(self, generator):
        return {"w": torch.zeros(1)}

    def join(self, samples, generator):
        return {"own": torch.ones(1), "seen": torch.zeros(0)}

    def hand_out(self, shared, last, client):
        return {**shared, "goal": torch.tensor([float(client)])}

    def loss(self, tensors, batch):
        return -(tensors["w"] + tensors["own"]).sum()


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_is_made_when_training_begins_and_ends_is_made_of_all_that_there_is_then(one_by_one):
    """One step of rate 0.1: w is 0.1 and own 1.1, so that 1.2 and the number of samples are sent; 2.1 goals are kept."""
    method = Making(Method.options_type(), small_method("linear").task)
    steps = {"batch_size": 100, "local_epochs": 1, "learning_rate": 0.1, "momentum": 0.0}
    federation = small_federation(method, steps, rounds=1, one_by_one=one_by_one)
    handed = {client: method.hand_out(federation.shared, {}, client) for client in range(5)}
    for result in federation.engine.train(0, range(5), federation.shared, handed):
        client = result.update.client
        torch.testing.assert_close(result.update.tensors, {"w": torch.tensor([1.2 + RAGGED[client]])})
        expected = {"own": torch.tensor([1.1]), "seen": torch.tensor([2.1 * client])}
        torch.testing.assert_close(result.private, expected)


class Lengths(Method):
    """Every client keeps as many numbers as it has samples, and trains them to 1 together with w."""

    def roles(self):
        return {"own": Private(trained=True)}

    def start(self, generator):
        return {"w": torch.zeros(1)}

    def join(self, samples, generator):
        return {"own": torch.zeros(1 + len(samples) // 5, 2)}

    def loss(self, tensors, batch):
        return ((tensors["w"] + tensors["own"].sum() - batch.mask.sum()) ** 2).sum() / 2


def test_private_tensors_may_have_other_shapes_in_other_clients():
    method = Lengths(Method.options_type(), small_method("linear").task)
    together, alone = (run_quietly(small_federation(method, one_by_one=one)) for one in (False, True))
    shapes = {client: tuple(private["own"].shape) for client, private in together.engine.private.items()}
    assert shapes == {0: (2, 2), 2: (1, 2), 3: (3, 2), 4: (2, 2)}  # clients 0 and 4 still share a kernel
    assert_near(together.shared, alone.shared, 1e-5)
    for client, private in together.engine.private.items():
        assert_near(private, alone.engine.private[client], 1e-5)


def test_the_order_in_which_private_tensors_are_named_changes_nothing():
    """A journal gives them back in another order; clients must share the same kernels all the same."""
    plain, turned = (small_federation(small_method("fed-mp"), rounds=1) for _ in range(2))
    for client in (0, 3):
        private = turned.engine.private_of(client) | {"more": torch.zeros(1)}
        turned.engine.private[client] = dict(reversed(private.items()))
    for client in (2, 4):
        turned.engine.private[client] = turned.engine.private_of(client) | {"more": torch.zeros(1)}
    (chunk,) = turned.engine._chunks([3, 0, 4, 2], turned.shared, None)
    assert chunk.clients == [3, 0, 4, 2]
    assert digest(run_quietly(plain).shared) == digest(run_quietly(turned).shared)
