"""Partitions: every sample placed once, the same for one seed, always an end, and the numbers the schemes promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedvl.data.partition import (
    _chances,
    _pachinko,
    few_shot,
    long_tail,
    open_split,
    parse_spec,
    partition,
    partition_test,
)
from fedvl.errors import FedVLError

CIFAR = np.repeat(np.arange(10), 5000)

labellings = st.lists(st.integers(0, 7), min_size=1, max_size=120).map(lambda values: np.array(values, np.int64))
specs = st.one_of(
    st.sampled_from(["iid", "even", "disjoint", "dirichlet:1e-320", "dirichlet:1.7e308"]),
    st.floats(1e-4, 100).map(lambda alpha: f"dirichlet:{alpha}"),
    st.integers(1, 6).map(lambda shards: f"shards:{shards}"),
    st.floats(0.01, 1).map(lambda fraction: f"quantity:{fraction}"),
)


def assert_every_sample_once(clients, total):
    assert all(np.array_equal(indices, np.unique(indices)) and indices.dtype == np.int64 for indices in clients)
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(total))


def table(clients, labels, width):
    return np.stack([np.bincount(labels[indices], minlength=width) for indices in clients])


def entropy(counts):
    shares = counts / counts.sum(1, keepdims=True)
    return float(-(shares * np.log(np.where(shares > 0, shares, 1))).sum(1).mean())


@settings(max_examples=300, deadline=None)
@given(labellings, specs, st.integers(1, 30), st.integers(0, 5), st.integers(0, 20))
def test_any_partition_places_every_sample_once_or_says_why_not(labels, spec, clients, seed, minimum):
    classes = len(np.unique(labels))
    shards = clients * int(spec[7:]) if spec.startswith("shards") else classes
    if clients > len(labels) or (spec == "disjoint" and clients > classes) or not classes <= shards <= len(labels):
        with pytest.raises(FedVLError):
            partition(labels, spec, clients, seed, minimum)
        return
    result = partition(labels, spec, clients, seed, minimum)
    assert len(result.clients) == clients
    assert_every_sample_once(result.clients, len(labels))
    assert np.array_equal(table(result.clients, labels, result.counts.shape[1]), result.counts)
    again = partition(labels, spec, clients, seed, minimum)
    assert all(map(np.array_equal, result.clients, again.clients))
    assert result.note == again.note
    assert result.note.endswith(".")
    assert result.note.startswith(spec)

    sizes = result.counts.sum(1)
    if spec == "iid":
        assert sizes.max() - sizes.min() <= 1
    elif spec.startswith("dirichlet"):
        least = minimum if clients * minimum <= len(labels) else max(1, len(labels) // (2 * clients))
        assert sizes.min() >= least
        assert (f"not {minimum}" in result.note) == (least != minimum)
    elif spec.startswith("shards"):
        assert ((result.counts > 0).sum(1) <= int(spec[7:])).all()
        assert sizes.min() >= int(spec[7:])  # no shard is empty
    elif spec == "disjoint":
        assert ((result.counts > 0).sum(0) <= 1).all()
        held = (result.counts > 0).sum(1)
        assert held.max() - held.min() <= 1


@settings(max_examples=200, deadline=None)
@given(labellings, labellings, specs, st.integers(1, 12), st.integers(0, 3))
def test_a_test_set_follows_the_draw_of_the_training_set(train_labels, test_labels, spec, clients, seed):
    try:
        train = partition(train_labels, spec, clients, seed)
    except FedVLError:
        return
    test = partition_test(train, test_labels)
    assert_every_sample_once(test.clients, len(test_labels))
    assert np.array_equal(table(test.clients, test_labels, test.counts.shape[1]), test.counts)
    if spec == "iid":
        assert np.ptp(test.counts.sum(1)) <= 1
        return
    for label, size in enumerate(np.bincount(test_labels)):
        held = train.counts[:, label] if label < train.counts.shape[1] else np.zeros(clients)
        shares = held / held.sum() if held.sum() else np.full(clients, 1 / clients)
        exact = shares * size
        got = test.counts[:, label]
        assert (got >= np.floor(exact - 1e-9)).all()
        assert (got <= np.ceil(exact + 1e-9)).all()
        assert (got[shares == 0] == 0).all()
    unseen = set(test_labels.tolist()) - set(train_labels.tolist())
    assert (f"{len(unseen)} classes without training samples" in test.note) == bool(unseen)


@pytest.mark.parametrize(
    "spec", ["iid", "dirichlet:0.05", "dirichlet:1", "shards:2", "quantity:0.2", "disjoint", "dirichlet:1e-320"]
)
def test_seeds_and_client_counts_give_different_draws(spec):
    labels = np.repeat(np.arange(10), 50)
    draws = [partition(labels, spec, clients, seed) for clients in (5, 10) for seed in range(4)]
    assert len({b"|".join(indices.tobytes() for indices in draw.clients) for draw in draws}) == len(draws)


@pytest.mark.parametrize("seed", range(5))
def test_cifar_at_alpha_005_ends_by_a_small_repair(seed):
    result = partition(CIFAR, "dirichlet:0.05", 100, seed)
    assert_every_sample_once(result.clients, 50_000)
    assert result.counts.sum(1).min() >= 10
    # About 1 draw in 15,000 would have been accepted; the best of 200 lacks little.
    assert "none of 200 draws" in result.note
    assert "was repaired by moving" in result.note
    moved = int(result.note.split("by moving ")[1].split(" of 50,000")[0])
    assert 0 < moved < 60


def test_a_draw_that_is_accepted_is_named():
    result = partition(CIFAR, "dirichlet:0.5", 10, 0)
    assert result.note == "dirichlet:0.5: draw 1 gave each of 10 clients at least 10 samples."


def test_too_few_samples_for_the_minimum_lower_it_and_say_so():
    result = partition(np.arange(60) % 3, "dirichlet:0.1", 10, 0)
    assert result.counts.sum(1).min() >= 3  # half the mean of 6
    assert "(not 10, for which there are too few samples)" in result.note


def test_alpha_goes_from_one_class_a_client_to_the_same_mix_everywhere():
    mixes = [entropy(partition(CIFAR, f"dirichlet:{alpha}", 20, 0).counts) for alpha in (0.01, 0.1, 1, 10, 1e6)]
    assert mixes == sorted(mixes)
    assert mixes[0] < 0.6
    near_iid = partition(CIFAR, "dirichlet:1e6", 20, 0).counts
    assert mixes[-1] > 0.999 * np.log(10)
    assert np.abs(near_iid - 250).max() <= 5


def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution():
    # One class, so nobody is full: each share has mean 1/K and variance (1/K)(1 - 1/K)/(K alpha + 1).
    labels = np.zeros(10_000, np.int64)
    shares = np.stack([partition(labels, "dirichlet:0.5", 5, seed, 0).counts[:, 0] for seed in range(1500)]) / 10_000
    assert np.allclose(shares.mean(0), 0.2, atol=0.02)
    assert np.allclose(shares.var(0), 0.2 * 0.8 / 3.5, rtol=0.1)


def test_clients_that_hold_the_mean_get_no_more():
    # A tiny alpha gives each class whole to one client; with 4 equal classes a client is then full, so nobody gets two.
    result = partition(np.repeat(np.arange(4), 25), "dirichlet:1e-9", 4, 0, 0)
    assert sorted(result.counts.tolist()) == [[0, 0, 0, 25], [0, 0, 25, 0], [0, 25, 0, 0], [25, 0, 0, 0]]


def test_the_repair_takes_from_the_largest_client():
    # One class, whole to one client; the three others each get the minimum of 5 from it.
    result = partition(np.zeros(100, np.int64), "dirichlet:1e-9", 4, 0, 5)
    assert sorted(result.counts[:, 0]) == [5, 5, 5, 85]
    assert "moving 15 of 100 samples" in result.note


def test_shards_of_equal_classes_are_equal():
    result = partition(CIFAR, "shards:2", 100, 0)
    assert (result.counts.sum(1) == 500).all()
    assert set(np.unique(result.counts)) <= {0, 250, 500}
    assert ((result.counts // 250).sum(0) == 20).all()  # S K / C = 20 shards a class


def test_shards_of_unequal_classes_go_by_size():
    # 90 and 10 samples in 10 shards of 10: nine of the first class, one of the second.
    result = partition(np.repeat([0, 1], [90, 10]), "shards:2", 5, 3)
    assert (result.counts.sum(1) == 20).all()
    assert sorted(result.counts[:, 1]) == [0, 0, 0, 0, 10]


def test_quantity_gives_fedpp_counts():
    # CIFAR-10, 10 clients, 0.2: 2 classes a client, 2 clients a class, at least a tenth of it for each holder.
    result = partition(CIFAR, "quantity:0.2", 10, 0)
    assert ((result.counts > 0).sum(1) == 2).all()
    assert ((result.counts > 0).sum(0) == 2).all()
    assert result.counts[result.counts > 0].min() >= 500
    assert len(set(result.counts.sum(1).tolist())) > 5  # the parts are random
    # DTD: 47 classes x 2 holders over 10 clients are 9 or 10 classes each; UCF101 with 5 clients: one holder, 20 or 21.
    dtd = (partition(np.repeat(np.arange(47), 60), "quantity:0.2", 10, 0).counts > 0).sum(1)
    assert sorted(dtd) == [9] * 6 + [10] * 4
    ucf = partition(np.repeat(np.arange(101), 75), "quantity:0.2", 5, 0).counts > 0
    assert sorted(ucf.sum(1)) == [20] * 4 + [21]
    assert (ucf.sum(0) == 1).all()


def test_quantity_counts_holders_without_rounding_errors():
    assert ((partition(CIFAR, "quantity:0.29", 100, 0).counts > 0).sum(0) == 29).all()


def test_quantity_leaves_no_client_without_a_class():
    result = partition(CIFAR, "quantity:0.01", 100, 0)
    assert ((result.counts > 0).sum(1) == 1).all()
    assert "10 of 100 clients (more than requested" in result.note


def test_clients_that_must_stay_empty_are_counted_in_the_note():
    # Two classes of 1 and 9 samples with two holders each: the one sample cannot serve both of its holders.
    result = partition(np.repeat([0, 1], [1, 9]), "quantity:0.5", 4, 0)
    assert (result.counts.sum(1) == 0).sum() == 1
    assert result.note.endswith("and 1 clients hold no samples.")


def test_disjoint_blocks_are_even():
    result = partition(np.repeat(np.arange(10), 3), "disjoint", 4, 0)
    assert sorted((result.counts > 0).sum(1)) == [2, 2, 3, 3]
    assert result.counts.sum(1).tolist() == ((result.counts > 0).sum(1) * 3).tolist()


def test_labels_with_gaps_keep_their_columns():
    result = partition(np.array([2] * 20 + [9] * 20), "disjoint", 2, 0)
    assert result.counts.shape == (2, 10)
    assert np.flatnonzero(result.counts.sum(0)).tolist() == [2, 9]


def test_unlabelled_samples_can_only_be_dealt_evenly():
    labels = np.full(25, -1)
    result = partition(labels, "iid", 4, 0)
    assert_every_sample_once(result.clients, 25)
    assert result.counts.shape == (4, 0)
    assert_every_sample_once(partition_test(result, labels).clients, 25)
    labels[:5] = 0
    assert partition(labels, "iid", 4, 0).counts.sum() == 5
    for spec in ("dirichlet:1", "shards:1", "quantity:0.5", "disjoint"):
        with pytest.raises(FedVLError, match="needs labels, but 20 samples have none; use iid"):
            partition(labels, spec, 4, 0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichlet:0", "Partition 'dirichlet:0' needs a positive number after the colon, for example dirichlet:0.3."),
        ("dirichlet", "Partition 'dirichlet' needs a positive number after the colon, for example dirichlet:0.3."),
        ("dirichlet:-1", "needs a positive number"),
        ("dirichlet:nan", "needs a positive number"),
        ("dirichlet:inf", "needs a positive number"),
        ("dirichlet:many", "needs a positive number"),
        ("shards:0", "needs a whole number of 1 or more after the colon, for example shards:2."),
        ("shards:1.5", "needs a whole number"),
        ("shards:inf", "needs a whole number"),
        ("quantity:0", "needs a fraction above 0 and at most 1 after the colon, for example quantity:0.2."),
        ("quantity:1.2", "needs a fraction"),
        ("pachinko", "needs a positive number after the colon, for example pachinko:0.5."),
        ("iid:3", "Partition 'iid:3' takes no number; write just iid."),
        ("disjoint:", "takes no number"),
        ("sorted", "is not known; use iid, even, dirichlet:ALPHA"),
        ("", "is not known"),
    ],
)
def test_a_wrong_specification_is_one_sentence(spec, message):
    for attempt in (lambda: parse_spec(spec), lambda: partition(CIFAR, spec, 10, 0)):
        with pytest.raises(FedVLError) as caught:
            attempt()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("labels", "spec", "clients", "message"),
    [
        ([0, 1, 2], "iid", 4, "more clients (4) than samples (3)"),
        ([0, 1, 2], "iid", 0, "at least 1 client, not 0"),
        ([], "iid", 1, "no samples to partition"),
        ([0, -2], "iid", 1, "Label -2 is out of range"),
        ([0, 1, 2] * 5, "disjoint", 5, "5 clients and 3 classes; use at most 3 clients."),
        (list(range(10)) * 3, "shards:1", 4, "4 shards, too few for 10 classes; use shards:3 or more clients."),
        ([0, 1, 2, 3], "shards:3", 4, "needs 12 samples for 4 clients, but there are 4"),
    ],
)
def test_what_cannot_be_shared_out_is_one_sentence(labels, spec, clients, message):
    with pytest.raises(FedVLError) as caught:
        partition(np.array(labels, np.int64), spec, clients, 0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hundred_thousand_classes_end():
    labels = np.repeat(np.arange(100_000), 2)
    for spec in ("dirichlet:0.05", "shards:10000"):
        assert_every_sample_once(partition(labels, spec, 10, 0).clients, len(labels))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1, 6), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 3))
def test_few_shot_takes_that_many_of_each_class(values, shots, seed):
    labels = np.array(values, np.int64)
    if labels.max() < 0:
        with pytest.raises(FedVLError, match="no sample of this dataset has one"):
            few_shot(labels, shots, seed)
        return
    chosen = few_shot(labels, shots, seed)
    assert np.array_equal(chosen, np.unique(chosen))
    assert (labels[chosen] >= 0).all()
    expected = np.minimum(np.bincount(labels[labels >= 0]), shots)
    assert np.array_equal(np.bincount(labels[chosen], minlength=len(expected)), expected)
    assert set(chosen.tolist()) <= set(few_shot(labels, shots + 1, seed).tolist())


def test_few_shot_depends_on_the_seed_and_chooses_evenly():
    labels = np.repeat(np.arange(2), 20)
    chosen = np.concatenate([few_shot(labels, 5, seed) for seed in range(800)])
    assert np.allclose(np.bincount(chosen, minlength=40), 200, atol=60)  # 5 standard deviations
    with pytest.raises(FedVLError, match="at least 1 image of each class, not 0"):
        few_shot(labels, 0, 0)


def test_a_long_tail_falls_geometrically_from_the_first_class_to_the_last():
    labels = np.repeat(np.arange(5), 100)
    chosen = long_tail(labels, 5, 100, 0)
    assert np.bincount(labels[chosen]).tolist() == [100, 32, 10, 3, 1]  # 100 * 100 ** (-c / 4)
    assert not np.array_equal(chosen, long_tail(labels, 5, 100, 1))
    uneven = np.repeat(np.arange(3), [50, 4, 20])
    assert np.bincount(uneven[long_tail(uneven, 3, 25, 0)]).tolist() == [50, 4, 2]  # 50, 10, 2; the second has but 4
    assert len(long_tail(labels, 5, 1, 0)) == 500
    with pytest.raises(FedVLError, match="some training samples have none"):
        long_tail(np.array([0, -1]), 2, 10, 0)


@pytest.mark.parametrize(("classes", "each", "test"), [(101, 9, 11), (102, 9, 12), (70, 6, 10), (196, 17, 26)])
def test_open_split_has_fed_mp_counts(classes, each, test):
    held, unseen = open_split(classes, 10, 0)
    assert [len(block) for block in held] == [each] * 10
    assert len(unseen) == test
    assert np.array_equal(np.sort(np.concatenate([*held, unseen])), np.arange(classes))
    assert not np.array_equal(unseen, open_split(classes, 10, 1)[1])
    assert np.array_equal(unseen, open_split(classes, 10, 0)[1])


@pytest.mark.parametrize(("classes", "clients"), [(10, 10), (10, 0), (1, 1)])
def test_open_split_needs_a_class_for_each_and_for_the_test(classes, clients):
    with pytest.raises(FedVLError, match="needs a class for each client"):
        open_split(classes, clients, 0)


def test_even_deals_each_class_and_all_of_them_evenly() -> None:
    """CacheFL, appendix B.1: 16 images of ten classes and ten clients are one or two of every class for each."""
    labels = np.repeat(np.arange(10), 16)
    drawn = partition(labels, "even", 10, seed=3)
    assert set(drawn.counts.ravel().tolist()) == {1, 2}
    assert drawn.counts.sum(0).tolist() == [16] * 10
    assert drawn.counts.sum(1).tolist() == [16] * 10
    assert [np.bincount(labels[own], minlength=10).tolist() for own in drawn.clients] == drawn.counts.tolist()
    uneven = partition(np.repeat([0, 1, 2], [7, 5, 4]), "even", 3, seed=0)
    assert uneven.counts.max(0).tolist() == [3, 2, 2]
    assert uneven.counts.min(0).tolist() == [2, 1, 1]
    assert sorted(uneven.counts.sum(1).tolist()) == [5, 5, 6]


def test_classes_asked_about_are_the_same_for_any_number_of_clients():
    asked = [open_split(10, clients, 0, asked=4)[1].tolist() for clients in (1, 2, 3, 6)]
    assert all(each == asked[0] for each in asked)
    for clients in (1, 2, 3, 6):
        held, queried = open_split(10, clients, 0, asked=4)
        assert sorted(np.concatenate([*held, queried])) == list(range(10))
        assert max(map(len, held)) - min(map(len, held)) <= 1
    assert open_split(10, 2, 1, asked=4)[1].tolist() != asked[0]
    with pytest.raises(FedVLError, match="6 are left for 7 clients"):
        open_split(10, 7, 0, asked=4)


GROUPS = np.repeat(np.arange(20), 5)  # as CIFAR-100 has


def pachinko(beta, clients, seed, each=100, classes=100):
    """Partition ``each`` images of each class; numbers are group * classes + label."""
    labels = np.repeat(GROUPS[:classes] * classes + np.arange(classes), each)
    drawn = partition(labels, f"pachinko:{beta}", clients, seed, classes=classes)
    return drawn, labels


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=120),
    st.integers(1, 4),
    st.floats(1e-4, 100),
    st.integers(1, 12),
    st.integers(0, 5),
)
def test_pachinko_gives_each_client_its_share_and_places_every_sample_once(values, groups, beta, clients, seed):
    classes = 8
    labels = np.array([value % groups * classes + value for value in values], np.int64)
    if clients > len(labels):
        return
    drawn = partition(labels, f"pachinko:{beta}", clients, seed, classes=classes)
    assert_every_sample_once(drawn.clients, len(labels))
    assert np.array_equal(table(drawn.clients, labels, drawn.counts.shape[1]), drawn.counts)
    assert np.ptp(drawn.counts.sum(1)) <= 1
    again = partition(labels, f"pachinko:{beta}", clients, seed, classes=classes)
    assert all(map(np.array_equal, drawn.clients, again.clients))


@pytest.mark.parametrize(("groups", "alpha"), [([0, 1, 2, 3], 0.5), ([0, 0, 0, 0], 10.0)])
def test_pachinko_shares_groups_by_beta_and_classes_of_a_group_by_ten(groups, alpha):
    """A share of the first client's n samples has mean 1/4 and variance (3/16) (1/n + (1 - 1/n) / (4 alpha + 1))."""
    shares = []
    for seed in range(200):
        first = np.random.default_rng(seed).permutation(16)[0]
        sizes, generator = np.full(4, 2000), np.random.default_rng(seed)
        counts, _ = _pachinko(sizes, np.array(groups), 0.5, 16, generator)
        shares.append(counts[first] / 500)
    assert np.allclose(np.mean(shares, axis=0), 0.25, atol=0.03)
    assert np.var(shares, axis=0).mean() == pytest.approx(3 / 16 * (1 / 500 + (499 / 500) / (4 * alpha + 1)), rel=0.15)


def test_pachinko_draws_a_group_and_then_a_class_of_what_is_left():
    """Group weights 1, 3, 4 and class weights 1, 3 | 2, 2 | 5; class 1 is used up, and then the last group."""
    of_groups, of_classes = np.log([1.0, 3, 4]), np.log([1.0, 3, 2, 2, 5])
    groups, left = np.array([0, 0, 1, 1, 2]), np.ones(5, bool)
    assert np.allclose(_chances(of_groups, of_classes, groups, left), [1 / 32, 3 / 32, 6 / 32, 6 / 32, 16 / 32])
    left[1] = False
    assert np.allclose(_chances(of_groups, of_classes, groups, left), [1 / 8, 0, 3 / 16, 3 / 16, 1 / 2])
    left[4] = False
    assert np.allclose(_chances(of_groups, of_classes, groups, left), [1 / 4, 0, 3 / 8, 3 / 8, 0])


def test_pachinko_uses_up_classes_and_then_groups():
    """With a tiny beta a client has one group, until that is used up."""
    counts = pachinko(1e-6, 20, 0)[0].counts
    held = counts[:, counts.any(0)].reshape(20, 20, 5).sum(2)
    assert (held.sum(0) == 500).all()
    assert (held.sum(1) == 500).all()
    assert ((held == 500).sum(1) == 1).sum() > 5  # a group has as many samples as a client, so early ones hold one


def test_pachinko_mixes_more_with_a_larger_beta():
    mixes = [entropy(pachinko(beta, 20, 0)[0].counts) for beta in (0.01, 0.1, 1, 100)]
    assert mixes == sorted(mixes)


def test_pachinko_follows_its_draw_in_the_test():
    drawn, labels = pachinko(0.5, 10, 3)
    test = partition_test(drawn, labels[::5])
    assert_every_sample_once(test.clients, len(labels[::5]))
    assert (test.counts[drawn.counts == 0] == 0).all()
    assert np.abs(5 * test.counts - drawn.counts).max() <= 5
