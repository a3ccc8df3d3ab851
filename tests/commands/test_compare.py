"""fedvl compare and fedvl reproduce as a user meets them."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.grids import make_grid

from fedvl.commands.compare import show
from fedvl.comparisons.contents import Comparison
from fedvl.comparisons.grid import RECIPES
from fedvl.errors import FedVLError
from fedvl.runs.folder import RunFolder

BROKEN = """from fedvl.methods.base import Method


class Broken(Method):
    def start(self, generator):
        return {"weight": self.task.text_features.clone()}

    def predict(self, tensors, inputs):
        raise ValueError("as intended")
"""
SMALL = ["--set", "federation.rounds=2", "--set", "data.shots=4", "--set", "data.clients=2", "--quiet"]


def test_compare_three_methods(call: Any, tmp_path: Path) -> None:
    words = ["compare", "--methods", "linear,fst-cbdg,zero-shot", "--partition", "iid,shards:5", "--seeds", "1", *SMALL]
    done = call(*words)
    assert done.exit_code == 0, done.output
    assert all(word in done.output for word in ("fst-cbdg", "shards:5", "n = 1 seed."))
    out = tmp_path / "comparisons" / "comparison"
    summary = json.loads((out / "comparison.json").read_bytes())
    assert summary["rows"] == ["linear", "fst-cbdg", "zero-shot", "ridge"]
    assert len(summary["cells"]) == 8
    assert summary["command"] == "fedvl " + " ".join(words)
    for cell in summary["cells"]:
        (name,) = cell["runs"]
        assert json.loads((out / "runs" / name / "result.json").read_bytes())["accuracy"] == cell["mean"]


def test_compare_a_file_of_rows_and_columns(call: Any, tmp_path: Path) -> None:
    grid = '[base]\ndata = { clients = 2, shots = 4, partition = "iid" }\n[rows.plain]\n[rows.steep]\n'
    (tmp_path / "grid.toml").write_text(grid + "training = { learning_rate = 0.1 }\n")
    assert call("compare", "grid.toml", "--seeds", "1", "--out", "out", "--no-references", *SMALL).exit_code == 0
    summary = json.loads((tmp_path / "out" / "comparison.json").read_bytes())
    assert summary["rows"] == ["plain", "steep"]


def test_a_failed_run_is_told_of_and_the_command_fails(call: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    done = call(
        "compare", "--methods", "zero-shot,./broken.py", "--no-references", "--seeds", "1", "--out", "out", *SMALL
    )
    assert done.exit_code == 1
    assert "Failed: " in done.output
    assert "broken" in done.output
    assert len(json.loads((tmp_path / "out" / "comparison.json").read_bytes())["cells"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--methods", "zero-shot,linear"],
        ["sweep", "--method", "linear", "--set", "training.learning_rate=0.01,0.1"],
    ],
)
def test_ctrl_c_says_how_to_go_on(words: list[str], call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: RunFolder, record: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "append_round", interrupted)
    stopped = call(*words, *(SMALL if words[0] == "compare" else ["--quiet"]))
    assert stopped.exit_code == 130
    assert stopped.stderr == "Stopped; finished runs are kept: go on with the same command.\n"


def test_compare_wants_methods_or_a_file(call: Any) -> None:
    with pytest.raises(FedVLError, match="Name the methods"):
        raise call("compare").exception


def test_the_list_shows_every_recipe(call: Any) -> None:
    done = call("reproduce", "--list")
    shown = [line.split(" ")[0] for line in done.output.splitlines() if "/" in line.split(" ")[0]]
    assert len(shown) > 30
    assert shown == sorted(f"{file.parent.name}/{file.stem}" for file in RECIPES.glob("*/*.toml"))


def test_reproduce_on_the_embedded_model_sets_ours_beside_the_papers(call: Any, tmp_path: Path) -> None:
    done = call("reproduce", "fst-cbdg/table4", "--on", "embedded", "--quick", "--quiet")
    assert done.exit_code == 0, done.output
    assert "Embedded model and data, not the paper's." in done.output
    assert "paper 74.0" in done.output
    result = json.loads(
        (tmp_path / "reproductions" / "embedded-quick" / "fst-cbdg" / "table4" / "comparison.json").read_bytes()
    )
    assert (result["recipe"], result["kind"]) == ("fst-cbdg/table4", "table")
    cell = next(cell for cell in result["cells"] if cell["row"] == "Balanced sampling")
    assert cell["paper"] == 74.0
    assert cell["difference"] == pytest.approx(cell["ours"] - 74.0)


def test_reproduce_says_what_to_fetch(call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDVL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FedVLError) as told:
        raise call("reproduce", "fst-cbdg/table1").exception
    for part in ("hf download timm/resnet50_clip.openai", "fedvl data get cifar10", str(tmp_path / "data" / "cinic10")):
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [(["fst-cbdg/table9"], "There is no recipe"), (["all", "--on", "moon"], "--on is paper or embedded")],
)
def test_wrong_words_are_told(words: list[str], told: str, call: Any) -> None:
    with pytest.raises(FedVLError, match=told):
        raise call("reproduce", *words).exception


@pytest.mark.parametrize(("recipe", "source"), [("paper/table1", "The paper: "), ("own/strengths", "")])
def test_findings_are_printed_below_what_the_paper_shows(recipe: str, source: str, capsys: Any) -> None:
    summary = make_grid(recipe=recipe, shows="Ours is ahead.", findings=["Ours is behind.", "It is close."])
    show(Comparison.model_validate(summary), Path("out/report.html"), stop=False)
    shown = capsys.readouterr().out
    assert f"{source}Ours is ahead.\nThis table: Ours is behind. It is close.\n" in shown
    show(Comparison.model_validate(summary | {"findings": []}), Path("out/report.html"), stop=False)
    assert "Ours is ahead" not in capsys.readouterr().out
