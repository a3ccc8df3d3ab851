"""Forty mistakes that people make at the command line: each is answered by one sentence that says what to do."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.finished import RUNS, finish
from PIL import Image
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.errors import FedVLError

# The command, and the words of its answer that help.
MISTAKES = {
    # names that are nearly right
    "run --method fedporx": "did you mean 'fedprox'?",
    "run --method ./absent.py": "There is no method file absent.py; check the path",
    "run --dataset cifar10-min": "did you mean cifar10-mini",
    "run --model clip": "give fedvl-tiny, fedvl-tiny-vilt, a folder, a .safetensors file, a hub name (owner/model)",
    "run --preset published": "it has paper",
    "run --protocol close": "it must be 'closed', 'open', 'personal', 'missing', 'base-to-new' or 'leave-one-domain-out'",
    "run --robust krum": "'multi-krum'",
    "run --device gpu": "it must be auto, cpu, cuda or cuda:NUMBER",
    "compare --methods linear,fedporx": "did you mean 'fedprox'?",
    "reproduce fst-cbdg/table9": "fedvl reproduce --list shows all",
    "data show cifar": "did you mean cifar10 or cifar100?",
    "methods liner": "did you mean 'linear'?",
    # settings by other names, of other kinds, out of range
    "run --set training.lr=0.1": "did you mean 'training.learning_rate'?",
    "run --set lr=0.1": "did you mean 'training.learning_rate'?",
    "run --set method.epochs=5": "did you mean 'training.local_epochs'?",
    "run --set rounds=5": "did you mean 'federation.rounds'?",
    "run --set training.optimizer=adam": "did you mean 'training.optimiser'?",
    "run --set training.learning_rate": "--set takes SECTION.KEY=VALUE, for example --set training.learning_rate=0.1",
    "run --set training.learning_rate=fast": "it must be a valid number",
    "run --set model=fedvl-tiny": "'model' is a section; name one of its settings: model.name",
    "run --rounds -1": "'federation.rounds' is -1, but it must be greater than or equal to 0",
    "run --partition dirichlet": "for example dirichlet:0.3",
    "run --privacy client": "for example client:eps=3",
    "run --per-round 50 --clients 10": "lower --per-round, or raise --clients",
    "run --clients 5000": "5000",
    # things that do not go together
    "run --protocol open": "use --protocol closed, or fed-mp or fedclip",
    "run --method fed-prime --model fedvl-tiny": "use --model fedvl-tiny-vilt",
    "run --missing text:0.5": "use fed-prime or fedavg-p",
    "run --secure-sum --clients 2": "federation.least_clients is 3",
    "run --set training.learning_rate=1e6 --shots 5": "Training diverged in round 1: .*; lower the learning rate",
    # images
    "run --dataset nowhere": "no dataset, folder or file 'nowhere'",
    "run photos": "to use a folder of images, say --dataset photos",
    "run --dataset photos/cat": "make one sub-folder for each class, or name the classes (--classes cat,dog)",
    "run --dataset phone": 'has no images that FedVL reads (2 HEIC); pip install "pillow-heif>=1.1" for HEIC, or save',
    "run --dataset album": "has only one class, 'cat'; at least two classes are needed",
    "run --dataset photos --classes cat,unicorn": "'photos' has no class 'unicorn'; it has 'cat', 'dog'",
    "run --dataset photos/cat --classes cat,dog": "use fst-cbdg or fedpp",
    # runs
    "report nowhere": "There is no run in nowhere; give the folder of one, such as runs/NAME",
    "predict nowhere photos": "There is no run in nowhere; give the folder of one, such as runs/NAME",
    "resume nowhere": "There is no run in nowhere; start one with fedvl run --out nowhere",
    "export stopped out": "The run in stopped is not finished; go on with it by fedvl resume stopped",
    "run --out done": "done exists already; go on with it by fedvl resume done, or choose another --out",
    "predict done nowhere": "There is no",
    "predict done photos --classes cat,zebra": "knows only the classes that it was trained on (airplane,",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, an album of one class, a phone's pictures, a finished and a stopped run."""
    root, noise = tmp_path_factory.mktemp("mistakes"), random.Random(0)
    for name in ("photos/cat", "photos/dog", "album/cat", "phone/cat"):
        (root / name).mkdir(parents=True)
        for index in range(12 if "phone" not in name else 0):
            Image.frombytes("RGB", (8, 8), noise.randbytes(192)).save(root / name / f"{index}.png")
    for name in ("one.HEIC", "two.heic"):
        (root / "phone" / "cat" / name).write_bytes(b"ftypheic")
    finish(root / "done", RUNS["linear"])
    shutil.copytree(root / "done", root / "stopped")
    (root / "stopped" / "result.json").unlink()
    return root


def files(place: Path) -> list[str]:
    """What lies there; an empty folder of runs is no run."""
    return sorted(str(path) for path in place.rglob("*") if path.name != "runs")


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_by_one_helpful_sentence(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, without_heic: None
) -> None:
    monkeypatch.chdir(place)
    before = files(place)
    answer: Any = CliRunner().invoke(app, command.split()).exception
    assert isinstance(answer, FedVLError), answer
    sentence = str(answer)
    expected = MISTAKES[command].split(".*")
    assert all(words in sentence for words in expected), sentence
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    assert len(sentence) < 400
    assert files(place) == before


def test_they_are_forty() -> None:
    assert len(MISTAKES) >= 40
