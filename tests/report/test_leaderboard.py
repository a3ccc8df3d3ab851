"""A leaderboard: rows in order of their means, and everything of a stranger is escaped."""

import csv
import json
from typing import Any

from fedvl.report.leaderboard import Entry, Rejected, leaderboard_of, write_leaderboard

ROW: dict[str, Any] = {
    "row": "linear",
    "column": "iid",
    "measure": "accuracy",
    "mean": 70.0,
    "deviation": 1.25,
    "n": 3,
    "images": 1000,
    "data": "cifar10-mini, fedvl-tiny, closed",
    "verdict": "same bits",
    "executed": 3,
    "of": 9,
    "checked": True,
    "pack": "a.zip",
    "sha256": "0" * 64,
}


def test_rows_are_ordered_by_mean_within_a_column_of_the_same_data(tmp_path):
    rows = [
        Entry(**ROW),
        Entry(**ROW | {"row": "mine", "mean": 75.0, "deviation": None, "checked": False}),
        Entry(**ROW | {"row": "other", "column": "dirichlet", "mean": 10.0}),
        Entry(**ROW | {"row": "elsewhere", "data": "a set", "mean": 1.0}),
    ]
    path = write_leaderboard(leaderboard_of(rows, [Rejected(pack="b.zip", reason="right differs")]), tmp_path)
    order = ["elsewhere", "other", "mine", "linear"]
    assert [row["row"] for row in csv.DictReader((tmp_path / "leaderboard.csv").open())] == order
    assert [row["row"] for row in json.loads((tmp_path / "leaderboard.json").read_text())["entries"]] == order
    page = path.read_text()
    assert page.count("<h2>") == 3
    for said in (
        "70.0 ± 1.2",
        "<td>75.0</td>",
        "same bits, 3 of 9 runs, data checked",
        "data as sent",
        "b.zip: right differs",
    ):
        assert said in page


def test_names_and_reasons_of_a_stranger_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    rows = [Entry(**ROW | {"row": evil, "column": evil, "data": evil, "pack": evil})]
    table = leaderboard_of(rows, [Rejected(pack=evil, reason=evil)])
    assert "<script>" not in write_leaderboard(table, tmp_path).read_text()
    formula = leaderboard_of([Entry(**ROW | {"row": "=1+1"})], [])
    write_leaderboard(formula, tmp_path)
    assert "'=1+1" in (tmp_path / "leaderboard.csv").read_text()
