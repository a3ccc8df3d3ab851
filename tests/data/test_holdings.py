"""Whose images are: units by a column, all of one at one client."""

import numpy as np
import pytest
from helpers.runs import prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedvl.data.holdings import Units, units_of
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
