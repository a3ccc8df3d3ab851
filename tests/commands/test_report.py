"""fedvl report, as it is typed."""

import json
import subprocess
import sys

import pytest
from helpers.grids import make_grid

from fedvl.errors import FedVLError
from fedvl.report.page import write_report


def run_folder(folder, **more):
    folder.mkdir()
    result = {"method": "linear", "accuracy": 60.0, "per_round": [55.0, 60.0], **more}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def fedvl(cwd, *arguments):
    command = [sys.executable, "-m", "fedvl.cli", "report", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_one_run_gets_its_page_again_and_several_get_one_together(tmp_path):
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two")
    (one / "report.html").write_text("old")
    done = fedvl(tmp_path, "one")
    assert (done.returncode, done.stdout.strip()) == (0, "Report: one/report.html")
    assert "60.00 %" in (one / "report.html").read_text(encoding="utf-8")
    done = fedvl(tmp_path, one, two, "--out", "both.html")
    first, second = done.stdout.splitlines()
    assert first == "two against one: other test images, or not recorded: no paired test."
    assert second == "Report: both.html"
    assert "2 runs side by side" in (tmp_path / "both.html").read_text(encoding="utf-8")


def test_wrong_input_is_one_sentence(tmp_path):
    run_folder(tmp_path / "one")
    for arguments, says in (
        (["one", "--out", "x.html"], "--out is for several runs"),
        (["one", "nothing"], "There is no run in nothing"),
    ):
        done = fedvl(tmp_path, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("Error: ")
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]


def test_a_grid_beside_runs_is_told_apart(tmp_path):
    run_folder(tmp_path / "one")
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "comparison.json").write_text(json.dumps(make_grid()))
    assert "A table" in write_report(tmp_path / "grid").read_text(encoding="utf-8")
    done = fedvl(tmp_path, "one", "grid")
    assert done.returncode == 2
    with pytest.raises(FedVLError, match="no run in"):
        write_report(tmp_path)


def test_a_page_needs_no_torch(tmp_path):
    run_folder(tmp_path / "one")
    code = (
        "import sys; from pathlib import Path; from fedvl.commands.report import report; "
        "report([Path('one')]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Report:", "one/report.html", "False"]
