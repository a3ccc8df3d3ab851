"""The command line as a user meets it: real processes, wrong input, crashes.

What would load a second or two and compute for less is done in forked children.
"""

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import typer
from helpers.forked import in_child
from PIL import Image
from typer.testing import CliRunner

from fedvl.cli import app, main

SMALL = ["--rounds", "2", "--quiet"]


class Command:
    """fedvl in an empty folder with its own cache; nothing may reach the network."""

    def __init__(self, place):
        self.work = place / "work"
        self.work.mkdir()
        self.environment = {
            **os.environ,
            "FEDVL_CACHE": str(place / "cache"),
            "FEDVL_DATA": str(place / "data"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, *arguments, **options):
        command = [sys.executable, "-m", "fedvl.cli", *map(str, arguments)]
        return subprocess.run(
            command, cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=240, **options
        )

    def forked(self, *arguments):
        """The same in a process that need not load everything again."""
        return in_child(self.work, *arguments, prepare=self._settle)

    def _settle(self):
        from huggingface_hub import constants

        os.environ.update(self.environment)
        constants.HF_HUB_OFFLINE = True  # it may have been loaded before


@pytest.fixture
def fedvl(tmp_path):
    return Command(tmp_path)


def photos(folder, classes=("cat", "dog"), count=12):
    """A folder of class folders with noise images."""
    generator = random.Random(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.frombytes("RGB", (20, 20), generator.randbytes(1200)).save(folder / name / f"{index}.png")
    return folder


def test_help_is_light(fedvl):
    heavy = ("torch", "numpy", "sklearn", "PIL")
    code = f"import sys; import fedvl.cli; print([name for name in {heavy} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
    helped = fedvl("--help")
    assert helped.returncode == 0
    assert all(command in helped.stdout for command in ("run", "resume", "methods", "models", "data", "doctor"))
    assert "--partition" in fedvl("run", "--help").stdout


def commands():
    """Every command with the words that call it."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        inner = getattr(command, "commands", {})
        waiting += [((*words, name), each) for name, each in inner.items()]
        if not inner:
            yield words, command


def test_help_says_what_every_argument_is_and_examples_fit_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    for words, command in commands():
        shown = CliRunner().invoke(app, [*words, "--help"]).output
        for parameter in command.params:
            assert parameter.help, f"{parameter.name} of {words}"
            assert parameter.help.split(";")[0].rstrip(".") in shown
        assert all(len(line.strip()) <= 78 for line in (command.epilog or "").splitlines())


def test_version_and_lists(fedvl):
    from fedvl import __version__

    assert fedvl("--version").stdout.strip() == __version__
    assert "fedprox" in fedvl("methods").stdout
    assert "method.mu" in fedvl.forked("methods", "fedprox").out
    assert "fedvl-tiny" in fedvl.forked("models").out
    assert "cifar10-mini" in fedvl.forked("data", "list").out
    shown = fedvl.forked("data", "show", "cifar10-mini").out
    assert "airplane" in shown
    assert "2000" in shown


def test_doctor_finds_nothing_wrong(fedvl):
    done = fedvl("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bad" not in done.stdout


def test_bare_run_prints_json_and_leaves_the_files_of_a_run(fedvl):
    done = fedvl("run", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    promised = {
        *("schema", "fedvl_version", "method", "preset", "dataset", "model", "partition", "clients", "rounds", "seed"),
        *("protocol", "accuracy", "zero_shot_accuracy", "macro_precision", "macro_recall", "macro_f1", "per_round"),
        *("trainable_parameters", "bytes_up_per_client_round", "bytes_down_per_client_round", "local_flops", "seconds"),
        *("refused_updates", "state_sha256"),
    }
    assert promised <= result.keys()
    assert result["accuracy"] > result["zero_shot_accuracy"] + 5
    assert result["trainable_parameters"] == 2570
    assert result["bytes_up_per_client_round"] == result["bytes_down_per_client_round"] == 4 * 2570
    folder = fedvl.work / "runs" / "linear-cifar10-mini"
    assert json.loads((folder / "result.json").read_text()) == result
    for name in ("config.toml", "model.safetensors", "report.html", "metrics.jsonl"):
        assert (folder / name).stat().st_size
    again = json.loads(fedvl("run", folder / "config.toml", "--json", "--quiet").stdout)
    assert again["state_sha256"] == result["state_sha256"]
    assert (fedvl.work / "runs" / "linear-cifar10-mini-2").is_dir()


def test_table_for_people(fedvl):
    done = fedvl.forked("run", "--method", "zero-shot")
    assert done.code == 0, done.error
    assert "Zero-shot accuracy" in done.out
    assert "report.html" in done.out


def test_own_folder_of_images(fedvl):
    photos(fedvl.work / "photos")
    done = fedvl.forked("run", "--dataset", "photos", "--clients", 3, "--partition", "iid", "--json", *SMALL)
    assert done.code == 0, done.error
    result = done.result
    assert result["class_names"] == ["cat", "dog"]
    assert sum(map(sum, result["partition_counts"])) + sum(map(sum, result["confusion"])) == 24


def wrong_inputs():
    """Arguments, and words that the one sentence must hold."""
    yield ["run", "--method", "fedporx"], "did you mean 'fedprox'"
    yield ["run", "--dataset", "no-such-set"], "no-such-set"
    yield ["run", "--dataset", "nowhere/photos"], "nowhere/photos"
    yield ["run", "--dataset", "empty-class"], "add images"
    yield ["run", "bad.toml"], "training.learning_rte"
    yield ["run", "broken.toml"], "not valid TOML"
    yield ["run", "missing.toml"], "missing.toml"
    yield ["run", "--partition", "dirichlet:0"], "dirichlet:0"
    yield ["run", "--partition", "alphabetical"], "alphabetical"
    yield ["run", "--clients", "5000"], "5000"
    yield ["run", "--clients", "0"], "data.clients"
    yield ["run", "--model", "no-such-model"], "no-such-model"
    yield ["run", "--model", "photos"], "photos"
    yield ["run", "--device", "quantum"], "quantum"
    yield ["run", "--set", "training.learning_rate"], "--set takes"
    yield ["run", "--set", "training.learning_rate=fast"], "training.learning_rate"
    yield ["run", "--set", "method.mu=1"], "method.mu"
    yield ["run", "--preset", "released"], "released"
    yield ["run", "--set", "data.labels=cpl"], "candidates"
    yield ["run", "--shots", "0"], "data.shots"
    yield ["run", "--partition", "disjoint", "--clients", "11"], "11"
    yield ["run", "--set", "federation.quorum=11"], "quorum"
    yield ["run", "--out", "taken"], "taken"
    yield ["resume", "nothing"], "nothing"
    yield ["data", "show", "imagenet"], "imagenet"
    yield ["data", "get", "imagenet"], "ImageNet"
    yield ["methods", "fedporx"], "fedprox"


@pytest.mark.parametrize(
    "arguments, words", list(wrong_inputs()), ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_wrong_input_gives_one_sentence_and_leaves_no_run(fedvl, arguments, words):
    work = fedvl.work
    photos(work / "photos", count=2)
    photos(work / "empty-class", count=2)
    (work / "empty-class" / "bird").mkdir()
    (work / "bad.toml").write_text("[training]\nlearning_rte = 1\n")
    (work / "broken.toml").write_text("[training\n")
    (work / "taken").mkdir()
    (work / "taken" / "mine.txt").write_text("mine")
    before = sorted(str(path) for path in work.rglob("*"))
    done = fedvl.forked(*arguments)
    assert done.code == 2, done.out + done.error
    assert "Traceback" not in done.error
    lines = done.error.strip().splitlines()
    assert len(lines) == 1, done.error
    assert words in lines[0]
    assert sorted(str(path) for path in work.rglob("*") if path.name != "runs") == before


def test_a_damaged_cache_is_noticed_and_made_again(fedvl):
    photos(fedvl.work / "photos")
    arguments = ["run", "--dataset", "photos", "--clients", 2, "--partition", "iid", "--json", *SMALL]
    first = fedvl.forked(*arguments).result
    caches = list((fedvl.work.parent / "cache").rglob("*.rows"))
    assert caches
    for path in caches:
        content = bytearray(path.read_bytes())
        content[-20] ^= 64
        path.write_bytes(content)
    second = fedvl.forked(*arguments).result
    assert second["state_sha256"] == first["state_sha256"]
    assert any("damaged" in note or "computed again" in note for note in second["notes"])


def test_ctrl_c_says_how_to_go_on_and_exits_as_shells_expect(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("fedvl.cli.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert "fedvl resume" in capsys.readouterr().err
