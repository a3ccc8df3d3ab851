"""FedPP: equations 2 to 6 on tiny tensors, what travels and what does not, and real images."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.runs import run
from helpers.small import RAGGED, run_quietly, small_encoder, small_federation, small_method, small_samples, small_task

from fedvl.errors import FedVLError
from fedvl.federation.checks import Report, sound_reports
from fedvl.federation.drift import drift
from fedvl.federation.journal import Journal
from fedvl.methods.base import Batch, Update
from fedvl.methods.fedpp import FedPP, FedPPOptions
from fedvl.methods.parts.selection import Selection
from fedvl.seeding import torch_generator
from fedvl.tensors import count_bytes, digest

TABLE = torch.tensor([[0.6, 0.3, 0.08, 0.02], [0.9, 0.05, 0.03, 0.02], [0.8, 0.15, 0.03, 0.02], [0.2, 0.7, 0.08, 0.02]])


def quick(**options):
    """Without visual prompts: images are features."""
    return small_method("fedpp", visual_prompts=False, **options)


def told(method, table):
    """The selection, if the method's predictions were these."""
    return method.consultation._replace(predict=lambda round_index, tensors, inputs: table)


def select(method, tables, clients=2):
    """One exchange among clients with these predictions; what each labels."""
    samples = small_samples(method)
    own, sent = [], []
    for table in tables:
        few = samples.take(torch.arange(len(table)))
        private = method.join(few, torch.Generator())
        report, changed = told(method, table).report(0, private, few)
        own.append({**private, **changed})
        sent.append(report)
    total = {name: sum(report[name] for report in sent) for name in sent[0]}
    selection = method.consultation
    answers = [selection.settle(0, total, None if selection.summed else report) for report in sent]
    labels = [selection.adopt(private, answer)["labels"].tolist() for private, answer in zip(own, answers, strict=True)]
    return sent, answers, labels


# Medians of the confidences .6 .9 .8 .7 are .65, so images 1, 2, 3; entropies leave 1 and 2: two reliable ones of class 0.
# The other client has one of class 0 and one of class 1. 4 classes, 8 images: M = ceil(8 / 16) = 1, or 4 times that.
OTHER = torch.tensor([[0.97, 0.01, 0.01, 0.01], [0.1, 0.7, 0.1, 0.1], [0.3, 0.3, 0.2, 0.2], [0.3, 0.25, 0.25, 0.2]])


def test_selection_by_hand():
    sent, answers, labels = select(quick(), [TABLE, OTHER])
    assert [report["counts"].tolist() for report in sent] == [[2, 0, 0, 0], [1, 1, 0, 0]]  # eq. 2
    assert answers[0]["totals"].tolist() == [3, 1, 0, 0]
    assert answers[0]["quota"].tolist() == [1]
    # eq. 3 rounds 2/3 and 1/3 up to 1 each; of class 1 the first client has no share.
    assert labels == [[-1, 0, -1, -1], [0, 1, -1, -1]]


def test_mean_reliable_quota_by_hand():
    _, answers, _ = select(quick(quota="mean-reliable"), [TABLE, OTHER])
    assert answers[0]["quota"].tolist() == [1]  # 4 reliable images of 4 classes


def test_the_server_needs_the_totals_only():
    summed, sent = (select(quick(counts=counts), [TABLE, OTHER]) for counts in ("summed", "sent"))
    assert summed[2] == sent[2]
    assert digest(summed[1][0]) == digest(summed[1][1])  # the same words to everyone: nothing of one client's counts
    assert sent[1][0]["allocation"].tolist() == [1, 0, 1, 1]  # a class that nobody reports is shared out
    finals = [run_quietly(small_federation(small_method("fedpp", counts=c))) for c in ("summed", "sent")]
    assert digest(finals[0].shared) == digest(finals[1].shared)
    private = [{f"{c}/{n}": t for c, p in f.engine.private.items() for n, t in p.items()} for f in finals]
    assert digest(private[0]) == digest(private[1])


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
    kept, refusals = sound_reports([good, *(Report(c, t) for c, t in bad.items())], quick().consultation.shapes)
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


def test_drift_diversity_and_cosine_distance_by_hand():
    before = [{"visual": torch.tensor([[1.0, 0.0]]), "context": torch.zeros(1, 2)}] * 2
    after = [{"visual": torch.tensor([[2.0, 0.0]]), "context": torch.tensor([[1.0, 0.0]])}]
    after += [{"visual": torch.tensor([[1.0, 1.0]]), "context": torch.tensor([[2.0, 0.0]])}]
    figures = drift(before, after, ["visual", "context"])
    assert figures["drift_diversity_visual"] == pytest.approx((1 + 1) / 2)  # eq. 6: moves (1, 0) and (0, 1)
    assert figures["drift_diversity_context"] == pytest.approx((1 + 4) / 9)
    assert figures["cosine_distance_visual"] == pytest.approx(1 - 2 / math.sqrt(8))
    assert figures["cosine_distance_context"] == pytest.approx(0)
    assert drift(before[:1], after[:1], ["visual", "context"]) == {}


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


class Picky(Selection):
    """The last client selects nothing."""

    def adopt(self, private, settlement):
        found = super().adopt(private, settlement)
        return {"labels": found["labels"] * 0 - 1} if len(found["labels"]) == RAGGED[4] else found


def picky(**options):
    method = small_method("fedpp", **options)
    method.consultation = Picky(*method.consultation)
    return method


def test_a_client_without_selected_labels_sits_the_round_out():
    method = picky(visual_prompts=False)
    federation = run_quietly(small_federation(method, rounds=2))
    for record in federation.records:
        assert 4 in record["dropped"]
        assert record["refused"] == []
    start = method.join(small_samples(method, RAGGED[4]), torch_generator(0, "join", 4))["context"]
    assert torch.equal(federation.engine.private[4]["context"], start)


def test_a_client_without_selected_labels_is_not_averaged():
    """One round by hand: the mean of the visual prompts of the others, by the number of labels that each used."""
    federation = small_federation(picky(), rounds=1)
    engine, shared = federation.engine, federation.shared
    engine.adopt({None: federation.method.consultation.settle(0, engine.report(0, shared)[0][0].tensors, None)})
    used = {client: int((engine.private[client]["labels"] >= 0).sum()) for client in engine.private}
    assert used[4] == 0
    trained = {result.update.client: result.update.tensors["visual"] for result in engine.train(0, range(5), shared)}
    assert trained.keys() == {client for client, labels in used.items() if labels}
    mean = sum(used[client] * visual for client, visual in trained.items()) / sum(used.values())
    torch.testing.assert_close(run_quietly(federation).shared["visual"], mean)


def test_no_state_is_shared_between_clients():
    together = small_federation(quick())
    together.engine.adopt(
        {None: together.method.consultation.settle(0, together.engine.report(0, together.shared)[0][0].tensors, None)}
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
    sizes = {"up": 5 * 4 * (4 + 1), "down": 5 * 4 * (4 + 1)}  # 5 clients, 4 classes and a number, 4 bytes each
    assert [record["bytes_up"] for record in federation.records] == [sizes["up"], 0, sizes["up"]]
    assert [record["bytes_down"] for record in federation.records] == [sizes["down"], 0, sizes["down"]]


def test_consulted_clients_are_sent_the_prompts_once():
    federation = small_federation(small_method("fedpp"), rounds=1, per_round=1)
    run_quietly(federation)
    assert federation.records[0]["bytes_down"] == 5 * (count_bytes(federation.shared) + 4 * (4 + 1))


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
    assert [method.consultation.due(r) for r in range(7)] == [True, False, False, True, False, False, True]
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
    return finished.prepared, finished.federation, start


def test_text_prompts_by_cooperative_labels_beat_the_zero_shot_model_and_those_by_fpl():
    settings = {"data": {"partition": "dirichlet:0.1"}, "federation": {"rounds": 2}, "training": {"local_epochs": 5}}
    accuracy = {}
    for selection in ("cps", "fpl"):
        prepared, federation, _ = run_real(settings, selection=selection, visual_prompts=False)
        accuracy[selection] = prepared.judge(federation.shared, {}).figures["accuracy"]
    zero_shot = prepared.judge_zero_shot().figures["accuracy"]
    assert accuracy["cps"] > zero_shot + 5
    assert accuracy["fpl"] < zero_shot  # table 5: personal prompts follow false labels


def test_every_visual_prompt_learns_from_real_images():
    settings = {
        "data": {"partition": "iid", "clients": 2, "shots": 6},
        "federation": {"rounds": 2},
        "training": {"local_epochs": 2},
    }
    _prepared, federation, start = run_real(settings)
    moved = (federation.shared["visual"] - start["visual"]).abs().sum(-1)
    assert moved.shape == (8, 5)  # 9 layers but the last
    assert (moved > 0).all()
    assert federation.records[1]["loss"] < federation.records[0]["loss"]
    assert federation.records[0]["pseudo_label_accuracy"] > 60
    assert (
        federation.records[0]["cosine_distance_visual"] < federation.records[0]["cosine_distance_context"]
    )  # figure 3
