"""Who trains on what and what is queried: the closed and the open-vocabulary protocol."""

import numpy as np
import pytest

from fedvl.config import DataConfig
from fedvl.data.protocols import (
    Labels,
    base_to_new,
    closed,
    leave_one_domain_out,
    number_domains,
    open_vocabulary,
    personal,
)
from fedvl.errors import FedVLError

CLASSES = 12
TRAIN = np.repeat(np.arange(CLASSES), 30)
TEST = np.tile(np.arange(CLASSES), 25)
BOTH = np.concatenate([TEST, TRAIN])  # as rows of queries count


def opened(seed=0, train=TRAIN, test=TEST, **data):
    return open_vocabulary(Labels(train, test, CLASSES), DataConfig(**{"clients": 3, "shots": 10, **data}), seed)


def test_no_client_has_a_class_of_another_or_of_the_questions():
    assignment = opened()
    owned = [set(TRAIN[rows].tolist()) for rows in assignment.clients]
    assert [len(mine) for mine in owned] == [3, 3, 3]  # 12 // (3 + 1)
    together = set.union(*owned)
    assert len(together) == 9
    assert sorted(together) == assignment.trained_classes.tolist()
    assert sorted({*range(CLASSES)} - together) == assignment.queried_classes.tolist()
    assert set(BOTH[assignment.queried].tolist()) == set(assignment.queried_classes.tolist())


def test_a_client_has_few_images_of_each_class():
    for rows in opened(shots=4).clients:
        assert np.bincount(TRAIN[rows])[np.unique(TRAIN[rows])].tolist() == [4, 4, 4]
    assert [len(rows) for rows in opened(shots=None).clients] == [90, 90, 90]


def test_all_images_of_the_classes_are_asked_about_a_fifth_of_them_for_validation():
    assignment = opened()
    assert (len(assignment.validation), len(assignment.queried)) == (33, 132)  # of 3 x (25 + 30)
    everything = np.flatnonzero(np.isin(BOTH, assignment.queried_classes))
    assert np.array_equal(np.sort(np.concatenate([assignment.validation, assignment.queried])), everything)


def test_questions_come_in_a_mixed_order_that_the_seed_fixes():
    assignment, again, other = opened(), opened(), opened(seed=1)
    assert np.array_equal(assignment.queried, again.queried)
    assert not np.array_equal(assignment.queried, np.sort(assignment.queried))
    assert not np.array_equal(assignment.queried_classes, other.queried_classes)


def test_a_client_without_images_stays_in_its_place():
    assignment = opened()
    lost = TRAIN[assignment.clients[1]]
    fewer = opened(train=TRAIN[~np.isin(TRAIN, lost)])
    assert [len(rows) for rows in fewer.clients] == [30, 0, 30]


def test_the_note_tells_the_counts():
    assert opened().note == (
        "open vocabulary: each of 3 clients holds 3 classes of its own, and 3 classes that no client holds are queried"
    )


def test_too_few_classes_or_no_question():
    with pytest.raises(FedVLError, match="12 clients and 12 classes; use between 1 and 11 clients"):
        opened(clients=12)
    asked = opened().queried_classes
    with pytest.raises(FedVLError, match="No image belongs to the classes held out for the queries"):
        opened(train=TRAIN[~np.isin(TRAIN, asked)], test=TEST[~np.isin(TEST, asked)])


def test_a_quicker_look_asks_about_a_few_of_each_class():
    assignment = opened(test_shots=5)
    asked = BOTH[np.concatenate([assignment.validation, assignment.queried])]
    assert np.bincount(asked)[assignment.queried_classes].tolist() == [5, 5, 5]


def halved(seed=0, classes=8, train=None, test=None, **data):
    train = np.repeat(np.arange(classes), 6) if train is None else train
    test = np.tile(np.arange(classes), 2) if test is None else test
    return base_to_new(Labels(train, test, classes), DataConfig(**{"clients": 2, **data}), seed), train, test


def test_the_first_half_of_the_classes_is_dealt_and_the_rest_is_new():
    assignment, train, test = halved()
    assert assignment.trained_classes.tolist() == assignment.queried_classes.tolist() == [0, 1, 2, 3]
    assert assignment.new is not None
    assert assignment.new.classes.tolist() == [4, 5, 6, 7]
    assert sorted(test[assignment.new.rows]) == sorted([4, 5, 6, 7] * 2)
    assert sorted(test[assignment.queried]) == sorted([0, 1, 2, 3] * 2)
    assert sorted(np.concatenate([assignment.queried, assignment.new.rows])) == list(range(16))
    assert not np.array_equal(assignment.queried, np.sort(assignment.queried))
    assert np.array_equal(assignment.queried, halved(seed=1)[0].queried)  # one test for all seeds
    assert sorted(np.concatenate(assignment.candidates)) == [0, 1, 2, 3]
    assert halved(classes=9)[0].trained_classes.tolist() == [0, 1, 2, 3, 4]  # the larger half is base, as CoOp has it
    for rows, part, own in zip(assignment.clients, assignment.parts, assignment.candidates, strict=True):
        assert set(train[rows]) == set(test[assignment.queried][part]) == set(own)
        assert len(rows) == 6 * len(own)


def test_classes_are_dealt_by_the_seed():
    deals = {tuple(map(tuple, halved(seed, classes=12, clients=3)[0].candidates)) for seed in range(6)}
    assert len(deals) > 1
    assert [len(own) for own in halved(classes=14, clients=3)[0].candidates] == [3, 2, 2]
    assert [len(rows) for rows in halved(classes=12, clients=3, shots=4)[0].clients] == [8, 8, 8]


def test_base_to_new_needs_classes_for_all_and_images_of_both_halves():
    with pytest.raises(FedVLError, match="use 2 or fewer, and three classes or more"):
        halved(clients=3)
    with pytest.raises(FedVLError, match="A half of the classes has no test image"):
        halved(test=np.array([0, 1, 2]))


def test_closed_asks_the_whole_test_about_all_classes():
    assignment = closed(Labels(TRAIN, TEST, CLASSES), DataConfig(clients=5, shots=8, partition="iid"), 0)
    assert np.array_equal(assignment.queried, np.arange(len(TEST)))
    assert np.array_equal(assignment.trained_classes, assignment.queried_classes)
    assert np.bincount(TRAIN[np.concatenate(assignment.clients)]).tolist() == [8] * CLASSES
    assert len(assignment.validation) == 0


def test_by_domains_every_client_holds_and_asks_about_one_domain():
    train, test = np.array([0, 1] * 15), np.array([0, 1] * 5)
    domains = number_domains(["b"] * 20 + ["a"] * 10, ["b"] * 6 + ["a"] * 4)
    assert domains is not None
    data = DataConfig(clients=3, partition="domains")
    assignment = personal(Labels(train, test, 2, domains), data, 0)
    assert sorted(np.concatenate(assignment.clients)) == list(range(30))
    # Domains by name: "a" has the first two of three clients, "b" the last.
    assert [set(domains.train[rows]) for rows in assignment.clients] == [{0}, {0}, {1}]
    assert [len(rows) for rows in assignment.clients] == [5, 5, 20]
    assert [set(domains.test[rows]) for rows in assignment.parts] == [{0}, {0}, {1}]


def test_domains_are_asked_for_where_there_are_none_or_too_few_clients():
    data = DataConfig(clients=2, partition="domains")
    with pytest.raises(FedVLError, match="has none; use iid"):
        closed(Labels(TRAIN, TEST, CLASSES), data, 0)
    with pytest.raises(FedVLError, match="a client for each of 3 domains"):
        closed(Labels(np.zeros(6, int), np.zeros(3, int), 1, number_domains("aabbcc", "abc")), data, 0)


def left_out(seed=0, **data):
    """Three domains of 20 training and 4 test images each, of two classes."""
    train, test = np.array([0, 1] * 30), np.array([0, 1] * 6)
    domains = number_domains(["b"] * 20 + ["a"] * 20 + ["c"] * 20, ["b"] * 4 + ["a"] * 4 + ["c"] * 4)
    settings = DataConfig(**{"clients": 4, "partition": "domains", "minimum": 1, **data})
    return leave_one_domain_out(Labels(train, test, 2, domains), settings, seed), domains


def test_no_client_has_an_image_of_the_domain_that_is_asked_about():
    assignment, domains = left_out(target_domain="b")
    assert [domains.names[domains.train[rows][0]] for rows in assignment.clients] == ["a", "a", "c", "c"]
    assert sorted(np.concatenate(assignment.clients)) == list(range(20, 60))
    both = np.concatenate([domains.test, domains.train])
    asked = np.concatenate([assignment.queried, assignment.validation])
    assert len(asked) == 24  # both splits: nobody trains on any of them
    assert set(both[asked]) == {1}
    assert (len(assignment.validation), len(assignment.queried)) == (4, 20)
    assert assignment.note.startswith("Domain b is left out for the test. domains: each of 4 clients")


def test_seeds_leave_out_one_domain_after_another():
    names = [left_out(seed)[0].note.split()[1] for seed in range(4)]
    assert names == ["a", "b", "c", "a"]


def test_inside_a_domain_clients_differ_in_classes():
    assignment, domains = left_out(partition="dirichlet:0.1")
    assert [set(domains.train[rows]) for rows in assignment.clients] == [{1}, {1}, {2}, {2}]
    shares = [np.mean(rows % 2) for rows in assignment.clients]
    assert max(shares) - min(shares) > 0.5
    same, _ = left_out(partition="domains+dirichlet:0.1")
    assert all(np.array_equal(one, two) for one, two in zip(assignment.clients, same.clients, strict=True))


def test_leave_one_domain_out_refuses_what_it_cannot_do():
    with pytest.raises(FedVLError, match=r"no domain 'z' to leave out .*; there are a, b, c"):
        left_out(target_domain="z")
    with pytest.raises(FedVLError, match="which partition 'shards:2' cannot divide"):
        left_out(partition="shards:2")
    with pytest.raises(FedVLError, match="a client for each of 2 domains"):
        left_out(clients=1)
    with pytest.raises(FedVLError, match="this dataset has none; use emoji"):
        leave_one_domain_out(Labels(TRAIN, TEST, CLASSES), DataConfig(), 0)
    one = Labels(np.zeros(4, int), np.zeros(2, int), 1, number_domains("aaaa", "aa"))
    with pytest.raises(FedVLError, match="one domain alone"):
        leave_one_domain_out(one, DataConfig(partition="iid"), 0)


def test_domains_with_label_skew_split_train_and_test_alike():
    train, test = np.tile(np.arange(4), 60), np.tile(np.arange(4), 15)
    domains = number_domains(["a"] * 120 + ["b"] * 120, ["a"] * 30 + ["b"] * 30)
    assert domains is not None
    data = DataConfig(clients=4, partition="domains+dirichlet:0.2", minimum=5)
    assignment = personal(Labels(train, test, 4, domains), data, 3)
    assert sorted(np.concatenate(assignment.clients)) == list(range(240))
    assert sorted(np.concatenate(assignment.parts)) == list(range(60))
    for rows, part in zip(assignment.clients, assignment.parts, strict=True):
        assert len(rows) >= 5
        assert len(set(domains.train[rows])) == 1
        if len(part):
            assert set(domains.test[part]) == set(domains.train[rows])
            assert set(test[part]) <= set(train[rows])
    first, second = (np.bincount(train[assignment.clients[client]], minlength=4) for client in (0, 2))
    assert not np.array_equal(first, second)  # each domain has a draw of its own


def test_pachinko_shares_classes_by_their_groups() -> None:
    """With a tiny beta a client has one of two groups, which lie across the labels."""
    train, test, groups = np.tile(np.arange(4), 50), np.tile(np.arange(4), 10), np.array([0, 1, 0, 1])
    data = DataConfig(clients=2, partition="pachinko:0.000001")
    assignment = personal(Labels(train, test, 4, groups=groups), data, 0)
    held = [set(train[rows].tolist()) for rows in assignment.clients]
    assert sorted(map(sorted, held)) == [[0, 2], [1, 3]]
    assert [set(test[part].tolist()) for part in assignment.parts] == held
    assert sorted(np.concatenate(assignment.clients).tolist()) == list(range(200))


def test_pachinko_needs_groups() -> None:
    with pytest.raises(
        FedVLError, match=r"'pachinko:0\.5' needs classes in groups, which the catalogue has for cifar100"
    ):
        closed(Labels(TRAIN, TEST, CLASSES), DataConfig(partition="pachinko:0.5"), 0)
