"""The page of test images: what is probably mislabelled, what is alike, and that each image is itself."""

import base64
import io
import json
import math
import re
import shutil

import numpy as np
import pytest
from helpers.finished import embedded_splits
from PIL import Image

from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.examples import thumbnail
from fedvl.report import images_page
from fedvl.report.images_page import near_duplicates, probable_errors, write_images_page
from fedvl.runs.answers import AnswerRow, read_answers
from fedvl.runs.folder import RunFolder


def row(file, truth, prediction, share):
    return AnswerRow(file, truth, prediction, share, 0.5, "")


def test_a_label_is_doubted_if_the_model_is_as_sure_as_of_images_of_that_class():
    rows = [
        row("a", "cat", "cat", 0.9),
        row("b", "cat", "cat", 0.7),  # of a cat: 0.8 in the mean
        row("c", "dog", "cat", 0.81),
        row("d", "dog", "cat", 0.79),
        row("e", "cat", "dog", 0.99),  # no dog was recognised: nothing to compare with
        row("f", "", "cat", 0.99),
        row("g", "dog", "cat", math.nan),
    ]
    assert probable_errors(rows) == {2}


def test_near_duplicates_name_each_other_and_other_labels():
    rows = [row("a", "cat", "cat", 0.9), row("b", "dog", "cat", 0.7), row("c", "cat", "cat", 0.5)]
    assert near_duplicates(rows, [[0, 1]]) == {
        0: "near-duplicate of b, which is labelled dog",
        1: "near-duplicate of a, which is labelled cat",
    }
    assert near_duplicates(rows, [[0, 2]])[2] == "near-duplicate of a"


@pytest.fixture(scope="module")
def copied(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "run"
    shutil.copytree(folder_of("linear"), folder)
    return RunFolder(folder)


def listed(page):
    """File, numbers of classes, kinds and picture of each image of a page."""
    found = re.findall(
        r'<li data-file="(.*?)".*?data-true="(.*?)" data-predicted="(.*?)" data-kinds="(.*?)">\s*<img src="(.*?)"', page
    )
    return [(file, int(true), int(predicted), kinds.split(), image) for file, true, predicted, kinds, image in found]


def test_the_page_has_every_test_image_and_its_picture(copied, monkeypatch):
    found = listed(write_images_page(copied, Silent()).read_text("utf-8"))
    rows, names = read_answers(copied), copied.result.class_names
    assert sorted((file, true, predicted) for file, true, predicted, _, _ in found) == sorted(
        (row.file, names.index(row.truth), names.index(row.prediction)) for row in rows
    )
    test = embedded_splits()["test"]
    place = {test.describe(number): number for number in range(len(test))}
    for file, true, predicted, kinds, image in found[:20]:
        assert image == thumbnail(test.read(place[file]))
        assert Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))).size == (32, 32)
        assert ("wrong" in kinds) == (true != predicted)
    ranks = [("error" not in kinds, "twin" not in kinds, "wrong" not in kinds) for *_, kinds, _ in found]
    assert ranks == sorted(ranks)
    errors = {rows[at].file for at in probable_errors(rows)}
    assert errors
    assert {file for file, _, _, kinds, _ in found if "error" in kinds} == errors
    assert "images.html#true=" in (copied.path / "report.html").read_text("utf-8")
    monkeypatch.setattr(images_page, "MAX_SHOWN", 7)
    page = write_images_page(copied, Silent()).read_text("utf-8")
    assert [file for file, *_ in listed(page)] == [file for file, *_ in found[:7]]
    assert "The page shows 7 of them" in page


def test_twins_of_an_image_are_found(copied, monkeypatch):
    """Two files of one picture, of which one is a little brighter."""
    rows = read_answers(copied)
    test = embedded_splits()["test"]
    place = {test.describe(number): number for number in range(len(test))}
    twin = place[rows[3].file], place[rows[8].file]

    def read(self, index):
        if index == twin[1]:
            return Image.fromarray((np.asarray(original(self, twin[0])) * 0.9).astype(np.uint8))
        return original(self, index)

    original = type(test).read
    monkeypatch.setattr(type(test), "read", read)
    found = {file: kinds for file, _, _, kinds, _ in listed(write_images_page(copied, Silent()).read_text("utf-8"))}
    assert "twin" in found[rows[3].file]
    assert "twin" in found[rows[8].file]


def test_other_test_images_and_damaged_tables_are_refused(copied, tmp_path):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(copied.path, folder.path)
    result = json.loads((folder.path / "result.json").read_bytes())
    (folder.path / "result.json").write_text(json.dumps({**result, "test_sha256": "0" * 64}))
    with pytest.raises(FedVLError, match="have changed since the run"):
        write_images_page(folder, Silent())
    for content, sentence in (
        ("a,b\n", "its columns are not file"),
        ("file,truth,prediction,share,entropy\nx,y\n", "cannot"),
    ):
        (folder.path / "test.csv").write_text(content)
        with pytest.raises(FedVLError, match=sentence):
            read_answers(folder)
    (folder.path / "test.csv").unlink()
    with pytest.raises(FedVLError, match=r"has no test\.csv"):
        read_answers(folder)
    (folder.path / "result.json").write_text(json.dumps({**result, "party": "hospital-a"}))
    with pytest.raises(FedVLError, match="are at the client"):
        write_images_page(RunFolder(folder.path), Silent())
