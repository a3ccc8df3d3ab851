"""The cooperative selection of labels (FedPP) by hand, and what of it the server needs."""

import math

import torch
from helpers.small import run_quietly, small_federation, small_method, small_samples

from fedvl.methods.parts.selection import Selection, balanced_labels
from fedvl.tensors import digest

TABLE = torch.tensor([[0.6, 0.3, 0.08, 0.02], [0.9, 0.05, 0.03, 0.02], [0.8, 0.15, 0.03, 0.02], [0.2, 0.7, 0.08, 0.02]])


def quick(**options):
    """Without visual prompts: images are features."""
    return small_method("fedpp", visual_prompts=False, **options)


def told(method, table):
    """The selection, if the method's predictions were these."""
    return method.consultation()._replace(predict=lambda round_index, tensors, inputs: table)


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
    selection = method.consultation()
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
    assert answers[0]["quota"].tolist() == [1, 1]
    # eq. 3 rounds 2/3 and 1/3 up to 1 each; of class 1 the first client has no share.
    assert labels == [[-1, 0, -1, -1], [0, 1, -1, -1]]


def test_mean_reliable_quota_by_hand():
    _, answers, _ = select(quick(quota="mean-reliable"), [TABLE, OTHER])
    assert answers[0]["quota"].tolist() == [1, 1]  # 4 reliable images of 4 classes; what is left of FedPP's quarter


def test_the_server_needs_the_totals_only():
    summed, sent = (select(quick(counts=counts), [TABLE, OTHER]) for counts in ("summed", "sent"))
    assert summed[2] == sent[2]
    assert digest(summed[1][0]) == digest(summed[1][1])  # the same words to everyone: nothing of one client's counts
    assert sent[1][0]["allocation"].tolist() == [1, 0, 1, 1]  # a class that nobody reports is shared out
    finals = [run_quietly(small_federation(small_method("fedpp", counts=c))) for c in ("summed", "sent")]
    assert digest(finals[0].shared) == digest(finals[1].shared)
    private = [{f"{c}/{n}": t for c, p in f.engine.private.items() for n, t in p.items()} for f in finals]
    assert digest(private[0]) == digest(private[1])


# --- shares


def test_shares_by_hand():
    """Counts (2, 0, 0, 0) and (1, 1, 0, 0) are shares 1 and 1/2, 1/2: totals 1.5 and 0.5 in 256 parts, on average 0.5.

    Totals of 0 count as an eighth, a quarter of the mean. Each client labels ceil(4 / 16) x 4 = 4 images if classes were even.
    """
    sent, answers, labels = select(quick(counts="shares"), [TABLE, OTHER])
    assert [report["counts"].tolist() for report in sent] == [[256, 0, 0, 0], [128, 128, 0, 0]]
    assert sent[0].keys() == {"counts"}
    mean = 5 * 256 / 4  # known of five clients, of which two report here
    totals = [384 - 128 + mean, mean, mean / 4 if mean < 128 else mean - 128, mean - 128]
    assert answers[0]["totals"].tolist() == totals
    # 2 x (320 / 576) x 4 / 2 of class 0 is 3 with rounding, though two images have it; 1 each for the other client
    assert labels[0] == [0, 0, 0, -1]
    assert labels[1][:2] == [0, 1]


def test_shares_of_equal_classes_give_a_quarter_of_the_images_whatever_a_clients_size():
    for images in (8, 80):
        counts = torch.full((4,), images // 8)
        labels = balanced_labels(counts, torch.full((4,), 640.0), 4 * -(-images // 16))
        assert labels.tolist() == [-(-images // 16)] * 4
    rare = balanced_labels(torch.tensor([4, 4, 0, 0]), torch.tensor([960.0, 320.0, 640.0, 640.0]), 8)
    assert rare.tolist() == [math.ceil(4 * 640 / 960), 8, 0, 0]  # of the rarer class more, of an absent one none


def test_a_client_without_reliable_images_reports_and_labels_nothing():
    method = quick(counts="shares")
    selection = told(method, torch.full((4, 4), 0.25))
    few = small_samples(method).take(torch.arange(4))
    sent, changed = selection.report(0, method.join(few, torch.Generator()), few)
    assert not sent["counts"].any()
    settled = selection.settle(0, {"counts": torch.tensor([100.0, 0.0, 0.0, 0.0])}, None)
    assert (selection.adopt({**method.join(few, torch.Generator()), **changed}, settled)["labels"] == -1).all()


def test_quotas_of_shares_grow_as_those_of_counts():
    method = quick(counts="shares", quota="quarter-growing", interval=1)
    private = {"labels": torch.zeros(16), "counts": torch.tensor([4, 4, 4, 4]), "likeliest": torch.arange(4).repeat(4)}
    private["confidence"] = torch.linspace(0.9, 0.6, 16)
    labelled = []
    for index in range(2):
        settled = method.consultation().settle(index, {"counts": torch.full((4,), 320.0)}, None)
        labelled.append(int((method.consultation().adopt(private, settled)["labels"] >= 0).sum()))
    assert labelled == [4, 8]


def test_by_default_clients_report_counts_of_which_the_server_needs_the_sum():
    selection = Selection(predict=lambda round_index, tensors, inputs: TABLE, classes=4, clients=2, interval=3)
    assert selection.sensitivity is None
    assert selection.report_shapes == {"counts": (4,), "images": (1,)}
    assert selection.settlement_shapes == {"totals": (4,), "quota": (2,)}
    assert [index for index in range(7) if selection.due(index)] == [0, 3, 6]
