"""fedvl cite as a user meets it."""

import json

import pytest

from fedvl.config import resolve
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder


def run_of(folder, method):
    folder.mkdir(parents=True)
    RunFolder(folder).describe(resolve([{"method": {"name": method}}]))


def test_a_run_and_a_comparison_are_cited(call, tmp_path):
    for name in ("linear", "fedprox", "unrelated"):
        run_of(tmp_path / "cmp" / "runs" / name, "scaffold" if name == "unrelated" else name)
    found = call("cite", "cmp/runs/linear")
    assert found.exit_code == 0
    assert "@inproceedings{mcmahan2017fedavg," in found.stdout
    assert "@techreport{krizhevsky2009cifar," in found.stdout
    assert found.stdout.startswith("% fedvl-tiny was trained for FedVL")
    assert found.stdout.endswith("  license = {Apache-2.0}\n}\n")

    cell = {"measure": "accuracy", "mean": 50.0, "deviation": None, "n": 1, "best": False, "significant": False}
    cells = [{**cell, "row": name, "column": "iid", "runs": [name]} for name in ("linear", "fedprox")]
    summary = {"kind": "table", "rows": ["linear", "fedprox"], "columns": ["iid"], "cells": cells}
    (tmp_path / "cmp" / "comparison.json").write_text(json.dumps(summary))
    text = call("cite", "cmp").stdout
    for key in ("mcmahan2017fedavg", "li2020fedprox", "krizhevsky2009cifar", "fedvl"):
        assert text.count(f"{{{key},") == 1, key
    assert "scaffold" not in text  # a run that no cell has


def test_a_folder_without_a_run_is_named(call, tmp_path):
    with pytest.raises(FedVLError, match="There is no run in"):
        raise call("cite", str(tmp_path)).exception
