"""fedvl run as a user types it, in this process."""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image


def draw(folder: Path, count: int, seed: int = 0) -> None:
    """Write images of noise."""
    noise = random.Random(seed)
    folder.mkdir(parents=True)
    for index in range(count):
        Image.frombytes("RGB", (8, 8), noise.randbytes(192)).save(folder / f"{index}.png")


def test_a_folder_without_labels_is_trained_on_and_queried(call: Any, tmp_path: Path) -> None:
    draw(tmp_path / "scans", 12)
    words = ("run", "--dataset", "scans", "--classes", "well,ill", "--method", "fst-cbdg", "--partition", "iid")
    done = call(*words, "--clients", "2", "--rounds", "1", "--quiet", "--json")
    assert done.exception is None, done.exception
    result = json.loads(done.stdout)
    assert result["accuracy"] is result["zero_shot_accuracy"] is None
    assert result["per_round"] == []
    assert result["class_names"] == ["well", "ill"]
    assert '--set \'data.classes=["well", "ill"]\'' in result["command"]
    asked = json.loads(call("predict", "runs/fst-cbdg-scans", "scans", "--json").stdout)
    assert {each["name"] for line in asked for each in line["ranked"]} == {"well", "ill"}
    assert "no accuracy is measured" in (tmp_path / "runs/fst-cbdg-scans/report.html").read_text()
