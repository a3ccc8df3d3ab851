"""A sender of folders: run folders, data and models that want to read, write, run or fill what is not theirs.

Every case ends in one sentence or, where the damage does not matter, well. Nothing is run, nothing is written outside the
folder, and inside it only what the command promises. Tarballs are in tests/data/test_fetch.py, images in
tests/data/test_images.py, vectors in tests/data/test_imported.py.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.bad_updates import Canary
from helpers.contents import record_of
from helpers.finished import finish, png
from safetensors.torch import load as parse
from safetensors.torch import save as serialise

import fedvl
import fedvl.cli
import fedvl.runs.experiment
import fedvl.serve.export
import fedvl.serve.model
from fedvl.config import read_toml
from fedvl.data.images import BadImage, decode
from fedvl.data.sources import Opener, open_dataset, read_path
from fedvl.deployment import messages
from fedvl.errors import FedVLError
from fedvl.federation.journal import Journal, sealed
from fedvl.models.checkpoint import EMBEDDED_FOLDER, load_model
from fedvl.report.page import write_report
from fedvl.tensors import load

Damage = Callable[[Path], None]
photo = cache(png)
LONGEST = 30  # seconds after which a command hangs; the slowest here takes one

# --- run folders: what is done to one


def replaced(name: str, content: bytes | str) -> Damage:
    def do(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return do


def as_json(name: str, content: Any) -> Damage:
    return replaced(name, json.dumps(content))


def removed(name: str) -> Damage:
    return lambda run: (run / name).unlink()


def folder(name: str) -> Damage:
    def do(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return do


def pipe(name: str) -> Damage:
    def do(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return do


def link(name: str, target: str) -> Damage:
    def do(run: Path) -> None:
        if (run / name).is_dir():
            shutil.rmtree(run / name)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)

    return do


def endless(name: str) -> Damage:
    """A file of a terabyte that takes no space."""

    def do(run: Path) -> None:
        with open(run / name, "wb") as file:
            file.truncate(2**40)

    return do


def result(**changes: Any) -> Damage:
    def do(run: Path) -> None:
        found = json.loads((run / "result.json").read_bytes())
        (run / "result.json").write_text(json.dumps(found | changes))

    return do


def renamed(name: str) -> Damage:
    """Give all classes another name."""

    def do(run: Path) -> None:
        found = json.loads((run / "result.json").read_bytes())["class_names"]
        result(class_names=[name.format(number) for number in range(len(found))])(run)

    return do


def record(**changes: Any) -> Damage:
    def do(run: Path) -> None:
        found = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        (run / "metrics.jsonl").write_text(json.dumps(found | changes) + "\n")

    return do


def setting(key: str, value: str) -> Damage:
    """Set section.key in config.toml."""

    def do(run: Path) -> None:
        section, _, name = key.rpartition(".")
        lines, here = [], ""
        for line in (run / "config.toml").read_text().splitlines():
            here = line.strip("[]") if line.startswith("[") else here
            lines += [] if here == section and line.startswith(f"{name} =") else [line]
        place = lines.index(f"[{section}]") + 1 if section else 0
        (run / "config.toml").write_text("\n".join([*lines[:place], f"{name} = {value}", *lines[place:]]) + "\n")

    return do


def manifest(**changes: Any) -> Damage:
    """Change the manifest of a round, and seal it again."""

    def do(run: Path) -> None:
        found = json.loads((run / "journal/000001.json").read_bytes())
        del found["sha256"]
        found |= changes
        (run / "journal/000001.json").write_text(json.dumps({**found, "sha256": sealed(found)}))

    return do


def tensors(name: str, make: Callable[[bytes], bytes]) -> Damage:
    """Replace tensors by others, and the hash that was written of them."""

    def do(run: Path) -> None:
        content = make((run / name).read_bytes())
        (run / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        if name.startswith("journal"):
            manifest(tensors_sha256=sha256)(run)
        else:
            hashes = json.loads((run / "result.json").read_bytes())["files_sha256"]
            result(files_sha256={**hashes, name: sha256})(run)

    return do


def headed(header: dict[str, Any], data: bytes = b"") -> Callable[[bytes], bytes]:
    text = json.dumps(header).encode()
    return lambda content: struct.pack("<Q", len(text)) + text + data


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    return lambda content: serialise({name: change(tensor) for name, tensor in parse(content).items()})


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten()[:1].clone()


def comparison(**changes: Any) -> Damage:
    cell = {"row": "a", "column": "b", "measure": "accuracy", "mean": 1.0, "deviation": None, "n": 1}
    cell |= {"significant": False, "best": False}
    lists = {"rows": ["a"], "columns": ["b"], "cells": [cell], "series": [], "points": [], "failures": []}
    return as_json("comparison.json", {"title": "t", "kind": "table", "unit": "", "test": "", **lists, **changes})


# --- run folders: the cases, each with the commands that refuse it; the others end well

PAGES, ASKING, REST = "report beside", "predict export serve", "status log resume"
EVERY = f"{PAGES} {ASKING} {REST}"
NO_CONFIG = f"{ASKING} {REST}"
READING = f"{PAGES} {ASKING} status log resume"  # whatever reads result.json
SETTINGS = f"{ASKING} status log"  # whatever reads config.toml of a finished run
ROUNDS = f"{PAGES} status log"
HUGE = 10**400
ODD = {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
LIE = {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
NAME = "<script>alert(1)</script>\x1b[2J\x07\u202e={}"


class Case(NamedTuple):
    name: str
    damage: Damage
    refusing: str = ""  # commands
    finished: bool = True  # or stopped after its last round


CASES = [
    # files that are something else
    Case("config.toml a pipe", pipe("config.toml"), NO_CONFIG),
    Case("config.toml a folder", folder("config.toml"), NO_CONFIG),
    Case("config.toml a link out", link("config.toml", "../victim"), NO_CONFIG),
    Case("config.toml a device", link("config.toml", "/dev/zero"), NO_CONFIG),
    Case("config.toml endless", endless("config.toml"), SETTINGS),
    Case("config.toml empty", replaced("config.toml", ""), ASKING),
    Case("config.toml of noise", replaced("config.toml", bytes(range(256))), SETTINGS),
    Case("config.toml nested", replaced("config.toml", "seed = " + "[" * 50_000), SETTINGS),
    Case("config.toml dotted", replaced("config.toml", "seed" + ".a" * 20_000 + " = 1\n"), SETTINGS),
    Case("config.toml absent", removed("config.toml"), NO_CONFIG),
    Case("result.json a pipe", pipe("result.json"), "report beside predict export serve"),
    Case("result.json a folder", folder("result.json"), "report beside predict export serve resume"),
    Case("result.json a link out", link("result.json", "../victim"), EVERY),
    Case("result.json endless", endless("result.json"), READING),
    Case("result.json nested", replaced("result.json", "[" * 100_000), READING),
    Case("result.json cut", replaced("result.json", '{"method": "fed-mp"'), READING),
    Case("metrics.jsonl a pipe", pipe("metrics.jsonl"), f"{ROUNDS} export"),
    Case("metrics.jsonl a device", link("metrics.jsonl", "/dev/zero"), f"{ROUNDS} export"),
    Case("metrics.jsonl endless", endless("metrics.jsonl"), f"{ROUNDS} export"),
    Case("metrics.jsonl nested", replaced("metrics.jsonl", "[" * 100_000)),
    Case("metrics.jsonl of noise", replaced("metrics.jsonl", bytes(range(256)))),
    Case("model.safetensors a pipe", pipe("model.safetensors"), ASKING),
    Case("model.safetensors a link out", link("model.safetensors", "../victim"), ASKING),
    Case("model.safetensors endless", endless("model.safetensors"), ASKING),
    Case("kept.safetensors a folder", folder("kept.safetensors"), ASKING),
    Case("examples.json a pipe", pipe("examples.json"), "report serve"),
    Case("examples.json of others", as_json("examples.json", {"gained": [{"image": [1]}]}), "report serve"),
    Case("examples.json with a script", as_json("examples.json", {"gained": [{"image": "data:text/html,<script>"}]})),
    Case("report.html a link out", link("report.html", "../victim")),
    Case("report.html a folder", folder("report.html"), "report resume"),
    Case(".lock a pipe", pipe(".lock"), "resume"),
    Case(".lock a link out", link(".lock", "../victim"), "resume"),
    Case(".lock of no process", replaced(".lock", "99999999999999999999 5")),
    Case("status.json a pipe", pipe("status.json")),
    Case("status.json of other types", as_json("status.json", {"parties": ["a"], "connected": 5, "last_seen": []})),
    Case("federation.json a pipe", pipe("federation.json"), "resume", finished=False),
    Case(
        "federation.json of other types",
        as_json("federation.json", {"federation": 5, "run": []}),
        "resume",
        finished=False,
    ),
    Case(
        "federation.json with NUL",
        as_json("federation.json", {"federation": "\0", "run": "a"}),
        "resume",
        finished=False,
    ),
    Case("journal a link out", link("journal", "../victims"), "resume", finished=False),
    Case("manifest a pipe", pipe("journal/000001.json"), "resume", finished=False),
    Case("manifest a link out", link("journal/000001.json", "../../victim"), "resume", finished=False),
    Case("tensors of a round a pipe", pipe("journal/000001.safetensors"), "resume", finished=False),
    # numbers, names and types
    Case("a round far away", replaced("journal/999999999999.json", "{}"), finished=False),
    Case("the last round there can be", replaced("journal/999999.json", "{}"), finished=False),
    Case("a round of no number", replaced("journal/1abc.json", "{}"), finished=False),
    Case("a record that is a number", manifest(record=5), "resume", finished=False),
    Case("a record of another type", manifest(record={"round": "x"}), "resume", finished=False),
    Case("a hash that is a number", manifest(tensors_sha256=5), "resume", finished=False),
    Case("a manifest of another round", manifest(round=2), "resume", finished=False),
    Case("rounds without end", result(rounds=10**12, per_round=[1.0, 2.0]), READING),
    Case("a huge accuracy", result(accuracy=HUGE)),
    Case("infinite accuracies", result(accuracy=float("inf"), per_round=[float("nan"), 1e308, -1e308])),
    Case("class names that are a number", result(class_names=5), READING),
    Case("fewer class names", result(class_names=["cat"]), READING),
    Case("class names with scripts", renamed(NAME)),
    Case("halves of characters", renamed("\ud800{}"), ASKING),
    Case("a confusion of texts", result(confusion=[["x"] * 10] * 10), READING),
    Case("a ragged confusion", result(confusion=[[1], [1, 2]]), READING),
    Case("other counts", result(partition_counts=[[1, 2], [3]]), READING),
    Case(
        "an embedding that lies",
        result(embedding={"x": [1.0], "y": [1.0, 2.0], "label": [-7], "present": ["odd"]}),
        READING,
    ),
    Case("conditions of nothing", result(conditions=[{}]), READING),
    Case("settings nested", result(config={"a": {"b": {"c": {}}}}), READING),
    Case("seconds that are a text", result(seconds="long"), READING),
    Case("skipped images that are numbers", result(skipped_images=[5]), READING),
    Case("hashes of other files", result(files_sha256={"model.safetensors": "0" * 64, "../victim": "0" * 64}), READING),
    Case("hashes of none", result(files_sha256={}), ASKING),
    Case("no fingerprint", result(model_fingerprint=None), ASKING),
    Case("no templates", result(templates=[]), ASKING),
    Case("a method with a script", result(method=NAME, notes=[NAME], command=NAME)),
    Case("a record of a huge round", record(round=HUGE)),
    Case("a record of texts", record(cohort="x", loss="x")),
    Case("a record with scripts", record(refused=[{"client": 0, "reason": NAME}])),
    Case("a record of huge bytes", record(bytes_up=HUGE)),
    Case("a record with a strange key", record(**{NAME: 5.0})),
    Case("a comparison", comparison()),
    Case("a comparison with scripts", comparison(title=NAME, rows=[NAME], columns=[NAME])),
    Case("a comparison of another kind", comparison(kind="odd"), "report"),
    Case("a comparison of numbers", comparison(rows=5, cells=[{}]), "report"),
    Case("a comparison without points", comparison(kind="bubbles", points=[{"row": "a", "column": "b"}]), "report"),
    Case(
        "a comparison of huge figures",
        comparison(kind="curves", series=[{"row": "a", "column": "b", "values": [HUGE]}]),
        "report",
    ),
    # settings
    Case("100,000 threads", setting("federation.threads", "100000"), REST, finished=False),
    Case("rounds without end in the settings", setting("federation.rounds", "1000000000000"), REST, finished=False),
    Case("a billion clients", setting("data.clients", "1000000000"), REST, finished=False),
    Case("a learning rate of infinity", setting("training.learning_rate", "inf"), REST, finished=False),
    Case("an option of nan", setting("method.scale", "nan"), "resume", finished=False),
    Case("epochs without end", setting("training.local_epochs", "1000000000000"), REST, finished=False),
    Case("a seed of thirty digits", setting("seed", "1" * 30), REST, finished=False),
    Case("a device of no numbers", setting("device", '"meta"'), SETTINGS),
    Case("a section that is a number", replaced("config.toml", "federation = 5\n"), SETTINGS),
    Case("a model of the hub", setting("model.name", '"stranger/model"'), ASKING),
    Case("a dataset of the hub", setting("data.dataset", '"hf:stranger/set"'), finished=False, refusing="resume"),
    Case("a model that is a device", setting("model.name", '"/dev/zero"'), ASKING),
    Case("a model with NUL", setting("model.name", '"a\\u0000b"'), ASKING),
    Case("a dataset that is a device", setting("data.dataset", '"/dev/zero"'), "resume", finished=False),
    Case("a dataset with NUL", setting("data.dataset", '"\\u0000"'), "resume", finished=False),
    Case("a dataset of 100,000 letters", setting("data.dataset", '"' + "x" * 100_000 + '"'), REST, finished=False),
    Case("a dataset that clears the screen", setting("data.dataset", '"\\u001b[2J[red]"'), "resume", finished=False),
    Case("a method's file", setting("method.name", '"evil.py"'), ASKING),
    Case("a method's file by its place", setting("method.name", '"run/evil.py"'), ASKING),
    Case("a method's file elsewhere", setting("method.name", '"../evil.py"'), ASKING),
    Case("a method of a strange name", setting("method.name", '"\\u001b[2J\\u0000"'), ASKING),
    Case("shards of nothing", setting("data.partition", '"shards:1e400"'), "resume", finished=False),
    # tensors whose hashes are right
    Case("a header that lies", tensors("model.safetensors", headed(LIE)), ASKING),
    Case(
        "a header without end", tensors("model.safetensors", lambda content: struct.pack("<Q", 2**63) + b"{}"), ASKING
    ),
    Case("no tensors", tensors("model.safetensors", headed({})), ASKING),
    Case("tensors of another method", tensors("model.safetensors", headed(ODD, bytes(4))), ASKING),
    Case("tensors of another shape", tensors("model.safetensors", each(cut))),
    Case("tensors of nan", tensors("model.safetensors", each(lambda tensor: tensor * torch.nan)), ASKING),
    Case("updates of no client", tensors("kept.safetensors", headed(ODD, bytes(4))), ASKING),
    Case(
        "updates of another shape",
        tensors("kept.safetensors", each(cut)),
        ASKING,
    ),
    Case("a round of no owner", tensors("journal/000001.safetensors", headed(ODD, bytes(4))), "resume", finished=False),
    Case(
        "a round of another shape",
        tensors("journal/000001.safetensors", each(cut)),
        "resume",
        finished=False,
    ),
    Case(
        "a round of nan",
        tensors("journal/000001.safetensors", each(lambda tensor: tensor * torch.nan)),
        "resume",
        finished=False,
    ),
]

COMMANDS: dict[str, Callable[[Path], list[Any]]] = {
    "report": lambda run: ["report", run],
    "beside": lambda run: ["report", run, run, "--out", "out.html"],
    "status": lambda run: ["status", run],
    "log": lambda run: ["log", run, "--out", "logs"],
    "predict": lambda run: ["predict", run, "photo.png"],
    "export": lambda run: ["export", run, "exported"],
    "serve": lambda run: ["serve", run, "--port", "0"],
    "resume": lambda run: ["resume", run, "--quiet"],
}
STOPPED = ("status", "log", "resume")  # what is tried with a run that is not finished
OUTSIDE = {"beside": {"out.html"}, "log": {"logs"}, "export": {"exported"}}  # what commands make where they are told to
INSIDE = {  # and what they write in the folder
    "report": {"report.html"},
    "resume": {".lock", "report.html", "metrics.jsonl", "result.json", "model.safetensors", "kept.safetensors"}
    | {"examples.json", "journal/999999.json", "test.csv", "evaluation.json", "evaluation.html", "thresholds.json"},
}


class Hung(BaseException):
    """A command that does not end."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    def stop(*signal: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(words: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Run a command in this process: its exit code, and what it said."""
    out, error = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "argv", ["fedvl", *map(str, words)])
    with guarded(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            fedvl.cli.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), error.getvalue()


def listed(place: Path) -> dict[str, Any]:
    """Return everything below a folder: what files hold, where links lead."""
    found: dict[str, Any] = {}
    for path in place.rglob("*"):
        name = path.relative_to(place).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() and path.stat().st_size < 2**30 else path.stat().st_mode
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name, 0) != after.get(name, 0)}


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one round, to be damaged."""
    path = tmp_path_factory.mktemp("sent") / "run"
    settings = {"method": {"name": "fed-mp"}, "data": {"clients": 3, "shots": 2}}
    finish(path, {**settings, "federation": {"rounds": 1, "threads": 1}})
    (path / "evil.py").write_text("import fedvl\n\nfedvl.canary = True\n")
    write_report(path)
    return path


@pytest.fixture(scope="module")
def opener() -> Opener:
    return Opener.once()


@pytest.fixture
def commands(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and images are opened once; an export has no encoder, and a service is not waited for."""
    complete = fedvl.runs.experiment.complete
    monkeypatch.setattr(
        fedvl.runs.experiment, "complete", lambda folder, display, **more: complete(folder, display, opener, **more)
    )
    monkeypatch.setattr(fedvl.serve.model, "open_model", opener.model)
    monkeypatch.setattr(fedvl.serve.export, "clip_to_hugging_face", lambda tensors: {})
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [socket.close() for socket in sockets])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_there_are_enough_cases():
    assert len(CASES) >= 100
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.usefixtures("commands")
def test_a_run_folder_from_a_stranger(case, sent, tmp_path, monkeypatch):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "victims").mkdir()
    (tmp_path / "photo.png").write_bytes(photo(3))
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    refusing = set()
    for command in COMMANDS if case.finished else STOPPED:
        shutil.copytree(sent, run, symlinks=True)
        if not case.finished:
            (run / "result.json").unlink()
        case.damage(run)
        before = listed(tmp_path)
        code, out, error = call(COMMANDS[command](run), monkeypatch)
        touched = changed(before, listed(tmp_path))
        allowed = OUTSIDE.get(command, set()) | {f"run/{name}" for name in INSIDE.get(command, ())}
        strays = {name for name in touched if name not in allowed and name.split("/")[0] not in allowed}
        assert not strays, f"{command} wrote {strays}"
        assert not {"\x1b", "\x07", "\u202e"} & {*out, *error}, f"the terminal obeys what {command} says"
        if code:
            refusing.add(command)
            assert code == 2, f"{command}: {error}"
            assert error.startswith("Error: ")
            assert error.count("\n") == 1, error
            assert len(error) < 1000
        for name in ("run/report.html", "out.html"):
            if name in touched:
                assert "<script>alert" not in Path(name).read_text()
        shutil.rmtree(run)
        for name in ("out.html", "logs", "exported"):
            shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)
    assert refusing == set(case.refusing.split())
    assert not hasattr(fedvl, "canary")


# --- data: what is in a folder, and why it is refused

OUT, NO_FILE, LEADS = "which is not below", "which is not a regular file", "leads out of"
GOOD = "path,label\n" + "".join(f"{number}.png,{'cat' if number % 2 else 'dog'}\n" for number in range(6))


def row(path: str) -> Damage:
    """A manifest of CSV with a seventh image."""
    return replaced("manifest.csv", f"{GOOD}{path},cat\n")


def line(**values: Any) -> Damage:
    """A manifest of JSON lines with one row."""
    return as_json("manifest.jsonl", values)


def both(*damages: Damage) -> Damage:
    def do(place: Path) -> None:
        for damage in damages:
            damage(place)

    return do


def classes(name: str, target: str) -> Damage:
    """Folders of two classes, and a link."""

    def do(place: Path) -> None:
        for label in ("cat", "dog"):
            (place / label).mkdir()
            for number in range(3):
                shutil.copy(place / f"{number}.png", place / label / f"{number}.png")
        (place / name).symlink_to(target)

    return do


def split_out(place: Path) -> None:
    """Folders of splits, of which one leads to a folder of classes elsewhere."""
    for label in ("cat", "dog"):
        for folder in (place / "test" / label, place.parent / "outside" / label):
            folder.mkdir(parents=True)
            shutil.copy(place / "0.png", folder)
    (place / "train").symlink_to("../outside")


def table_out(name: str, target: str) -> Damage:
    """A table elsewhere, and a link to it or to its folder."""

    def do(place: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        (place.parent / "outside").mkdir()
        images = [path.read_bytes() for path in sorted(place.glob("*.png"))]
        table = pyarrow.table({"image": images, "label": ["cat", "dog"] * 3})
        parquet.write_table(table, place.parent / "outside" / "set.parquet")
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(target)

    return do


def parquet(make: Callable[[Any], Any]) -> Damage:
    def do(place: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(make(pyarrow), place / "set.parquet")

    return do


def emoji(image: object, name: object, category: object) -> Damage:
    vendors = {"has_img_twitter": True, "has_img_google": True}
    return as_json("emoji.json", [{"image": image, "name": name, "category": category, **vendors}])


DATA: list[tuple[str, Damage, str, str]] = [  # what it is, what is done, what is opened, and the reason
    ("a device", row("/dev/zero"), ".", OUT),
    ("a file elsewhere", row("/etc/hostname"), ".", OUT),
    ("a way up", row("../victim.png"), ".", OUT),
    ("a way up and down", row("../data/../victim.png"), ".", OUT),
    ("the folder above", row(".."), ".", OUT),
    ("a link out", both(row("out.png"), lambda place: (place / "out.png").symlink_to("../victim.png")), ".", LEADS),
    ("a folder that leads out", both(row("up/victim.png"), lambda place: (place / "up").symlink_to("..")), ".", LEADS),
    (
        "a table whose image is a link out",
        both(row("out.png"), lambda place: (place / "out.png").symlink_to("../victim.png")),
        "manifest.csv",
        OUT,
    ),
    ("a pipe", both(row("pipe.png"), lambda place: os.mkfifo(place / "pipe.png")), ".", NO_FILE),
    ("a folder", both(row("folder"), lambda place: (place / "folder").mkdir()), ".", NO_FILE),
    ("NUL", line(path="a\0b", label="x"), ".", OUT),
    ("half a character", line(path="\ud800", label="x"), ".", OUT),
    ("a name without end", line(path="x" * 100_000, label="x"), ".", "Line 1"),
    ("a manifest that is a pipe", lambda place: os.mkfifo(place / "manifest.csv"), ".", "pipe or device"),
    ("a manifest that is endless", endless("manifest.csv"), ".", "bytes, more than"),
    ("rows without end", replaced("manifest.jsonl", "[" * 100_000), ".", "Line 1 .* is not JSON"),
    ("a row that is a list", replaced("manifest.jsonl", "[1]"), ".", "is not a JSON object"),
    ("noise", replaced("manifest.csv", bytes(range(256))), ".", "cannot be read"),
    ("a class that is a link out", classes("bird", "/usr"), ".", LEADS),
    ("an image that is a link out", classes("cat/9.png", "../../victim.png"), ".", LEADS),
    ("a split that is a link out", split_out, ".", "train is a link that leads out of"),
    ("a table that is a link out", table_out("set.parquet", "../outside/set.parquet"), ".", LEADS),
    ("a folder of tables that is a link out", table_out("data", "../outside"), ".", LEADS),
    ("a table deep down", table_out("data/set.parquet", "../../outside/set.parquet"), ".", LEADS),
    ("a hidden folder of tables", table_out(".data", "../outside"), ".", "has images and no class folders"),
    ("a link that nothing reads", classes("cat/notes", "/etc"), ".", LEADS),
    ("a manifest that is a link out", classes("manifest.csv", "../victim.png"), ".", LEADS),
    ("a dataset that is a pipe", lambda place: os.mkfifo(place / "set.csv"), "set.csv", "pipe or device"),
    ("parquet that is a pipe", lambda place: os.mkfifo(place / "set.parquet"), "set.parquet", "pipe or device"),
    ("parquet of noise", replaced("set.parquet", b"PAR1" + bytes(200) + b"PAR1"), "set.parquet", "cannot be read"),
    (
        "parquet that claims a huge footer",
        replaced("set.parquet", b"PAR1\xff\xff\xff\x7fPAR1"),
        "set.parquet",
        "cannot be read",
    ),
    (
        "parquet of other columns",
        parquet(lambda arrow: arrow.table({"image": [b"x"]})),
        "set.parquet",
        "has no column label",
    ),
    (
        "parquet of numbers",
        parquet(lambda arrow: arrow.table({"image": [1], "label": ["x"]})),
        "set.parquet",
        "does not hold bytes",
    ),
    (
        "emoji elsewhere",
        as_json(
            "emoji.json",
            [{"image": "../../victim.png", "name": "a", "category": "b", "has_img_twitter": 1, "has_img_google": 1}],
        ),
        ".",
        "are incomplete",
    ),
    (
        "emoji of numbers",
        as_json("emoji.json", [{"image": 1, "name": 2, "category": 3, "has_img_twitter": 1, "has_img_google": 1}]),
        ".",
        "are incomplete",
    ),
    ("emoji without end", replaced("emoji.json", "[" * 100_000), ".", "are incomplete"),
]


def with_images(place: Path) -> Path:
    place.mkdir()
    for number in range(6):
        (place / f"{number}.png").write_bytes(photo(number))
    return place


@pytest.mark.parametrize(("damage", "opened", "reason"), [case[1:] for case in DATA], ids=[case[0] for case in DATA])
def test_data_from_a_stranger(damage, opened, reason, tmp_path, monkeypatch):
    place = with_images(tmp_path / "data")
    (tmp_path / "victim.png").write_bytes(photo(0))
    damage(place)
    before = listed(tmp_path)
    code, out, error = call(["data", "show", place / opened], monkeypatch)
    assert (code, out) == (2, "")
    assert error.count("\n") == 1
    assert len(error) < 1000
    assert re.search(reason, error), error
    assert not changed(before, listed(tmp_path))


def test_links_within_a_dataset_are_followed_and_one_in_a_circle_is_an_image_that_is_missing(tmp_path, monkeypatch):
    classes("bird", "cat")(with_images(tmp_path / "data"))
    assert sorted(set(read_path(tmp_path / "data").labels)) == ["bird", "cat", "dog"]
    place = with_images(tmp_path / "listed")
    both(row("odd.png"), lambda place: (place / "odd.png").symlink_to("odd.png"))(place)
    assert call(["data", "show", place], monkeypatch)[0] == 0


def test_images_elsewhere_are_read_if_the_user_says_where(tmp_path, monkeypatch):
    place, own = tmp_path / "data", tmp_path / "own"
    for folder in (place, own):
        folder.mkdir()
    for number in range(6):
        (own / f"{number}.png").write_bytes(photo(number))
    (place / "manifest.csv").write_text(GOOD.replace("\n", f"\n{own}/").removesuffix(f"{own}/"))
    code, _, error = call(["data", "show", place], monkeypatch)
    assert (code, OUT in error) == (2, True)
    for words in (["data", "show", place, "--root", own], ["data", "show", place]):
        code, out, _ = call(words, monkeypatch)
        assert (code, "2 classes" in out) == (0, True)
        monkeypatch.setenv("FEDVL_DATA", str(own))


# --- models

MODELS: list[tuple[str, Damage]] = [
    ("settings nested", replaced("config.json", "[" * 100_000)),
    ("settings of other types", as_json("config.json", {"model_type": "clip", "vision_config": [1], "text_config": 5})),
    ("settings a pipe", pipe("config.json")),
    ("preprocessing of texts", as_json("preprocessor_config.json", {"size": {"shortest_edge": "x"}})),
    ("a tokenizer of noise", replaced("tokenizer.json", bytes(range(256)))),
    ("settings of the tokenizer", as_json("tokenizer_config.json", [1])),
    ("parts elsewhere", as_json("model.safetensors.index.json", {"weight_map": {"x": "../victim"}})),
    ("parts that are numbers", as_json("model.safetensors.index.json", {"weight_map": {"x": 5}})),
    ("no map of parts", as_json("model.safetensors.index.json", {"a": 1})),
    ("weights endless", endless("model.safetensors")),
    ("weights that lie", replaced("model.safetensors", headed(LIE)(b""))),
    ("weights of another shape", replaced("model.safetensors", serialise({"logit_scale": torch.ones(2)}))),
]


@pytest.mark.parametrize("damage", [case[1] for case in MODELS], ids=[case[0] for case in MODELS])
def test_a_model_from_a_stranger(damage, tmp_path):
    place = tmp_path / "model"
    shutil.copytree(EMBEDDED_FOLDER / "fedvl-tiny", place)
    shutil.copy(EMBEDDED_FOLDER / "tokenizer.json", place)
    damage(place)
    with guarded(), pytest.raises(FedVLError) as error:
        load_model(str(place))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


# --- content that wants to be run, wherever FedVL opens a file


def torch_file():
    file = io.BytesIO()
    torch.save({"weight": Canary()}, file)
    return file.getvalue()


def numpy_file():
    file = io.BytesIO()
    np.save(file, np.array([Canary()], dtype=object), allow_pickle=True)
    return file.getvalue()


def numpy_archive():
    file = io.BytesIO()
    np.savez(file, weight=np.array([Canary()], dtype=object))
    return file.getvalue()


def zip_bomb():
    """Eight megabytes of nothing in eight kilobytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", bytes(2**23))
    assert len(file.getvalue()) < 2**14
    return file.getvalue()


HOSTILE = {
    "pickle": lambda: pickle.dumps(Canary()),
    "torch file": torch_file,
    "numpy file": numpy_file,
    "numpy archive": numpy_archive,
    "zip bomb": zip_bomb,
}


def as_model_file(content, folder):
    (folder / "model.safetensors").write_bytes(content)
    load_model(str(folder / "model.safetensors"))


def as_model_folder(content, folder):
    shutil.copytree(EMBEDDED_FOLDER / "fedvl-tiny", folder / "model")
    for path in (folder / "model").glob("*.safetensors"):
        path.unlink()
    (folder / "model" / "pytorch_model.bin").write_bytes(content)
    load_model(str(folder / "model"))


def as_dataset(content, folder):
    (folder / "set.parquet").write_bytes(content)
    open_dataset(str(folder / "set.parquet"))


def as_manifest(content, folder):
    (folder / "set.jsonl").write_bytes(content)
    open_dataset(str(folder / "set.jsonl"))


def as_image(content, folder):
    decode(content, "picture.png")


def as_tensors(content, folder):
    (folder / "tensors.safetensors").write_bytes(content)
    load(folder / "tensors.safetensors")


def as_message(content, folder):
    messages.unpack_tensors(content, 2**20)


def as_settings(content, folder):
    (folder / "config.toml").write_bytes(content)
    read_toml(folder / "config.toml")


def as_checkpoint(content, folder):
    Journal(folder).commit(1, {"shared/w": torch.ones(2)}, record_of({"round": 1}))
    for path in folder.iterdir():
        path.write_bytes(content)
    Journal(folder).latest()


PLACES = [as_model_file, as_model_folder, as_dataset, as_manifest, as_image]
PLACES += [as_tensors, as_message, as_settings, as_checkpoint]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_is_run_and_the_refusal_is_our_own(tmp_path, place, kind):
    with pytest.raises((FedVLError, BadImage)) as caught:
        place(HOSTILE[kind](), tmp_path)
    assert "\n" not in str(caught.value)
    assert not hasattr(fedvl, "canary")


def test_the_canary_sings_where_it_is_unpickled(monkeypatch):
    """Otherwise the test above could not fail."""
    monkeypatch.setattr(fedvl, "canary", False, raising=False)
    pickle.loads(pickle.dumps(Canary()))  # noqa: S301
    assert vars(fedvl)["canary"]
