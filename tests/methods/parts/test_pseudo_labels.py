"""Labellers on tables that can be worked out by hand, against brute force, and on real predictions."""

import math

import pytest
import torch
from helpers.runs import prepare

from fedvl.methods.base import Samples
from fedvl.methods.parts.pseudo_labels import (
    LABELLERS,
    LabelRule,
    allocation,
    boards,
    cps,
    label_by_rule,
    label_figures,
    pick,
    probabilities,
    quota,
    rank_within,
    relabelled,
    reliable,
    unreported_share,
)

TABLE = torch.tensor([[0.6, 0.3, 0.1], [0.9, 0.05, 0.05], [0.8, 0.15, 0.05], [0.2, 0.7, 0.1], [0.5, 0.1, 0.4]])


def random_table(seed, images=23, classes=5):
    return torch.softmax(2 * torch.randn(images, classes, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_ranks_count_within_each_class_and_the_first_of_equals_wins():
    classes = torch.tensor([1, 0, 1, 1, 0])
    values = torch.tensor([0.5, 0.2, 0.9, 0.5, 0.3])
    assert rank_within(classes, values).tolist() == [1, 1, 0, 2, 0]


def test_zero_shot_labels_everything():
    assert label_by_rule(TABLE, LabelRule("zero-shot", 1)).labels.tolist() == [0, 0, 0, 1, 0]


def test_upl_takes_the_surest_of_each_likeliest_class():
    assert label_by_rule(TABLE, LabelRule("upl", 2)).labels.tolist() == [-1, 0, 0, 1, -1]


def test_fpl_fills_every_board_and_sends_images_on_to_their_next_class():
    # Class 0 has places for images 1 and 2. Image 0 goes on to class 1, beside image 3; image 4 to its second, class 2.
    assert label_by_rule(TABLE, LabelRule("fpl", 2)).labels.tolist() == [1, 0, 0, 1, 2]
    # One place each: 1 takes class 0 and 3 class 1. Of the rest, all refused there, 4 is the likeliest of class 2.
    assert label_by_rule(TABLE, LabelRule("fpl", 1)).labels.tolist() == [-1, 0, -1, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_boards_are_the_greedy_choice_of_pairs(seed):
    """Independent code: all pairs by probability, each taken if image and board are free."""
    table, size = random_table(seed), 3
    expected, free = [-1] * len(table), [size] * table.shape[1]
    pairs = [(-float(p), image, c) for image, row in enumerate(table) for c, p in enumerate(row)]
    for _, image, c in sorted(pairs):
        if expected[image] < 0 and free[c]:
            expected[image], free[c] = c, free[c] - 1
    assert boards(table, size).tolist() == expected
    shuffle = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    assert boards(table[shuffle], size).tolist() == boards(table, size)[shuffle].tolist()


def test_cpl_intersects_what_is_likely_for_the_image_and_for_the_class():
    # Largest: .6 .9 .8 .7 .5, whose 0.6 quantile is .7 + .4 (.8 - .7) = .74. Within the image: 0: {0, 1}, 1: {0}, 2: {0},
    # 3: {1, 0}, 4: {0, 2}. The 0.9 quantiles of the columns are .8 + .6 (.1), .3 + .6 (.4) and .1 + .6 (.3) = .86 .54 .28.
    found = label_by_rule(TABLE, LabelRule("cpl", 16))
    assert found.candidates is not None
    assert found.candidates.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert found.labels.tolist() == [-1, 0, -1, 1, 2]


def test_cpl_keeps_the_set_of_an_image_that_goes_to_its_second_board():
    wide = label_by_rule(torch.tensor([[0.5, 0.5]] * 3), LabelRule("cpl", 1))
    assert wide.candidates is not None
    assert wide.labels.tolist() == [0, 1, -1]
    assert wide.candidates[:2].tolist() == [[1, 1], [1, 1]]


def test_reliable_images_are_strictly_beyond_both_medians():
    # Equation 2: the median of .6 .9 .8 .7 .5 is .7, so images 1 and 2; of the entropies it is that of image 3 or 2.
    entropy = [-sum(p * math.log(p) for p in row) for row in TABLE.tolist()]
    middle = sorted(entropy)[2]
    by_hand = [
        confidence > 0.7 and e < middle for confidence, e in zip([0.6, 0.9, 0.8, 0.7, 0.5], entropy, strict=True)
    ]
    assert reliable(TABLE).tolist() == by_hand == [False, True, True, False, False]
    assert reliable(TABLE, "confidence").tolist() == [False, True, True, False, False]
    assert reliable(TABLE, "none").all()
    assert not reliable(TABLE[:1]).any()  # nothing is beyond its own median


def test_quotas_of_the_paper_and_of_its_successor():
    totals = torch.tensor([5, 0, 6])
    assert quota("quarter", 100, totals, 2) == 9  # 100 / (4 * 3), rounded up
    assert [quota("quarter-growing", 100, totals, g) for g in range(3)] == [9, 17, 25]
    assert quota("mean-reliable", 100, totals, 2) == 4  # 11 / 3


def test_a_class_that_nobody_reports_has_an_even_part_of_a_quarter_that_fedcopl_lets_grow():
    # 100 images, 3 classes, 5 clients: 100 / (4 * 3) / 5 = 1.67; FedCoPL's code multiplies by the selections so far
    assert [unreported_share("quarter", 100, 3, g, 5) for g in range(3)] == [2, 2, 2]
    for quota_mode in ("quarter-growing", "mean-reliable"):
        assert [unreported_share(quota_mode, 100, 3, g, 5) for g in range(3)] == [2, 4, 5]


@pytest.mark.parametrize("scheme", LABELLERS)
def test_an_image_without_numbers_is_unlabelled_and_as_if_it_were_absent(scheme):
    broken = torch.cat([TABLE[:2], torch.full((1, 3), torch.nan), TABLE[2:]])
    found, whole = label_by_rule(broken, LabelRule(scheme, 1)), label_by_rule(TABLE, LabelRule(scheme, 1))
    assert found.labels.tolist() == [*whole.labels[:2].tolist(), -1, *whole.labels[2:].tolist()]
    assert label_by_rule(broken[2:3], LabelRule(scheme, 1)).labels.tolist() == [-1]


def test_an_image_without_numbers_neither_counts_nor_moves_the_medians():
    broken = torch.cat([torch.full((1, 3), torch.nan), TABLE])
    assert reliable(broken).tolist() == [False, *reliable(TABLE).tolist()]
    assert not reliable(broken, "none")[0]
    confidence, likeliest = broken.max(-1)
    assert pick(likeliest, confidence, torch.tensor([9, 9, 9])).tolist() == [-1, *TABLE.argmax(-1).tolist()]


def test_cpls_quantiles_by_hand():
    # Classes until their sum passes the quantile of .6 .9 .8 .7 .5: with alpha 0 that is .5, one class for each image;
    # and of a class only images at or above its quantile: with beta 1 the likeliest alone.
    few = label_by_rule(TABLE, LabelRule("cpl", 16, alpha=0.0, beta=0.0)).candidates
    sure = label_by_rule(TABLE, LabelRule("cpl", 16, alpha=1.0, beta=1.0)).candidates
    assert few is not None
    assert few.sum(-1).tolist() == [1, 1, 1, 1, 2]
    assert sure is not None
    assert sure.sum(0).tolist() == [1, 1, 1]


def test_allocation_by_hand():
    totals = torch.tensor([4, 0, 6])  # equation 3 with M = 10, 5 clients: 1/4, nobody, 4/6 of it, rounded up
    assert allocation(torch.tensor([1, 0, 4]), totals, 10, 2).tolist() == [3, 2, 7]
    assert allocation(torch.tensor([0, 0, 0]), totals, 10, 2).tolist() == [0, 2, 0]


def test_picks_are_the_surest_of_a_class_and_never_more_than_there_are():
    confidence, likeliest = TABLE.max(-1)
    assert pick(likeliest, confidence, torch.tensor([2, 5, 3])).tolist() == [-1, 0, 0, 1, -1]
    assert pick(likeliest, confidence, torch.tensor([0, 0, 9])).tolist() == [-1] * 5


def test_cooperative_selection_of_two_clients_by_hand():
    other = torch.tensor([[0.1, 0.8, 0.1], [0.2, 0.6, 0.2], [0.3, 0.4, 0.3]])  # only its first is reliable, class 1
    # Totals are 2, 1, 0 and M is ceil(8 / 12) = 1. Class 0 is all the first client's, class 1 the other's; nobody
    # reported class 2, so each may label one image of it, and has none that is likeliest to be of it.
    first, second = cps([TABLE, other])
    assert first.labels.tolist() == [-1, 0, -1, -1, -1]
    assert second.labels.tolist() == [1, -1, -1]


def federation(scheme, truth=0):
    generator = torch.Generator().manual_seed(0)
    texts = torch.nn.functional.normalize(torch.randn(3, 6, generator=generator), dim=-1)
    features = torch.nn.functional.normalize(torch.randn(40, 6, generator=generator), dim=-1)
    samples = Samples({"features": features}, torch.full((40,), truth))
    rows = [torch.arange(0, 25), torch.arange(0), torch.arange(25, 39)]  # nobody holds the last
    return features, texts, rows, relabelled(samples, rows, features, texts, 10.0, LabelRule(scheme, 4))


@pytest.mark.parametrize("scheme", ["zero-shot", "upl", "fpl", "cpl", "cps"])
def test_clients_label_their_own_images_alone_and_never_read_the_truth(scheme):
    features, texts, rows, (samples, kept) = federation(scheme)
    assert torch.equal(samples.labels, federation(scheme, truth=2)[3][0].labels)
    assert samples.labels[39] == -1
    for before, after in zip(rows, kept, strict=True):
        assert after.tolist() == [row for row in before.tolist() if samples.labels[row] >= 0]
    if scheme in LABELLERS:
        alone = label_by_rule(probabilities(features[rows[2]], texts, 10.0), LabelRule(scheme, 4)).labels
        assert torch.equal(samples.labels[rows[2]], alone)
    assert ("candidates" in samples.inputs) == (scheme == "cpl")
    if scheme == "cpl":
        for row in torch.cat(kept).tolist():
            assert samples.inputs["candidates"][row, samples.labels[row]] == 1


def test_figures_count_labels_that_are_used_and_true():
    labels = [torch.tensor([0, -1, 2]), torch.tensor([1, 1])]
    truths = [torch.tensor([0, 0, 1]), torch.tensor([1, -1])]
    assert label_figures(labels, truths) == {"pseudo_labels_used": 4, "pseudo_label_accuracy": 100 * 2 / 3}
    assert label_figures(labels, [t * 0 - 1 for t in truths])["pseudo_label_accuracy"] is None


def true_labels(scheme, partition, seed):
    """Percent of the pseudo-labels that are true, on the embedded images."""
    settings = {"seed": seed, "method": {"name": "promptfl"}, "data": {"labels": scheme, "partition": partition}}
    training = prepare(settings).training
    return label_figures(
        *zip(*((training.samples.labels[r], training.true_labels[r]) for r in training.rows), strict=True)
    )


@pytest.mark.parametrize("partition", ["dirichlet:0.1", "quantity:0.2"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_on_real_images_cooperative_labels_are_far_truer(partition, seed):
    found = {
        s: true_labels(s, partition, seed)["pseudo_label_accuracy"] for s in ("zero-shot", "upl", "fpl", "cpl", "cps")
    }
    others = [found[scheme] for scheme in ("upl", "fpl", "cpl")]
    assert found["cps"] > max(others) + 30  # table 7: 87 against 41 and 37 on CIFAR-10
    assert found["cps"] > found["zero-shot"] + 10
    assert max(others) < found["zero-shot"]  # a client that lacks a class fills its places all the same
