"""Images that are added to a dataset: who holds them, which classes there are, and what stays as it was."""

import numpy as np
import pytest
from helpers.runs import prepare
from PIL import Image

from fedvl.data.additions import extend, parse_addition
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError

CLIENTS = 3


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders of pictures: of cats and dogs, and of dogs and eels."""
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0)
    for folder, names in (("first", ("cat", "dog")), ("more", ("dog", "eel"))):
        for part, count in (("train", 6), ("test", 2)):
            for name in names:
                place = tmp_path / folder / part / name
                place.mkdir(parents=True)
                for number in range(count):
                    pixels = draw.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{number}.png")
    return tmp_path / "first", tmp_path / "more"


def prepared_with(first, clients, additions=(), **data):
    return prepare(
        {
            "method": {"name": "linear"},
            "device": "cpu",
            "data": {"dataset": str(first), "partition": "iid", "clients": clients, "additions": additions, **data},
        }
    )


def test_classes_of_other_names_follow_the_known_ones(folders):
    first, more = map(open_dataset, map(str, folders))
    joined = extend(first, [more])
    assert joined.class_names == ("cat", "dog", "eel")
    assert joined.before == 2
    assert joined.splits["train"].labels.tolist() == [0] * 6 + [1] * 6 + [1] * 6 + [2] * 6
    assert joined.splits["test"].labels.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert np.array_equal(np.asarray(joined.splits["train"].read(12)), np.asarray(more.splits["train"].read(0)))


def test_others_keep_the_rows_that_they_had(folders):
    first, more = folders
    before = prepared_with(first, CLIENTS).training
    after = prepared_with(first, CLIENTS + 1, [f"new={more}"]).training
    assert [rows.tolist() for rows in after.rows[:CLIENTS]] == [rows.tolist() for rows in before.rows]
    assert after.rows[CLIENTS].tolist() == list(range(12, 24))
    assert after.counts[CLIENTS].tolist() == [0, 6, 6]


def test_a_client_that_is_named_holds_them_beside_its_own(folders):
    first, more = folders
    before = prepared_with(first, CLIENTS).training
    after = prepared_with(first, CLIENTS, [f"1={more}"]).training
    assert after.rows[1].tolist() == [*before.rows[1].tolist(), *range(12, 24)]
    assert after.rows[2].tolist() == before.rows[2].tolist()


def test_their_test_images_are_queried_too(folders):
    first, more = folders
    prepared = prepared_with(first, CLIENTS + 1, [f"new={more}"])
    assert prepared.test.samples.labels.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert prepared.method.task.class_names == ("cat", "dog", "eel")


@pytest.mark.parametrize(
    ("additions", "clients", "message"),
    [(["5={}"], 3, "no client 5"), (["2={}", "new={}"], 3, "no client 2"), (["{}"], 3, "CLIENT=SOURCE")],
)
def test_unknown_clients_and_malformed_additions_are_refused(folders, additions, clients, message):
    first, more = folders
    with pytest.raises(FedVLError, match=message):
        prepared_with(first, clients, [addition.format(more) for addition in additions])


def test_a_protocol_that_deals_classes_is_refused(folders):
    first, more = folders
    with pytest.raises(FedVLError, match="closed only"):
        prepare(
            {
                "method": {"name": "linear"},
                "device": "cpu",
                "data": {"dataset": str(first), "partition": "iid", "clients": 2, "additions": [f"1={more}"]},
                "evaluation": {"protocol": "personal"},
            }
        )


def test_an_addition_is_a_client_and_a_source():
    assert parse_addition("new=more/") == (None, "more/")
    assert parse_addition("12=a=b") == (12, "a=b")
