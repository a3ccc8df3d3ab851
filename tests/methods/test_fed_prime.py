"""Fed-PRIME: what a sample takes from the pools, what draws keys to queries, and what the server makes of the pools."""

import math

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.small import run_quietly, small_batch, small_federation, small_method, small_samples
from pydantic import ValidationError

from fedvl.errors import FedVLError
from fedvl.federation.merging import merge
from fedvl.methods.base import Update
from fedvl.methods.fed_prime import USE, Choice, FedPrimeOptions
from fedvl.methods.parts.fused import EmbeddedSamples, embed
from fedvl.runs.requirements import check_privacy, check_secure_sum
from fedvl.runs.settings import resolve_experiment


def seen(*maxima):
    """Samples whose largest token values are these; a padded token is larger still, and must not count."""
    tokens = torch.stack(
        [torch.stack([torch.tensor(m), torch.full((8,), -5.0), torch.full((8,), 9.0)]) for m in maxima]
    )
    return EmbeddedSamples(tokens, torch.tensor([[True, True, False]]).expand(len(maxima), -1))


def axis(*weights):
    return [float(weight) for weight in weights] + [0.0] * (8 - len(weights))


def pools(method, **others):
    tensors = method.start(torch.Generator().manual_seed(0))
    return {
        **tensors,
        "projection.inter": torch.eye(8),
        "inter": 2 * torch.eye(8)[:5],
        "uses": torch.zeros(5),
        **others,
    }


# --- selection


def test_a_sample_takes_the_prompts_whose_keys_are_nearest_to_its_query():
    method = small_method("fed-prime", top_k=2)
    choice = method.choose(pools(method), "inter", seen(axis(1, 3, 0, 2), axis(0, 0, 4, 0, 3)), torch.ones(2))
    assert choice.taken.argmax(-1).tolist() == [[1, 3], [2, 4]]
    assert choice.chosen.tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    expected = [[1 / 14**0.5, 3 / 14**0.5, 0, 2 / 14**0.5, 0], [0, 0, 0.8, 0, 0.6]]  # keys are unit vectors
    torch.testing.assert_close(choice.cosines, torch.tensor(expected))


def test_the_query_is_projected():
    method = small_method("fed-prime", top_k=1)
    turned = torch.eye(8).roll(2, 0)  # axis 0 becomes axis 2
    choice = method.choose(pools(method, **{"projection.inter": turned}), "inter", seen(axis(1)), torch.ones(1))
    assert choice.taken.argmax(-1).tolist() == [[2]]


def test_a_batch_takes_what_most_of_it_choose_and_padding_has_no_say():
    method = small_method("fed-prime", top_k=2, selection="batch")
    samples = seen(axis(3, 2), axis(0, 3, 2), axis(0, 0, 0, 2, 3), axis(0, 0, 0, 2, 3))
    choice = method.choose(pools(method), "inter", samples, torch.tensor([1.0, 1.0, 1.0, 0.0]))
    # prompt 1 has two votes, 0, 2, 3 and 4 have one each: the first of them
    assert choice.taken.argmax(-1).tolist() == [[1, 0]] * 4
    everyone = method.choose(pools(method), "inter", samples, torch.ones(4))
    assert everyone.taken.argmax(-1).tolist() == [[1, 3]] * 4  # 1, 3 and 4 have two


def test_a_pool_smaller_than_top_k_is_taken_whole():
    method = small_method("fed-prime")
    small = pools(method, inter=torch.eye(8)[:3], uses=torch.zeros(3))
    assert method.choose(small, "inter", seen(axis(1)), torch.ones(1)).chosen.tolist() == [[1, 1, 1]]
    assert method.predict(small, small_samples(method, 4).inputs).shape == (4, 4)


def test_prompts_stand_before_the_tokens_and_the_texts_first_token_is_read():
    method = small_method("fed-prime", prompts=3, top_k=1)
    tensors = method.start(torch.Generator().manual_seed(0))
    inputs = {name: tensor[-3:] for name, tensor in small_samples(method).inputs.items()}  # all have images
    looked = embed(method.task.fused, inputs)
    everyone = torch.ones(3)
    numbers = {name: method.choose(tensors, name, looked, everyone).chosen.argmax(1) for name in ("intra", "inter")}
    prompts = torch.stack([tensors[name][number] for name, number in numbers.items()], 1)
    pixels = method.task.fused.normalise(inputs["pixels"])
    hidden, pooled = method.task.fused.encode(inputs["tokens"], pixels, prompts)
    torch.testing.assert_close(method.represent(tensors, inputs), pooled)
    first = small_method("fed-prime", prompts=3, top_k=1, pooled="first")
    torch.testing.assert_close(first.represent(tensors, inputs), method.task.fused.pool(hidden, 0))


# --- losses


def relevance(kind, cosines, chosen, mask=(1.0, 1.0)):
    method = small_method("fed-prime", key_loss=kind)
    return method.relevance(Choice(cosines, torch.tensor(chosen)[:, None].float()), torch.tensor(mask))


def test_relevance_loss_by_hand():
    cosines = torch.tensor([[0.5, -0.2, 0.1], [0.9, 0.3, -0.4]])
    chosen = [[1, 0, 0], [0, 0, 1]]

    def log_sigmoid(x):
        return -math.log(1 + math.exp(-x))

    first = log_sigmoid(0.5) + log_sigmoid(0.2) + log_sigmoid(-0.1)  # S_pos + S_neg
    second = log_sigmoid(-0.9) + log_sigmoid(-0.3) + log_sigmoid(-0.4)
    assert relevance("logistic", cosines, chosen).item() == pytest.approx(-(first + second) / 2)
    assert relevance("logistic", cosines, chosen, (1.0, 0.0)).item() == pytest.approx(-first)  # padding is no sample
    assert relevance("pull", cosines, chosen).item() == pytest.approx(-(0.5 - 0.4) / 2)
    assert relevance("pull", cosines, chosen, (0.0, 1.0)).item() == pytest.approx(0.4)


@pytest.mark.parametrize(("kind", "others"), [("logistic", -1), ("pull", 0)])
def test_a_step_draws_chosen_keys_to_the_query_and_pushes_the_others_off(kind, others):
    method = small_method("fed-prime", key_loss=kind, top_k=2)
    generator = torch.Generator().manual_seed(3)
    tensors = pools(method, inter=torch.randn(5, 8, generator=generator))
    sample = seen(axis(1, 3, 0, 2))

    def look(pool):
        choice = method.choose({**tensors, "inter": pool}, "inter", sample, torch.ones(1))
        return method.relevance(choice, torch.ones(1)), choice

    before = look(tensors["inter"])[1]
    gradient = torch.func.grad(lambda pool: look(pool)[0])(tensors["inter"])
    after = look(tensors["inter"] - 0.01 * gradient)[1]
    moved = (after.cosines - before.cosines)[0]
    assert (moved[before.chosen[0] > 0] > 1e-5).all()
    rest = moved[before.chosen[0] == 0]
    assert (rest < -1e-5).all() if others else (rest.abs() < 1e-6).all()


def test_the_objective_is_task_loss_plus_lambda_times_relevance_of_both_pools():
    plain, weighted = small_method("fed-prime", key_loss="none"), small_method("fed-prime", key_weight=0.25)
    tensors = plain.start(torch.Generator().manual_seed(0))
    batch = small_batch(plain, torch.arange(5, 12))
    task, changed = plain.objective(tensors, batch)
    scores = plain.predict(tensors, batch.inputs)
    torch.testing.assert_close(task, torch.nn.functional.cross_entropy(scores, batch.labels))
    choices = plain.choose_all(tensors, embed(plain.task.fused, batch.inputs), batch.mask)
    total = sum(weighted.relevance(choice, batch.mask) for choice in choices.values())
    torch.testing.assert_close(weighted.objective(tensors, batch)[0], task + 0.25 * total)
    torch.testing.assert_close(changed["uses"], choices["inter"].chosen.mean(0))
    assert changed["uses"].sum() == pytest.approx(5)  # each sample takes five
    padded = batch._replace(mask=torch.tensor([1.0, 0, 1, 1, 1, 0, 1]))
    real = small_batch(plain, torch.tensor([5, 7, 8, 9, 11]))
    for method in (plain, weighted):
        (loss, uses), (expected, counted) = (method.objective(tensors, part) for part in (padded, real))
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(uses, counted)


# --- the server


def update(client, inter, uses, weight=1.0, **others):
    tensors = {"intra": torch.zeros(2, 8), "inter": inter, "uses": torch.tensor(uses), **others}
    return Update(client, tensors, weight)


def test_only_prompts_that_were_chosen_are_aligned_and_the_pool_changes_its_size():
    method = small_method("fed-prime")
    sent = 3 * torch.eye(8)[:4]
    shared = {"intra": torch.zeros(2, 8), "inter": sent, "uses": torch.tensor([7.0, 1.0, 0.0, 2.0])}
    near = 0.01 * torch.ones(4, 8)
    merged = merge(
        method,
        shared,
        [
            update(0, (sent + near)[[1, 0, 2, 3]], [7.5, 1.25, 0.0, 2.0], intra=torch.full((2, 8), 3.0)),  # 1 and 0
            update(1, sent - near, [7.0, 2.0, 0.5, 2.0], 2.0),  # 1 and 2; it stands at 0 and 3 as before
            update(2, sent + 5, [7.0, 1.0, 0.0, 2.0]),  # none
        ],
    )
    found = {int(row.argmax()): (row, size) for row, size in zip(merged["inter"], merged["uses"].tolist(), strict=True)}
    assert sorted(found) == [0, 1, 2]
    assert [found[prompt][1] for prompt in range(3)] == [1.0, 2.0, 1.0]
    torch.testing.assert_close(found[1][0], sent[1])  # the mean of both clients'
    torch.testing.assert_close(found[0][0], sent[0] + 0.01)
    torch.testing.assert_close(merged["intra"], torch.full((2, 8), 0.75))  # averaged by weight


def test_a_pool_that_nobody_chose_from_stays():
    method = small_method("fed-prime")
    shared = {"intra": torch.zeros(2, 8), "inter": torch.eye(8)[:2], "uses": torch.ones(2)}
    merged = merge(method, shared, [update(0, torch.zeros(2, 8), [1.0, 1.0])])
    assert torch.equal(merged["inter"], shared["inter"])


def test_rounds_go_on_with_a_pool_of_another_size_and_the_loss_falls():
    federation = small_federation(small_method("fed-prime"), {"learning_rate": 0.3, "batch_size": 4}, rounds=5)
    run_quietly(federation)
    assert federation.shared["inter"].shape == (len(federation.shared["uses"]), 8)
    assert len(federation.shared["uses"]) != 20
    assert all(not record.refused for record in federation.records)
    assert federation.records[-1].loss < federation.records[0].loss - 0.05


def test_local_intra_pools_stay_with_their_clients_and_answer_for_them_alone():
    method = small_method("fed-prime", intra="local")
    federation = small_federation(method, rounds=1)
    assert "intra" not in federation.shared
    run_quietly(federation)
    private = federation.engine.private
    assert sorted(private) == [0, 2, 3, 4]
    inputs = small_samples(method).inputs
    first, last = (method.predict({**federation.shared, **private[client]}, inputs) for client in (0, 3))
    assert not torch.allclose(first, last)
    outside = method.predict(federation.shared, inputs)  # a user who has no pool
    only_inter = small_method("fed-inter").predict(federation.shared, inputs)
    assert torch.equal(outside, only_inter)


def test_frozen_projections_are_the_same_for_all_and_never_sent():
    method, again = (small_method("fed-prime", projections="frozen") for _ in range(2))
    tensors = method.start(torch.Generator().manual_seed(0))
    assert not any(name.startswith("projection") for name in tensors)
    inputs = small_samples(method).inputs
    assert torch.equal(method.predict(tensors, inputs), again.predict(tensors, inputs))


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"prompts": 0}, {"selection": "best"}, {"key_weight": -1}, {"intra": "sent"}, {"size": 3}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        FedPrimeOptions(**options)


def test_a_bounded_pool_keeps_the_prompts_of_most_clients():
    method = small_method("fed-prime", most_prompts=2)
    start = torch.eye(8)[:3]
    shared = {"inter": start, "uses": torch.zeros(3)}
    used = torch.tensor([[1.0, 1, 1], [0, 1, 1], [0, 0, 1]])  # the first prompt by one client, the last by all three
    updates = [Update(c, {"inter": start, "uses": row}, 1.0) for c, row in enumerate(used)]
    found = method.merge(shared, updates)
    assert sorted(found["uses"].tolist()) == [2, 3]
    free = small_method("fed-prime").merge(shared, updates)
    assert sorted(free["uses"].tolist()) == [1, 2, 3]


def test_prompts_train_at_a_rate_of_their_own():
    moves = {}
    for rate in (1.0, 100.0):
        federation = small_federation(
            small_method("fed-prime", prompt_rate=rate), {"local_epochs": 1, "batch_size": 99}
        )
        (result,) = federation.engine.train(0, [0], federation.shared)
        moves[rate] = {name: float((t - federation.shared[name]).norm()) for name, t in result.update.tensors.items()}
    for name in ("inter", "intra"):
        assert moves[100.0][name] == pytest.approx(100 * moves[1.0][name], rel=1e-2)
    assert moves[100.0]["classes.weight"] == pytest.approx(moves[1.0]["classes.weight"])


def test_a_pool_is_drawn_under_its_name_whatever_else_there_is():
    both, inter, intra = (
        small_method(name).start(torch.Generator().manual_seed(0)) for name in ("fed-prime", "fed-inter", "fed-intra")
    )
    for name, alone in (("inter", inter), ("intra", intra)):
        assert torch.equal(both[name], alone[name])
        assert torch.equal(both[f"projection.{name}"], alone[f"projection.{name}"])
    assert not torch.equal(inter["inter"], intra["intra"])


# --- matching at the client


def test_a_client_sends_its_prompts_in_the_places_of_the_nearest_received_ones():
    """Prompts 0 and 1 have changed places, prompt 3 stayed, and no sample chose prompt 2."""
    method, received = small_method("fed-prime", matching="client"), 3 * torch.eye(8)[:4]
    trained = received[[1, 0, 2, 3]] + 0.1
    tensors, samples, handed = {"inter": trained, "uses": torch.tensor([0.5, 0.1, 0.0, 2.0])}, None, {"inter": received}
    sent = method.placed_prompts("inter", tensors, handed, samples)
    torch.testing.assert_close(sent, received + torch.tensor([0.1, 0.1, 0.0, 0.1])[:, None])
    uses = method.placed_uses("uses", tensors, handed, samples)
    torch.testing.assert_close(uses, USE * torch.tensor([1.0, 1.0, 0.0, 1.0]))
    none = {**tensors, "uses": torch.zeros(4)}
    assert torch.equal(method.placed_prompts("inter", none, handed, samples), received)
    assert not method.placed_uses("uses", none, handed, samples).any()


def test_a_prompt_is_the_mean_of_those_who_sent_one():
    """Of five clients two of weights 1 and 3 fill place 0, all fill place 1, and nobody fills place 2."""
    method = small_method("fed-prime", matching="client")
    shared = {"inter": torch.ones(3, 8), "uses": torch.zeros(3), "classes.bias": torch.zeros(4)}
    weights, moves = [1.0, 3.0, 2.0, 2.0, 2.0], [4.0, 8.0, 0.0, 0.0, 0.0]
    updates = []
    for client, (weight, move) in enumerate(zip(weights, moves, strict=True)):
        inter = shared["inter"] + torch.tensor([move, 1.0, 0.0])[:, None]
        uses = USE * torch.tensor([float(move > 0), 1.0, 0.0])
        updates.append(Update(client, {"inter": inter, "uses": uses, "classes.bias": torch.ones(4)}, weight))
    found = method.step(shared, merge(method, shared, updates))
    torch.testing.assert_close(found["inter"], torch.tensor([1 + (4 + 3 * 8) / 4, 2.0, 1.0])[:, None].expand(3, 8))
    assert not found["uses"].any()
    assert torch.equal(found["classes.bias"], torch.ones(4))
    noisy = method.step(shared, {**shared, "inter": 1.1 * shared["inter"], "uses": torch.tensor([-1.0, 0.0, 1e-9])})
    torch.testing.assert_close(noisy["inter"], torch.full((3, 8), 1.5))  # by one client of five, not by nobody


@pytest.mark.parametrize("name", ["fed-prime", "fed-inter", "fed-intra"])
def test_rounds_of_sums_alone_learn_and_keep_the_size_of_the_pool(name):
    method = small_method(name, matching="client")
    settings = {"federation": {"secure_sum": True}, "privacy": {"unit": "client", "clip": 0.1}, "data": {"clients": 5}}
    experiment = resolve_experiment({"method": {"name": name, "matching": "client"}, **settings})
    check_secure_sum(method, experiment)
    check_privacy(method, experiment)
    runs = [
        run_quietly(small_federation(method, {"learning_rate": 0.3, "batch_size": 4}, rounds=4, secure_sum=secure))
        for secure in (False, True)
    ]
    for tensor, in_sum in zip(*(run.shared.values() for run in runs), strict=True):
        torch.testing.assert_close(tensor, in_sum, rtol=0, atol=1e-4)
    assert runs[1].records[-1].loss < runs[1].records[0].loss - 0.03
    if "inter" in runs[1].shared:
        assert len(runs[1].shared["inter"]) == 20
        moved = (runs[1].shared["inter"] - method.start(torch.Generator())["inter"]).norm(dim=1) > 0
        assert 0 < int(moved.sum()) < 20  # those that samples chose
    assert not any("received" in kept for private in runs[1].engine.private.values() for kept in private)


def test_without_matching_the_pool_is_averaged_position_by_position():
    method = small_method("fed-prime", matching="none")
    shared = method.start(torch.Generator())
    assert "uses" not in shared
    assert len(shared["inter"]) == 20
    shift = torch.arange(20.0)[:, None].expand(20, 8)
    updates = [
        Update(c, {**shared, "inter": shared["inter"] + k * shift}, w) for c, (k, w) in enumerate([(1, 3), (5, 1)])
    ]
    torch.testing.assert_close(
        merge(method, shared, updates)["inter"], shared["inter"] + 2 * shift
    )  # (3 * 1 + 1 * 5) / 4
    batch = small_batch(method, torch.arange(5, 12))
    loss, changed = method.objective(shared, batch)
    aligning = small_method("fed-prime")
    torch.testing.assert_close(loss, aligning.objective(aligning.start(torch.Generator()), batch)[0])
    assert not changed
    federation = run_quietly(small_federation(method, {"learning_rate": 0.3, "batch_size": 4}, rounds=3))
    assert federation.records[-1].loss < federation.records[0].loss


def test_the_server_that_matches_needs_each_client_and_says_what_does_not():
    experiment = resolve_experiment({"method": {"name": "fed-prime"}, "federation": {"secure_sum": True}})
    with pytest.raises(FedVLError, match=r"needs inter, uses of each client.*--set method\.matching=client"):
        check_secure_sum(small_method("fed-prime"), experiment)


def test_it_declares_what_the_table_says():
    assert_declared("fed-prime")
