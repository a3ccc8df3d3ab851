"""Walk the rows of the README as a new user would: literally, in order, in a fresh folder; the first that fails ends it."""

import re
import shlex
from pathlib import Path

import pytest
from helpers.finished import png
from typer.testing import CliRunner

from fedvl.cli import app
from fedvl.data.sources import open_dataset

ROOT = Path(__file__).parents[2]
# Rows that are not run here as written, and why; the words that are added make a small run of them where that is possible.
SMALL = "--rounds 1 --shots 2 --clients 2 --partition iid --set data.test_shots=2 --set training.local_epochs=1 --quiet"
SLOW = {
    "fedvl run --method fedpp --set method.visual_prompts=false": SMALL,
    "fedvl run --method fed-prime": SMALL,
    "fedvl compare --methods linear,fst-cbdg,zero-shot": "--seeds 1 --set federation.rounds=1 --set data.shots=5 --quiet",
}
ELSEWHERE = {
    "fedvl run --model openai/clip-vit-base-patch32": "downloads a model",
    "fedvl reproduce fst-cbdg/table2 --on embedded": "takes long; tests/comparisons/test_reproduce.py runs recipes",
    "fedvl serve runs/linear-photos": "does not end; tests/commands/test_serve.py starts it",
    "fedvl --install-completion": "changes the shell of whoever runs the tests",
}
# What a row says that it does: a file that is there afterwards, or words that it prints.
DOES = {
    "fedvl run": "runs/linear-cifar10-mini/report.html",
    "fedvl run --dataset photos/": "runs/linear-photos/report.html",
    "fedvl report runs/linear-cifar10-mini runs/linear-photos": "compare.html",
    "fedvl predict runs/linear-photos photos/": "photos/cat/0.png",
    "fedvl run --method fed-mp --protocol open --clients 2": "runs/fed-mp-cifar10-mini/report.html",
    'fedvl predict runs/fed-mp-cifar10-mini --classes "cat,dog" photos/': "photos/dog/0.png",
    "fedvl run --method fst-cbdg --partition dirichlet:0.1": "runs/fst-cbdg-cifar10-mini/report.html",
    "fedvl run --method fed-em": "runs/fed-em-cifar10-mini/report.html",
    "fedvl run --method ridge": "runs/ridge-cifar10-mini/report.html",
    "fedvl export runs/linear-photos exported": "exported/classifier.safetensors",
    "fedvl withdraw runs/linear-cifar10-mini 3": "runs/linear-cifar10-mini-without-3/report.html",
    "fedvl compare --methods linear,fst-cbdg,zero-shot": "comparisons/comparison/report.html",
    "fedvl run --method fedpp --set method.visual_prompts=false": "runs/fedpp-cifar10-mini/report.html",
    "fedvl run --method fed-prime": "runs/fed-prime-emoji-mini/report.html",
    "fedvl reproduce --list": "fst-cbdg/table2",
    "fedvl run --method ./mine.py": "runs/mine-cifar10-mini/report.html",
    "fedvl methods": "fst-cbdg",
    "fedvl data list": "emoji-mini",
    "fedvl run --set training.learning_rate=0.1": "runs/linear-cifar10-mini-2/report.html",
    "fedvl resume runs/linear-cifar10-mini": "73.30 %",
}
# Examples that are run as written and must end above zero-shot.
GAINS = {
    "fedvl run",
    "fedvl run --method fed-mp --protocol open --clients 2",
    "fedvl run --method fst-cbdg --partition dirichlet:0.1",
    "fedvl run --method ./mine.py",
}


def rows() -> list[str]:
    """The commands of the table, in order; the first run of the page goes before them."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("| you want to | do |")[1].split("\n\n")[0]
    return ["fedvl run", *re.findall(r"`(fedvl [^`]*)`", table)]


def lay_out(place: Path) -> None:
    """What the page takes for granted: a folder of photos, and the method of docs/add-a-method.md."""
    labels = open_dataset("cifar10-mini").splits["test"].labels
    names = open_dataset("cifar10-mini").class_names
    for name in ("cat", "dog", "ship"):
        (place / "photos" / name).mkdir(parents=True)
        for number, row in enumerate([row for row, label in enumerate(labels) if names[label] == name][:20]):
            (place / "photos" / name / f"{number}.png").write_bytes(png(row))
    page = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
    code = re.search(r"Write this as `mine.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    (place / "mine.py").write_text(code[1])


@pytest.mark.slow
def test_every_row_of_the_readme_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    lay_out(tmp_path)
    for command in rows():
        if command in ELSEWHERE:
            continue
        assert command in DOES, f"the README has a new row, {command}: say above what it does"
        words = shlex.split(f"{command} {SLOW.get(command, '')}")[1:]
        monkeypatch.setattr("sys.argv", ["fedvl", *words])
        done = CliRunner().invoke(app, words)
        assert done.exception is None, f"{command}: {done.exception}"
        does = DOES[command]
        assert (tmp_path / does).is_file() or does in done.stdout, f"{command} gives no {does}"
        if command in GAINS:
            gained = re.search(r"Difference +│ +(\S+) points", done.stdout)
            assert gained, done.stdout
            assert gained[1].startswith("+"), f"{command} ends below zero-shot: {gained[1]}"


def test_every_row_that_is_not_walked_is_in_the_readme() -> None:
    assert {*ELSEWHERE, *SLOW, *DOES} == set(rows())
