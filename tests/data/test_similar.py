"""Class names that probably mean the same, and images that are nearly the same."""

import numpy as np
import pytest
from PIL import Image

from fedvl.data.similar import (
    MIN_CORRELATION,
    groups_alike,
    groups_equal,
    joined_groups,
    probably_same,
    same_names,
    small_copy,
)
from fedvl.data.sources import open_dataset


@pytest.mark.parametrize(
    "one, other",
    [
        ("Melanoma", "melanom"),
        ("melanoma", "MELANOMA"),
        ("basal_cell carcinoma", "Basal cell carcinomas"),
        ("carcinoma, basal cell", "basal cell carcinoma"),
        ("Fluss", "Fluß"),
        ("Flüsse", "Fluesse"),
        ("naevus", "nævus"),
        ("keratosis", "keratsois"),
        ("horse", "horses"),
        ("mass", "masses"),
        ("Café", "cafe"),
        ("dermatofibroma", "dermatafibroma"),
    ],
)
def test_spellings_of_one_class_are_the_same(one, other):
    assert probably_same(one, other)
    assert probably_same(other, one)


@pytest.mark.parametrize(
    "one, other",
    [
        ("benign", "malignant"),
        ("malignant", "non-malignant"),
        ("normal", "abnormal"),
        ("hypothyroid", "hyperthyroid"),
        ("stage 1", "stage 2"),
        ("stage IIa", "stage IIb"),
        ("grade1", "grade2"),
        ("cat", "car"),
        ("horse", "house"),
        ("deer", "beer"),
        ("left lung", "right lung"),
        ("cell", "stem cell"),
        ("intraductal", "interductal"),
        ("", "melanoma"),
    ],
)
def test_different_classes_are_not(one, other):
    assert not probably_same(one, other)
    assert not probably_same(other, one)


@pytest.mark.parametrize("name", ["cifar10-mini", "emoji-mini"])
def test_no_two_classes_of_an_embedded_set_are_the_same(name):
    assert same_names(open_dataset(name).class_names) == []


def test_pairs_are_named_once():
    assert same_names(["melanom", "nevus", "Melanoma", "melanoma"]) == [
        ("Melanoma", "melanom"),
        ("Melanoma", "melanoma"),
        ("melanom", "melanoma"),
    ]


@pytest.fixture(scope="module")
def pictures():
    split = open_dataset("cifar10-mini").splits["train"]
    return [split.read(row) for row in range(40)]


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.resize((50, 50), Image.Resampling.BICUBIC),
        lambda image: image.point(lambda value: min(255, value + 20)),
        lambda image: image.point(lambda value: int(0.7 * value)),
    ],
)
def test_a_changed_copy_is_found_and_nothing_else(pictures, change):
    copies = np.array([small_copy(each) for each in [*pictures, change(pictures[7])]])
    assert groups_alike(copies) == [[7, 40]]


def test_what_all_images_share_does_not_make_them_the_same():
    """Chest films: one common picture, and a little of each."""
    generator = np.random.default_rng(0)
    common = generator.uniform(0, 255, 768)
    rows = (common + generator.normal(0, 10, (40, 768))).astype(np.float32)
    centred = rows - rows.mean(1, keepdims=True)
    lengths = np.linalg.norm(centred, axis=1)
    assert (centred[0] @ centred[1]) / (lengths[0] * lengths[1]) > MIN_CORRELATION
    assert groups_alike(rows) == []
    assert groups_alike(np.concatenate([rows, rows[3:4] + 1])) == [[3, 40]]


def test_plain_images_are_not_compared():
    assert groups_alike(np.full((3, 768), 7, np.float32)) == []
    assert groups_alike(np.zeros((0, 768), np.float32)) == []


def test_groups_are_found_across_blocks(monkeypatch):
    monkeypatch.setattr("fedvl.data.similar.COPIES_AT_ONCE", 3)
    generator = np.random.default_rng(0)
    rows = generator.normal(0, 30, (10, 768)).astype(np.float32)
    rows[8] = rows[1]
    assert groups_alike(rows) == [[1, 8]]


def test_groups_of_pairs_and_of_keys():
    assert joined_groups([(5, 2), (1, 4), (2, 9)]) == [[1, 4], [2, 5, 9]]
    assert groups_equal([b"a", b"b", b"a", b"c", b"b", b"a"]) == [[0, 2, 5], [1, 4]]
