"""fedvl methods: the list, one method, and its checks."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import planted
from safetensors.torch import save_file

from fedvl.data.check import DataCheck
from fedvl.methods import method_names
from fedvl.runs.method_checks import CHECKS

FORGETS_THE_MASK = """import torch
from fedvl.methods.base import Method

class Mine(Method):
    def start(self, generator):
        return {"weight": self.task.text_features.clone()}

    def predict(self, tensors, inputs):
        return self.scale * inputs["features"] @ tensors["weight"].T

    def loss(self, tensors, batch):
        return torch.nn.functional.cross_entropy(self.predict(tensors, batch.inputs), batch.labels)
"""


def test_without_a_name_all_methods_are_listed(call: Any) -> None:
    done = call("methods")
    assert done.exit_code == 0
    assert set(method_names()) <= set(done.stdout.split())


@pytest.mark.parametrize("words", [["fedprox"], ["show", "fedprox"]])
def test_a_name_shows_the_method(words: list[str], call: Any) -> None:
    done = call("methods", *words)
    assert done.exit_code == 0
    assert "method.mu" in done.stdout


def test_a_broken_file_fails_with_one_line_per_check(call: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FORGETS_THE_MASK, encoding="utf-8")
    done = call("methods", "check", "./mine.py")
    assert done.exit_code == 2
    lines = done.stdout.splitlines()
    assert len(lines) == len(CHECKS)
    assert next(line for line in lines if line.startswith("fail")).split("  ")[-1].endswith("every sum and mean.")
    found = json.loads(call("methods", "check", "./mine.py", "--json").stdout)
    assert found["method"] == "./mine.py"
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert list(outcomes) == list(CHECKS)
    assert [name for name, outcome in outcomes.items() if outcome == "fail"] == ["batched = one by one"]


def test_a_sound_method_exits_with_0(call: Any) -> None:
    assert call("methods", "check", "linear").exit_code == 0


def test_a_check_of_images_fails_on_a_fault_and_passes_without(call: Any, tmp_path: Path) -> None:
    planted.write_sites(tmp_path, ("site",))
    done = call("data", "check", "site", "--model", "none", "--quiet")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-2:] == ["No fault was found.", "The page: site-check.html"]
    planted.unreadable(tmp_path / "site")
    done = call("data", "check", "site", "--model", "none", "--json", "--quiet", "--out", "page.html")
    assert done.exit_code == 1
    (fault,) = DataCheck.model_validate_json(done.stdout).faults
    assert fault.kind == "unreadable"
    assert fault.files[0] in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("classes", "told"), [([], "no class texts"), (["cat", "dog"], "2 class texts")])
def test_imported_vectors_are_counted(
    classes: list[str], told: str, call: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FEDVL_CACHE", str(tmp_path / "cache"))
    images = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
    about = {"name": "mine", "sha256": "ab" * 32, "normalised": False, "images": images, "classes": classes}
    (tmp_path / "about.json").write_text(json.dumps(about))
    vectors = {"images": torch.ones(3, 4)} | ({"texts": torch.ones(len(classes), 4)} if classes else {})
    save_file(vectors, tmp_path / "vectors.safetensors")
    done = call("features", "import", "vectors.safetensors", "--manifest", "about.json")
    assert done.stdout == f"3 images and {told} of 4 numbers each; use --model mine.\n"
