"""Whose images are: units by a column, all of one at one client."""

import numpy as np
import pytest
import torch
from helpers.runs import prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedvl.config import Experiment
from fedvl.data.holdings import Units, hold_out_validation, of_newcomers, take_root, units_of, without
from fedvl.data.sources import open_dataset
from fedvl.data.stores import FileStore, Split
from fedvl.errors import FedVLError
from fedvl.methods.parts.losses import UNIT


def split(**units):
    count = len(next(iter(units.values()), ()))
    return Split(FileStore([], []), np.arange(count), np.zeros(count, np.int64), units=units)


def test_units_are_numbered_by_the_wanted_column_or_by_one_that_is_there():
    held = split(patient=("b", "a", "b", "c"), subject=("1", "1", "1", "1"))
    kept = np.array([0, 2, 3])
    found = units_of(held, kept, None)
    assert found is not None
    assert found.column == "patient"
    assert found.numbers.tolist() == [0, 0, 1]
    other = units_of(held, kept, "subject")
    assert other is not None
    assert other.numbers.tolist() == [0, 0, 0]
    assert units_of(split(), np.arange(0), None) is None


def test_a_column_that_is_not_there_or_has_gaps_is_refused():
    with pytest.raises(FedVLError, match="have no column 'person' that says whose they are; add it"):
        units_of(split(patient=("a",)), np.arange(1), "person")
    gaps = split(patient=("a", "", "a", ""))
    with pytest.raises(FedVLError, match="2 training images have no patient"):
        units_of(gaps, np.arange(4), "patient")
    apart = units_of(gaps, np.arange(4), None)
    assert apart is not None
    assert sorted(apart.numbers.tolist()) == [0, 1, 2, 2]  # nobody's images are apart


def test_a_unit_goes_to_the_client_that_has_most_of_it():
    """By hand: of unit 0 client 1 has two of three; of unit 1 both have one, and the first keeps it."""
    units = Units("patient", np.array([0, 0, 1, 1, 0, 2]))
    clients = [np.array([0, 2]), np.array([1, 3, 4]), np.array([5]), np.array([], np.int64)]
    assert [rows.tolist() for rows in units.together(clients)] == [[2, 3], [0, 1, 4], [5], []]
    assert units.most(clients) == 2
    assert units.most(units.together(clients)) == 3
    assert units.most([np.array([], np.int64)]) == 0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=40))
def test_no_image_is_lost_and_no_unit_is_at_two_clients(images):
    numbers = np.array([unit for unit, _ in images])
    owners = np.array([client for _, client in images])
    clients = Units("patient", numbers).together([np.flatnonzero(owners == client) for client in range(4)])
    assert sorted(np.concatenate(clients).tolist()) == list(range(len(images)))
    for unit in set(numbers.tolist()):
        assert sum(bool((numbers[rows] == unit).any()) for rows in clients) == 1


@pytest.fixture
def manifest(tmp_path):
    """Forty images of two classes, of ten patients."""
    lines = ["path,label,split,patient"]
    for index in range(40):
        Image.new("RGB", (8, 8), (6 * index, 255 - 6 * index, 100)).save(tmp_path / f"{index}.png")
        lines.append(f"{index}.png,{'cat' if index % 2 else 'dog'},{'test' if index >= 36 else 'train'},p{index % 10}")
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    return tmp_path


def settings_of(folder, **data):
    return {
        "data": {"dataset": str(folder), "clients": 3, "partition": "iid", **data},
        "privacy": {"unit": "record"},
    }


def test_a_manifest_says_whose_images_are(manifest):
    opened = open_dataset(str(manifest))
    assert opened.splits["train"].units["patient"][:3] == ("p0", "p1", "p2")
    assert len(opened.splits["test"].units["patient"]) == 4
    plain = prepare(settings_of(manifest)).training
    assert plain.group is not None
    assert plain.group.column == "patient"
    assert UNIT not in plain.samples.inputs
    grouped = prepare(settings_of(manifest, unit="patient")).training
    assert grouped.group is not None
    assert grouped.group.largest == 4
    numbers = grouped.samples.inputs[UNIT]
    owners = [set(numbers[rows].tolist()) for rows in grouped.rows]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 10
    with pytest.raises(FedVLError, match="no column 'case'"):
        prepare(settings_of(manifest, unit="case"))


def test_classes_that_are_kept_keep_their_units(manifest):
    kept = open_dataset(str(manifest / "manifest.csv"), classes=("cat", "dog")).splits["train"]
    assert len(kept.units["patient"]) == len(kept)


def test_the_servers_images_are_those_that_no_client_has_if_they_suffice():
    rows = [torch.tensor([0, 2]), torch.tensor([5, 7, 1])]

    def taken(count):
        return take_root(rows, 8, Experiment.model_validate({"federation": {"root_images": count}}))

    root, left = taken(3)
    assert root.tolist() == [3, 4, 6]
    assert [own.tolist() for own in left] == [[0, 2], [5, 7, 1]]
    root, left = taken(4)  # three are free, which is too few
    assert root.tolist() == sorted(root.tolist())
    assert sorted([*root.tolist(), *(row for own in left for row in own.tolist())]) == [0, 1, 2, 5, 7]
    assert len(root) == 4
    with pytest.raises(FedVLError, match=r"own 5 images would be all there are; lower federation\.root_images"):
        taken(5)


def test_newcomers_are_the_last_clients_and_absent_images_are_at_nobody():
    rows = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4])]
    newcomers = Experiment.model_validate({"data": {"clients": 3, "newcomers": 1}})
    assert [own.tolist() for own in of_newcomers(rows, newcomers)] == [[], [], [4]]
    assert of_newcomers(rows, Experiment()) == []
    assert [own.tolist() for own in without(rows, torch.tensor([3, 4]))] == [[0, 1], [2], []]


def test_a_share_of_each_clients_images_is_held_out_but_never_all():
    clients = [np.arange(10), np.array([10, 11]), np.array([12]), np.array([], np.int64)]
    experiment = Experiment.model_validate({"evaluation": {"validation": 0.2}})
    kept, held = hold_out_validation(clients, experiment)
    assert [len(rows) for rows in held] == [2, 1, 0, 0]
    assert [sorted([*one, *two]) for one, two in zip(kept, held, strict=True)] == [rows.tolist() for rows in clients]
    assert all(sorted(rows) == rows.tolist() for rows in (*kept, *held))
    assert hold_out_validation(clients, Experiment())[0] == clients
