"""Many clients in few tensors: rows, updates, private tensors, as if each were by itself."""

from dataclasses import replace

import pytest
import torch
from helpers.elsewhere import ELSEWHERE, elsewhere, moved_encoder
from helpers.small import SmallFederation, run_quietly, small_federation, small_method
from hypothesis import given
from hypothesis import strategies as st

from fedvl.federation.local import LocalEngine
from fedvl.federation.stacks import (
    Answers,
    Folded,
    SampleRows,
    Trained,
    Updates,
    columns_of,
    stacks_of,
)
from fedvl.methods import method_names
from fedvl.methods.base import Update
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors, digest, placed


def updates_of(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [
        Update(
            client,
            {"w": torch.randn(shape, generator=generator), "b": torch.randn(2, generator=generator)},
            client + 1.0,
        )
        for client, shape in enumerate(shapes)
    ]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_rows_are_those_of_a_list(sizes):
    held = list(torch.randperm(sum(sizes)).split(sizes))
    rows = SampleRows.of(held)
    assert rows.counts == sizes
    assert all(torch.equal(left, right) for left, right in zip(rows, held, strict=True))
    if not sum(sizes):
        return
    padded = rows.padded(torch.arange(len(sizes)), max(sizes) + 1)
    assert padded.shape == (len(sizes), max(sizes) + 1)
    for row, own in zip(padded, held, strict=True):
        assert torch.equal(row[: len(own)], own)


@pytest.mark.parametrize("shapes", [(3, 3, 3), (3, 2, 3)])
def test_updates_are_those_they_were_made_of(shapes):
    single = updates_of(*shapes)
    stacked = Updates.of(reversed(single))
    assert stacked.clients == [0, 1, 2]
    assert stacked.alike == (shapes == (3, 3, 3))
    for left, right in zip(stacked, single, strict=True):
        assert left[::2] == right[::2]
        assert digest(left.tensors) == digest(right.tensors)
    some = stacked.take([0, 2])
    assert [update.client for update in some] == [0, 2]
    assert digest(some[1].tensors) == digest(single[2].tensors)
    assert stacked.bytes == 4 * (sum(shapes) + 6)
    assert list(stacked.only(["b"])[0].tensors) == ["b"]


@pytest.mark.parametrize("shapes", [(3, 3, 3), (3, 2, 3)])
@pytest.mark.parametrize("same", [True, False])
def test_moves_are_norms_of_what_changed(shapes, same):
    single = updates_of(*shapes)
    handed = {u.client: {"w": torch.full_like(u.tensors["w"], float(u.client)), "b": torch.ones(2)} for u in single}
    if same and len(set(shapes)) == 1:
        handed = dict.fromkeys(handed, handed[1])
    moves = Updates.of(single).moves(["w", "b"], handed)
    for update, move in zip(single, moves, strict=True):
        changed = [update.tensors[name] - handed[update.client][name] for name in ("w", "b")]
        assert float(move) == pytest.approx(float(torch.cat(changed).norm()), rel=1e-6)


def test_moves_of_what_nobody_was_handed_are_its_norms():
    single = updates_of(3, 3)
    moves = Updates.of(single).moves(["w"], {0: {}, 1: {}})
    assert moves.tolist() == pytest.approx([float(u.tensors["w"].norm()) for u in single])


def test_the_mean_is_the_same_bits_whoever_sends_first_and_as_a_plain_sum_says():
    generator = torch.Generator().manual_seed(0)
    single = [Update(c, {"w": torch.randn(5, generator=generator)}, float(c % 3 + 1)) for c in range(150)]
    mean = Updates.of(single).mean(["w"])["w"]
    assert torch.equal(mean, Updates.of(single[::-1]).mean(["w"])["w"])
    total = sum(update.weight for update in single)
    plain = torch.stack([update.tensors["w"].double() * update.weight for update in single]).sum(0) / total
    torch.testing.assert_close(mean, plain.float(), rtol=1e-6, atol=1e-7)


def test_answers_are_a_list_of_what_each_client_trained():
    updates = Updates.of(updates_of(3, 3, 3))
    stacks = stacks_of([(0, {"p": torch.zeros(1)}), (2, {"p": torch.ones(1)}), (1, {"p": torch.ones(2)})])
    answers = Answers(updates, stacks, [0.1, 0.2, 0.3], [4, 5, 6])
    assert [result.private["p"].tolist() for result in answers] == [[0], [1, 1], [1]]
    some = answers.counted(updates.take([1, 2]))
    assert [(r.update.client, r.loss, r.examples, r.private["p"].tolist()) for r in some] == [
        (1, 0.2, 5, [1, 1]),
        (2, 0.3, 6, [1]),
    ]
    assert answers.counted(updates) is answers


def test_answers_that_come_one_by_one_are_those_of_a_stack():
    """A client without tensors of its own, and an update that is refused, change nothing for the others."""
    updates = updates_of(3, 2, 3)
    private = [{"p": torch.zeros(1)}, {}, {"p": torch.ones(1)}]
    trained = [Trained(u, own, u.client / 10, u.client + 4) for u, own in zip(updates, private, strict=True)]
    answers = Answers.of(trained)
    assert Answers.of(answers) is answers
    assert (answers.clients, answers.weights, answers.bytes) == ([0, 1, 2], [1.0, 2.0, 3.0], 4 * (8 + 6))
    for there, here in zip(answers, trained, strict=True):
        assert there[2:] == here[2:]
        assert digest(there.private) == digest(here.private)
        assert digest(there.update.tensors) == digest(here.update.tensors)
    some = answers.counted(Updates.of([updates[2], updates[1]]))
    assert [(r.update.client, r.loss, r.examples, len(r.private)) for r in some] == [(1, 0.1, 5, 0), (2, 0.2, 6, 1)]


def test_as_many_updates_in_another_order_are_taken_in_that_order():
    stacked = Updates.of(updates_of(3, 3, 3))
    assert stacked.take([0, 1, 2]) is stacked
    turned = stacked.take([2, 0, 1])
    assert turned.clients == [2, 0, 1]
    assert torch.equal(turned[0].tensors["w"], stacked[2].tensors["w"])


def test_columns_stay_apart_where_shapes_differ():
    found = columns_of([{"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.ones(2), "b": torch.ones(3)}])
    assert isinstance(found["a"], torch.Tensor)
    assert isinstance(found["b"], list)


# --- updates that are summed as they come


def linear_federation(chunk, *, robust="mean", spoilt=None, factor=float("nan"), **how):
    """Thirteen clients of two samples; those of one may be spoilt."""
    federation = small_federation(small_method("linear"), chunk=chunk, robust=robust, max_norm_ratio=30.0, **how)
    engine = federation.engine
    engine.rows = SampleRows.of(torch.arange(26).remainder(25).split(2))
    if spoilt is not None:
        engine.data.inputs["features"][engine.rows[spoilt]] *= factor
    return federation


def held(federation):
    federation.engine._can_fold = lambda chunks: False
    return federation


def folded_names(federation):
    columns = federation.engine.train(0, range(federation.engine.clients), federation.shared).updates.columns
    return {name for name, column in columns.items() if isinstance(column, Folded)}


def test_a_cohort_of_several_chunks_holds_sums_and_no_rows():
    assert folded_names(linear_federation(4)) == {"weight", "bias"}
    assert not folded_names(linear_federation(13))  # of one chunk all are at hand
    assert not folded_names(linear_federation(4, robust="median"))
    assert not folded_names(linear_federation(4, drift=True))
    assert not folded_names(linear_federation(4, attack="scaled:0.2"))


TRAINED = [name for name in method_names() if name != "zero-shot" and not small_method(name).role.statistics]


@pytest.mark.parametrize("name", TRAINED)
def test_a_sum_of_chunks_has_the_bits_of_rows_that_are_held(name):
    found, expected = (small_federation(small_method(name), chunk=2) for _ in range(2))
    run_quietly(found)
    run_quietly(held(expected))
    assert digest(found.shared) == digest(expected.shared)
    assert [r.usual_move for r in found.records] == [r.usual_move for r in expected.records]
    assert [r.bytes_up for r in found.records] == [r.bytes_up for r in expected.records]


@pytest.mark.parametrize(("factor", "reason"), [(float("nan"), "not finite"), (-500.0, "far more than the usual")])
def test_a_refused_update_is_not_in_the_sum(factor, reason):
    found = linear_federation(4, spoilt=6, factor=factor)
    expected = held(linear_federation(4, spoilt=6, factor=factor))
    without = linear_federation(4, spoilt=6, factor=factor, withdrawn=(6,))
    for federation in (found, expected, without):
        run_quietly(federation)
    for ours, theirs in zip(found.records, expected.records, strict=True):
        assert [refusal.client for refusal in ours.refused] == [6]
        assert reason in ours.refused[0].reason
        assert ours.refused == theirs.refused
        assert ours.loss == pytest.approx(theirs.loss)
    for name, tensor in found.shared.items():
        torch.testing.assert_close(tensor, expected.shared[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(tensor, without.shared[name], rtol=0, atol=1e-6)


def test_a_folded_update_that_is_looked_at_is_there():
    found = linear_federation(4)
    expected = held(linear_federation(4))
    ours, theirs = (f.engine.train(0, range(13), f.shared) for f in (found, expected))
    for left, right in zip(ours, theirs, strict=True):
        assert left.update[::2] == right.update[::2]
        for name, tensor in left.update.tensors.items():
            torch.testing.assert_close(tensor, right.update.tensors[name], rtol=0, atol=1e-6)
    assert ours.updates.outline(3).tensors["weight"].shape == (4, 6)
    assert len(ours.updates.take([])) == 0


def test_clients_that_train_in_another_order_than_that_of_the_mean_are_held():
    found = small_federation(small_method("fst-cbdg"), chunk=2)  # all weigh the same, and the largest train first
    assert not folded_names(found)
    assert folded_names(small_federation(small_method("linear"), chunk=2)) == {"weight", "bias"}


# nothing is trained, or the small form's weights are in double precision, which a placed copy is not
NOT_ON_A_GPU = {"zero-shot", "fedavg-nn", "fedprox-nn", "fedka"}


def engine_of(name, federation=None, **options):
    engine = small_federation(small_method(name, **options), **(federation or {})).engine
    engine.rows = SampleRows.of(torch.arange(24).split(2))
    return engine


def test_a_chunk_is_chosen_by_what_a_client_takes():
    assert engine_of("linear").chunk == 4096  # a head of 4 x 6 numbers takes nearly nothing
    assert engine_of("fst-cbdg", synthetic=30_000).chunk == 2**26 // (6 * 4 * (28 + 30_000 * 6 + 1) + 2 * 2 * 24)
    assert engine_of("promptfl").chunk == engine_of("fedavg-nn").chunk == 10  # a tower, and a network on pixels
    assert engine_of("linear", federation={"chunk": 7}).chunk == 7
    assert engine_of("linear", federation={"one_by_one": True}).chunk == 1


def trained_on(name: str, device: torch.device) -> Tensors:
    """Train with the data, the encoder and all tensors of a method on a device."""
    federation = small_federation(small_method(name))
    method, engine = federation.method, federation.engine
    task = replace(
        method.task,
        text_embeddings=method.task.text_embeddings.to(device),
        encoder=moved_encoder(method.task.encoder, device),
        target=placed(method.task.target, device) if method.task.target else None,
    )
    moved = type(method)(method.options, task)
    there = replace(engine.data, inputs=placed(engine.data.inputs, device), labels=engine.data.labels.to(device))
    rows = [own.to(device) for own in engine.rows]
    engine = LocalEngine(moved, there, rows, engine.training, engine.federation, 0)
    start = placed(moved.start(torch_generator(0, "start")), device)
    trained = run_quietly(SmallFederation(moved, engine, federation.config, 0, start, device=device)).shared
    return {key: tensor.cpu() for key, tensor in trained.items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted({*method_names()} - NOT_ON_A_GPU))
def test_every_method_trains_on_a_gpu(name):
    trained = trained_on(name, torch.device("cuda"))
    for key, tensor in run_quietly(small_federation(small_method(name))).shared.items():
        torch.testing.assert_close(trained[key], tensor, rtol=0, atol=2e-2)


# one for each way to the server's tensors; the others take a tower, which is slow here, and a GPU tests them
@pytest.mark.parametrize("name", ["cachefl", "fed-em", "fed-mp", "fedadam", "feddyn", "fst-cbdg", "gda", "ridge"])
def test_a_method_does_not_mix_tensors_of_two_devices(name):
    with elsewhere():
        trained = trained_on(name, ELSEWHERE)
    for key, tensor in run_quietly(small_federation(small_method(name))).shared.items():
        torch.testing.assert_close(trained[key], tensor, rtol=0, atol=1e-6)


def test_a_device_elsewhere_refuses_what_a_gpu_refuses():
    with elsewhere():
        there, here = torch.ones(3, device=ELSEWHERE), torch.ones(3)
        assert (there.device, (there + 1).device, there.cpu().device) == (ELSEWHERE, ELSEWHERE, torch.device("cpu"))
        assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number may come from anywhere
        assert there[torch.tensor([0, 2])].tolist() == [1, 1]
        for mixed in (lambda: there + here, lambda: torch.stack([here, there]), lambda: here[there.long()]):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed()
