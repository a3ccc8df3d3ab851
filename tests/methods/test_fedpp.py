"""FedPP: equations 2 to 6 on tiny tensors, what travels and what does not, and real images."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.declarations import assert_declared
from helpers.runs import run
from helpers.small import RAGGED, run_quietly, small_encoder, small_federation, small_method, small_samples, small_task

from fedvl.errors import FedVLError
from fedvl.federation.checks import Report, sound_reports
from fedvl.federation.journal import Journal
from fedvl.federation.merging import merge
from fedvl.methods.base import Batch, Update
from fedvl.methods.fedpp import FedPP, FedPPOptions
from fedvl.methods.parts.selection import Selection
from fedvl.seeding import torch_generator
from fedvl.tensors import count_bytes, digest


def quick(**options):
    """Without visual prompts: images are features."""
    return small_method("fedpp", visual_prompts=False, **options)


def test_only_sums_leave_the_engine_unless_counts_are_sent():
    for counts, clients in (("summed", [None]), ("sent", [0, 2, 3, 4])):  # client 1 has no data
        federation = small_federation(small_method("fedpp", counts=counts))
        reports, refusals = federation.engine.report(0, federation.shared)
        assert [report.client for report in reports] == clients
        assert refusals == []


def test_a_bad_report_is_refused_and_named():
    good = Report(0, {"counts": torch.ones(4), "images": torch.ones(1)})
    bad = {
        1: {"counts": torch.tensor([1.0, math.nan, 0, 0]), "images": torch.ones(1)},
        2: {"counts": torch.tensor([1.0, -1, 0, 0]), "images": torch.ones(1)},
        3: {"counts": torch.ones(5), "images": torch.ones(1)},
        4: {"counts": torch.ones(4)},
    }
    kept, refusals = sound_reports(
        [good, *(Report(c, t) for c, t in bad.items())], quick().consultation().report_shapes
    )
    assert kept == [good]
    assert [refusal.client for refusal in refusals] == [1, 2, 3, 4]
    assert all("in its report" in refusal.reason for refusal in refusals)


def test_prompts_are_averaged_by_the_labels_used():
    method = small_method("fedpp")
    updates = [Update(c, {"visual": torch.full((1, 5, 8), v)}, float(n)) for c, v, n in ((0, 1.0, 3), (1, 5.0, 1))]
    merged = method.merge({"visual": torch.zeros(1, 5, 8)}, updates)
    assert merged["visual"].unique().tolist() == [2.0]  # eq. 4: (3 * 1 + 1 * 5) / 4
    federation = small_federation(method)
    run_quietly(federation)
    trained = federation.engine.train(2, range(5), federation.shared)
    for result in trained:
        assert result.update.weight == (federation.engine.private[result.update.client]["labels"] >= 0).sum()


def test_the_objective_is_the_cross_entropy_of_the_labels():
    method = small_method("fedpp")
    samples = small_samples(method, 3)
    tensors = {**method.start(torch_generator(0, "a")), **method.join(samples, torch_generator(0, "b"))}
    tensors["labels"] = torch.tensor([2, -1, 0])
    batch = Batch(samples.inputs, tensors["labels"], torch.tensor([1.0, 0, 1]), torch.arange(3), {})
    pixels = method.task.encoder.normalise(samples.inputs["pixels"]).float()
    images = method.task.encoder.encode_image(pixels, tensors["visual"])
    tokens = method.task.encoder.tokenise([f"{name}." for name in method.task.class_names])
    texts = method.task.encoder.encode_text(tokens, tensors["context"])
    cosines = torch.nn.functional.cosine_similarity(images[:, None], texts[None], dim=-1)
    likelihood = torch.softmax(10.0 * cosines, dim=-1)
    expected = -(likelihood[0, 2].log() + likelihood[2, 0].log()) / 2  # eq. 5; the given labels are not read
    torch.testing.assert_close(method.objective(tensors, batch)[0], expected, rtol=1e-4, atol=1e-4)


def test_equations_2_and_3_by_hand():
    """Medians of confidence and entropy are 0.60 and 0.82: images 0 and 1 are above the one, 1 and 2 below the other."""
    table = [[0.70, 0.15, 0.15], [0.66, 0.34, 0.0], [0.0, 0.6, 0.4], [0.4, 0.3, 0.3], [0.34, 0.33, 0.33]]
    samples = small_samples(quick(), 5)
    for filters, counts in (
        ("both", [1, 0, 0]),
        ("confidence", [2, 0, 0]),
        ("entropy", [1, 1, 0]),
        ("none", [4, 1, 0]),
    ):
        selection = quick(filters=filters).selection._replace(predict=lambda *_: torch.tensor(table), classes=3)
        sent, kept = selection.report(0, {}, samples)
        assert (sent["counts"].tolist(), sent["images"].tolist()) == (counts, [5])
    selection = quick().selection._replace(predict=lambda *_: torch.tensor(table), classes=3)
    _, kept = selection.report(0, {}, samples)
    # 60 images of 3 classes: a quota of 5 for each. This client has one of three reliable images of class 0: 5/3, so 2.
    settled = selection.settle(0, {"counts": torch.tensor([3.0, 2.0, 0.0]), "images": torch.tensor([60.0])}, None)
    assert settled["quota"].tolist()[0] == 5
    labels = selection.adopt({**selection.join(samples), **kept}, settled)["labels"]
    assert labels.tolist() == [0, 0, -1, -1, -1]  # the surest of class 0


def test_gradients_reach_every_prompt_of_every_layer():
    for layers, depth in (("all", 2), ("all-but-last", 1)):
        method = FedPP(FedPPOptions(visual_layers=layers), small_task())
        samples = small_samples(method, 4)
        tensors = {**method.start(torch_generator(0, "a")), **method.join(samples, torch_generator(0, "b"))}
        moving = {name: tensors[name].requires_grad_() for name in ("visual", "context")}
        tensors["labels"] = torch.tensor([2, 1, 0, 3])
        batch = Batch(samples.inputs, tensors["labels"], torch.ones(4), torch.arange(4), {})
        loss, _ = method.objective(tensors, batch)
        visual, context = torch.autograd.grad(loss, list(moving.values()))
        assert visual.shape == (depth, 5, small_encoder().vision_width)
        assert (visual.abs().sum(-1) > 0).all()
        assert (context.abs().sum(-1) > 0).all()


def test_a_client_that_has_not_trained_answers_by_the_class_texts():
    method = small_method("fedpp")
    samples = small_samples(method, 3)
    tensors = {**method.start(torch_generator(0, "a")), **method.join(samples, torch_generator(0, "b"))}
    without = {name: tensor for name, tensor in tensors.items() if name not in ("context", "trained")}
    torch.testing.assert_close(method.predict(tensors, samples.inputs), method.predict(without, samples.inputs))
    batch = Batch(samples.inputs, torch.tensor([2, 1, 0]), torch.ones(3), torch.arange(3), {})
    _, changed = method.objective(tensors, batch)
    trained = {**tensors, **changed}
    assert not torch.allclose(method.predict(trained, samples.inputs), method.predict(without, samples.inputs))


def test_only_clients_that_took_part_have_trained():
    federation = run_quietly(small_federation(quick(), rounds=1, per_round=2))
    took_part = set(federation.records[0].cohort) - set(federation.records[0].dropped)
    found = {client for client, private in federation.engine.private.items() if private["trained"] > 0}
    assert found == took_part


def test_contexts_are_own_the_same_or_averaged():
    def joined(contexts, client):
        method = small_method("fedpp", contexts=contexts)
        return method, method.join(small_samples(method, 3), torch_generator(0, "join", client))

    assert not torch.equal(joined("own", 0)[1]["context"], joined("own", 1)[1]["context"])
    assert torch.equal(joined("same", 0)[1]["context"], joined("same", 1)[1]["context"])
    method, private = joined("averaged", 0)
    assert private.keys() & {"context", "trained"} == set()
    shared = method.start(torch_generator(0, "a"))
    assert shared.keys() == {"visual", "context"}
    updates = [Update(c, {name: torch.full_like(t, c) for name, t in shared.items()}, 1.0 + 2 * c) for c in (0, 1)]
    assert merge(method, shared, updates)["context"].unique().tolist() == [
        0.75
    ]  # by the labels used: (1 * 0 + 3 * 1) / 4


def test_visual_prompts_train_at_a_rate_of_their_own():
    moves = {}
    for rate in (1.0, 0.1):
        federation = small_federation(small_method("fedpp", visual_rate=rate), rounds=1)
        before = federation.shared["visual"].clone()
        consultation, engine = federation.method.consultation(), federation.engine
        engine.adopt({None: consultation.settle(0, engine.report(0, federation.shared)[0][0].tensors, None)})
        engine.training = engine.training.model_copy(update={"local_epochs": 1, "batch_size": 1000})
        (result,) = engine.train(0, [0], federation.shared)
        moves[rate] = float((result.update.tensors["visual"] - before).norm())
    assert moves[0.1] == pytest.approx(0.1 * moves[1.0], rel=1e-3)  # one step of plain gradient descent


class Picky(Selection):
    """The last client selects nothing."""

    def adopt(self, private, settlement):
        found = super().adopt(private, settlement)
        return {"labels": found["labels"] * 0 - 1} if len(found["labels"]) == RAGGED[4] else found


def picky(**options):
    method = small_method("fedpp", **options)
    method.selection = Picky(*method.selection)
    return method


def test_a_client_without_selected_labels_sits_the_round_out():
    method = picky(visual_prompts=False)
    federation = run_quietly(small_federation(method, rounds=2))
    for record in federation.records:
        assert 4 in record.dropped
        assert record.refused == []
    start = method.join(small_samples(method, RAGGED[4]), torch_generator(0, "join", 4))["context"]
    assert torch.equal(federation.engine.private[4]["context"], start)


def test_a_client_without_selected_labels_is_not_averaged():
    """One round by hand: the mean of the visual prompts of the others, by the number of labels that each used."""
    federation = small_federation(picky(), rounds=1)
    engine, shared = federation.engine, federation.shared
    engine.adopt({None: federation.method.consultation().settle(0, engine.report(0, shared)[0][0].tensors, None)})
    used = {client: int((engine.private[client]["labels"] >= 0).sum()) for client in engine.private}
    assert used[4] == 0
    trained = {result.update.client: result.update.tensors["visual"] for result in engine.train(0, range(5), shared)}
    assert trained.keys() == {client for client, labels in used.items() if labels}
    mean = sum(used[client] * visual for client, visual in trained.items()) / sum(used.values())
    torch.testing.assert_close(run_quietly(federation).shared["visual"], mean)


def test_no_state_is_shared_between_clients():
    together = small_federation(quick())
    together.engine.adopt(
        {None: together.method.consultation().settle(0, together.engine.report(0, together.shared)[0][0].tensors, None)}
    )
    labels = {client: private["labels"].clone() for client, private in together.engine.private.items()}
    everyone = {result.update.client: result for result in together.engine.train(0, range(5), together.shared)}
    for client, result in everyone.items():
        (alone,) = together.engine.train(0, [client], together.shared)
        torch.testing.assert_close(alone.private["context"], result.private["context"], rtol=0, atol=1e-5)
        assert torch.equal(result.private["labels"], labels[client])
        assert result.update.tensors.keys() == together.shared.keys()  # the context stays at home
    contexts = [result.private["context"] for result in everyone.values()]
    assert all(not torch.equal(one, contexts[0]) for one in contexts[1:])


@pytest.mark.parametrize(
    "options", [{}, {"visual_prompts": False}, {"text_prompts": False}, {"selection": "fpl", "shots": 2}]
)
def test_private_tensors_are_the_same_batched_and_one_by_one(options):
    runs = [run_quietly(small_federation(small_method("fedpp", **options), one_by_one=o)) for o in (False, True)]
    for client, private in runs[0].engine.private.items():
        for name, tensor in private.items():
            torch.testing.assert_close(tensor, runs[1].engine.private[client][name], rtol=0, atol=1e-4)


def test_all_clients_are_consulted_although_few_train():
    federation = run_quietly(small_federation(quick(interval=2), rounds=3, per_round=1))
    assert sorted(federation.engine.private) == [0, 2, 3, 4]
    assert all((federation.engine.private[c]["labels"] >= 0).any() for c in (0, 3))
    sizes = {"up": 5 * 4 * (4 + 1), "down": 5 * 4 * (4 + 2)}  # 5 clients, 4 classes and a number or two, 4 bytes each
    assert [record.bytes_up for record in federation.records] == [sizes["up"], 0, sizes["up"]]
    assert [record.bytes_down for record in federation.records] == [sizes["down"], 0, sizes["down"]]


def test_consulted_clients_are_sent_the_prompts_once():
    federation = small_federation(small_method("fedpp"), rounds=1, per_round=1)
    run_quietly(federation)
    assert federation.records[0].bytes_down == 5 * (count_bytes(federation.shared) + 4 * (4 + 2))


def test_a_restored_run_ends_in_the_same_bits(tmp_path):
    settings = {"visual_prompts": False, "interval": 2}
    whole = run_quietly(small_federation(small_method("fedpp", **settings), rounds=5))
    journal = Journal(tmp_path / "journal")
    run_quietly(replace(small_federation(small_method("fedpp", **settings), rounds=3), journal=journal))
    resumed = replace(small_federation(small_method("fedpp", **settings), rounds=5), journal=journal)
    resumed.restore()
    run_quietly(resumed)
    for client, private in whole.engine.private.items():
        assert digest(private) == digest(resumed.engine.private[client])


def test_labels_are_renewed_at_the_interval_and_by_the_clients_own_prompts():
    method = quick(interval=3)
    assert [method.consultation().due(r) for r in range(7)] == [True, False, False, True, False, False, True]
    samples = small_samples(method, 6)
    tensors = method.join(samples, torch_generator(0, "b"))
    first = torch.softmax(10.0 * samples.inputs["features"] @ method.task.text_features.T, dim=-1)
    torch.testing.assert_close(method.table(0, tensors, samples.inputs), first)
    later = torch.softmax(method.predict(tensors, samples.inputs), dim=-1)
    torch.testing.assert_close(method.table(3, tensors, samples.inputs), later)


def test_bad_options_are_told():
    with pytest.raises(FedVLError, match="trains nothing"):
        small_method("fedpp", visual_prompts=False, text_prompts=False)
    with pytest.raises(FedVLError, match="leaves no room for a context of 30"):
        small_method("fedpp", context=30)


def test_images_are_read_only_if_they_are_prompted():
    assert FedPP.forms(FedPPOptions()) == ("features", "pixels")
    assert FedPP.forms(FedPPOptions(visual_prompts=False)) == ("features",)


# --- real images


def run_real(settings, **method):
    finished = run({**settings, "method": {"name": "fedpp", **method}})
    start = finished.prepared.method.start(torch_generator(finished.prepared.experiment.seed, "start"))
    return finished, start


def test_text_prompts_by_cooperative_labels_beat_the_zero_shot_model_and_those_by_fpl():
    settings = {"data": {"partition": "dirichlet:0.1"}, "federation": {"rounds": 2}, "training": {"local_epochs": 5}}
    accuracy = {}
    for selection in ("cps", "fpl"):
        finished, _ = run_real(settings, selection=selection, visual_prompts=False)
        accuracy[selection] = finished.accuracy
    zero_shot = finished.zero_shot_accuracy
    assert accuracy["cps"] > zero_shot + 5
    assert accuracy["fpl"] < zero_shot  # table 5: personal prompts follow false labels


def test_every_visual_prompt_learns_from_real_images():
    settings = {
        "data": {"partition": "iid", "clients": 2, "shots": 6},
        "federation": {"rounds": 2},
        "training": {"local_epochs": 2},
    }
    finished, start = run_real(settings)
    federation = finished.federation
    moved = (federation.shared["visual"] - start["visual"]).abs().sum(-1)
    assert moved.shape == (8, 5)  # 9 layers but the last
    assert (moved > 0).all()
    assert federation.records[1].loss < federation.records[0].loss
    assert federation.records[0].pseudo_label_accuracy > 60
    assert federation.records[0].cosine_distance_visual < federation.records[0].cosine_distance_context  # figure 3


def test_it_declares_what_the_table_says():
    assert_declared("fedpp")
