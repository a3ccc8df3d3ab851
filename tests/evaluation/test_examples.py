"""Images that training set right or wrong: which are chosen, and what is kept of them."""

import base64
import io

import numpy as np
from PIL import Image

from fedvl.evaluation.examples import THUMBNAIL_SIDE, changed_rows, spread_over_classes, thumbnail


def test_rows_that_changed_are_told_from_those_that_did_not():
    labels = np.array([0, 0, 1, 1, 2, 2])
    before = np.array([0, 1, 1, 0, 0, 0])
    after = np.array([0, 0, 0, 1, 1, -1])  # nobody asked about the last
    assert changed_rows(labels, before, after, 8) == {"gained": [1, 3], "lost": [2]}
    assert changed_rows(labels, before, after, 0) == {"gained": [], "lost": []}


def test_examples_are_spread_over_the_classes():
    labels = np.array([0, 0, 0, 1, 2, 2])
    # One of each class, then a second of class 0, which comes before that of class 2.
    assert spread_over_classes(np.arange(6), labels, 4) == [0, 1, 3, 4]


def test_a_thumbnail_is_a_small_picture_of_the_image():
    image = Image.new("RGB", (400, 200), (250, 10, 10))
    uri = thumbnail(image)
    head, data = uri.split(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as small:
        assert (head, small.format, small.size) == (
            "data:image/webp;base64",
            "WEBP",
            (THUMBNAIL_SIDE, THUMBNAIL_SIDE // 2),
        )
        assert np.abs(np.asarray(small.convert("RGB")).mean((0, 1)) - [250, 10, 10]).max() < 10
    assert image.size == (400, 200)
    assert len(uri) < 4000
