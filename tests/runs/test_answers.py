"""test.csv of a run, against its result."""

import csv
import math

import pytest
from helpers.finished import asked_rows, embedded_splits

from fedvl.runs.answers import ANSWER_COLUMNS
from fedvl.runs.folder import RunFolder


@pytest.mark.parametrize("name", ["linear", "fedpp"])
def test_the_table_has_every_test_image_most_unsure_first(folder_of, name):
    folder = RunFolder(folder_of(name))
    with open(folder.path / "test.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == ANSWER_COLUMNS
    result = folder.result
    assert len(rows) == sum(sum(counts) for counts in result.confusion)
    right = sum(row["truth"] == row["prediction"] for row in rows)
    assert right == sum(result.confusion[c][c] for c in range(10))
    entropies = [float(row["entropy"]) for row in rows]
    assert entropies == sorted(entropies, reverse=True)
    assert all(0 <= entropy <= math.log(10) + 1e-3 for entropy in entropies)
    assert all(0.1 <= float(row["share"]) <= 1 for row in rows)
    test = embedded_splits()["test"]
    known = {test.describe(row): result.class_names[test.labels[row]] for row in asked_rows(result)}
    assert {row["file"]: row["truth"] for row in rows} == known
