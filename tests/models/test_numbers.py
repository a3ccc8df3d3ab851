"""Configurations of models that nobody can run: each is refused when the folder is loaded, by its key and value."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedvl.errors import FedVLError
from fedvl.models import numbers
from fedvl.models.checkpoint import EMBEDDED_FOLDER, load_model

HUGE, INFINITE = 2**31, float("inf")
CONFIG, IMAGES, TEXTS = "config.json", "preprocessor_config.json", "tokenizer_config.json"
CASES: list[tuple[str, str, Any]] = [
    *((CONFIG, "vision_config.num_attention_heads", value) for value in (-1, 0, HUGE, 3, 1.5, True, "4", None)),
    *((CONFIG, "text_config.num_attention_heads", value) for value in (-1, 0, HUGE)),
    *((CONFIG, "vision_config.layer_norm_eps", value) for value in (0, -1e-5, INFINITE, float("nan"), "x")),
    *((IMAGES, "image_std", value) for value in ([0, 0, 0], [1, 1, -1], [1, 1], [1, 1, float("nan")], 0, "abc")),
    *((IMAGES, "image_mean", value) for value in ([INFINITE] * 3, [1e300] * 3, [0.5] * 4, None)),
    *((IMAGES, "size", value) for value in (HUGE, -1, 0, {"shortest_edge": -64}, {"shortest_edge": HUGE}, "x", [64])),
    *((IMAGES, "crop_size", value) for value in (HUGE, -64, 0, {"height": -1, "width": 64}, 65, 1)),
    *((TEXTS, "model_max_length", value) for value in (-5, 0.5, INFINITE, "many")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = shutil.copytree(EMBEDDED_FOLDER / "fedvl-tiny", tmp_path_factory.mktemp("models") / "model")
    for file in ("tokenizer.json", TEXTS):
        shutil.copy(EMBEDDED_FOLDER / file, place)
    return place


@pytest.mark.parametrize(("file", "key", "value"), CASES)
def test_a_number_that_no_model_has_is_refused_by_its_key(folder: Path, file: str, key: str, value: Any) -> None:
    before = (folder / file).read_bytes()
    content = json.loads(before)
    section, _, last = key.rpartition(".")
    (content[section] if section else content)[last] = value
    (folder / file).write_text(json.dumps(content))
    try:
        with pytest.raises(
            FedVLError, match=rf"^The model's {last} is .*, but it must be .*: fetch the model again\.$"
        ) as refusal:
            load_model(str(folder))
    finally:
        (folder / file).write_bytes(before)
    assert len(str(refusal.value)) < 400


def test_numbers_that_models_have(folder: Path) -> None:
    assert load_model(str(folder)).preprocessing.crop == 64
    assert numbers.heads({}, 768) == 12
    assert numbers.heads({}, 32) == 1
    assert numbers.heads({"num_attention_heads": 8}, 512) == 8
    assert numbers.side({"size": {"height": 224, "width": 224}}, "size", 64) == 224
    assert numbers.side({"size": None}, "size", 64) == 64
    assert numbers.colour_numbers({"image_mean": [0, 1, 0.5]}, "image_mean", (), positive=False) == (0.0, 1.0, 0.5)
    assert numbers.real(1e-12, "layer_norm_eps", 0.0, 1.0) == 1e-12
