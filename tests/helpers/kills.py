"""Kill runs with SIGKILL repeatedly, resume them, and check that they end in the same bits.

One process opens a small model and some images and forks a child for every start of a run, so that a kill costs a fraction
of a second. A kill falls at a random time of the run, or inside the writing of one of its files: half-way through the
bytes, before they are synced, before the rename, or just after it.

    python -m tests.helpers.kills 20 linear fedpp    # as JSON: how often, where, and how the runs of each method ended
"""

import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

import fedvl.files
from fedvl.config import Experiment
from fedvl.data.sources import Opener, open_dataset
from fedvl.display import Silent
from fedvl.federation.journal import read_sealed
from fedvl.federation.local import LocalEngine
from fedvl.models.checkpoint import EMBEDDED_FOLDER
from fedvl.models.clip import Clip, ClipShape, DualEncoder, ViTShape
from fedvl.models.preprocessing import Preprocessing
from fedvl.models.tokenizer import load_tokenizer
from fedvl.models.transformer import StackShape
from fedvl.models.vilt import FusedEncoder, ViltShape
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import resolve_experiment

CLASSES = ("bird", "car", "cat", "dog", "frog", "ship")
ROUNDS = 12
KILLS_A_RUN = 4
PLACES = ("half-way through a file", "before its bytes are synced", "before its rename", "after its rename")
AT_RANDOM = "at a random time"


class Ending(NamedTuple):
    """Outcome of a run that kills must not change."""

    state: str  # SHA-256 of the shared tensors
    everything: str  # SHA-256 of the last committed file, which also holds the private state of server and clients
    per_round: list[float]
    lines: int  # of metrics.jsonl


@dataclass
class Campaign:
    kills: Counter[str] = field(default_factory=Counter)  # by place
    committed: Counter[int] = field(default_factory=Counter)  # by the number of rounds committed at the kill
    runs: int = 0
    same: int = 0  # runs that ended as the uninterrupted one, with at most one round repeated per kill
    redone: int = 0  # rounds repeated, over all runs

    @property
    def total(self) -> int:
        return sum(self.kills.values())


@cache
def small_encoder(fused: bool) -> DualEncoder | FusedEncoder:
    """Return an encoder with two random layers per tower, since the model is not tested here."""
    tokenizer = load_tokenizer(EMBEDDED_FOLDER, 32)
    stack = StackShape(width=8, layers=2, heads=2, hidden=16)
    pixels = Preprocessing(32, 32)
    encoder: DualEncoder | FusedEncoder
    if fused:
        vilt = ViltShape(stack, 16, 2, tokenizer.vocabulary, tokenizer.length)
        encoder = FusedEncoder("small-fused", vilt, pixels, tokenizer)
    else:
        clip = ClipShape(8, ViTShape(stack, patch=16, grid=2), stack, tokenizer.vocabulary, tokenizer.length)
        encoder = Clip("small", clip, pixels, tokenizer)
    generator = torch.Generator().manual_seed(0)
    for tensor in encoder.requires_grad_(False).eval().state_dict().values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return encoder


SMALL = Opener(cache(open_dataset), lambda name, device: small_encoder("vilt" in name))


def draw_images(folder: Path, each: int = 8) -> Path:
    """Write a manifest of noise images, so many per class, with a text for each."""
    generator = random.Random(0)
    lines = ["path,label,text"]
    for name in CLASSES:
        for index in range(each):
            Image.frombytes("RGB", (20, 20), generator.randbytes(1200)).save(folder / f"{name}{index}.png")
            lines.append(f"{name}{index}.png,{name},number {index} of {name}")
    manifest = folder / "images.csv"
    manifest.write_text("\n".join(lines), encoding="utf-8")
    return manifest


def small_experiment(method: str, images: Path) -> Experiment:
    return resolve_experiment(
        {
            "device": "cpu",
            "method": {"name": method},
            "data": {"dataset": str(images), "clients": 3, "partition": "iid"},
            "training": {"local_epochs": 1},
            "federation": {"rounds": ROUNDS, "threads": 1},
        }
    )


def ending(folder: Path) -> Ending:
    result = json.loads((folder / "result.json").read_bytes())
    last = read_sealed(folder / "journal" / f"{ROUNDS:06d}.json")
    lines = len((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return Ending(result["state_sha256"], last.tensors_sha256 if last else "damaged", result["per_round"], lines)


def die(*ignored: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class HalfWritten(io.FileIO):
    def write(self, content: Any) -> int:
        super().write(content[: len(content) // 2])
        return int(die())


def die_in_file(place: str, number: int) -> None:
    """Arrange a kill of this process at this place of the number-th file it writes (from 1)."""
    files, sync, rename = itertools.count(1), os.fsync, os.replace
    now = 0

    def opening(path: Any, mode: str, **options: Any) -> Any:
        nonlocal now
        now = next(files) if mode == "wb" else now
        return HalfWritten(path, mode) if (place, now) == (PLACES[0], number) else io.open(path, mode, **options)  # noqa: UP020

    def renaming(source: Any, target: Any) -> None:
        rename(source, target) if (place, now) != (PLACES[2], number) else die()
        if (place, now) == (PLACES[3], number):
            die()

    fedvl.files.open = opening  # type: ignore[attr-defined]
    os.fsync = lambda fd: sync(fd) if (place, now) != (PLACES[1], number) else die()
    os.replace = renaming  # type: ignore[assignment]


def run_in(experiment: Experiment, folder: Path) -> None:
    """Run, or go on with, an experiment in a folder that is there."""
    run_folder = RunFolder(folder)
    with run_folder.lock():
        if not run_folder.exists:
            run_folder.describe(experiment)
        complete(run_folder, Silent(), SMALL)


def start(
    experiment: Experiment, folder: Path, place: str | None = None, number: int = 0, seconds: float = 0.0
) -> bool:
    """Run or resume the run of a folder in a child process; return whether it was killed."""
    child = os.fork()
    if not child:
        try:
            train = LocalEngine.train

            def counted(*arguments: Any) -> Any:
                with open(folder / "begun", "ab") as file:  # one byte for every round that starts
                    file.write(b".")
                return train(*arguments)

            LocalEngine.train = counted  # type: ignore[method-assign, assignment]
            if place in PLACES:
                die_in_file(place, number)
            run_in(experiment, folder)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if place == AT_RANDOM:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise RuntimeError(f"a run of {experiment.method.name} failed in {folder}")
    return False


def campaign(method: str, kills: int, work: Path) -> Campaign:
    """Kill runs of a method this many times, each run several times.

    Their outcomes are compared with that of an uninterrupted run.
    """
    generator = random.Random(f"{method} {kills}")
    experiment = small_experiment(method, work / "images.csv")
    run_in(experiment, new_folder(work, method, "first"))  # fills the cache, imports what children need
    began = time.perf_counter()
    start(experiment, new_folder(work, method, "whole"))
    duration, expected = time.perf_counter() - began, ending(work / f"{method}-whole")
    outcome = Campaign()
    while outcome.total < kills:
        folder = new_folder(work, method, str(outcome.runs))
        before = outcome.total
        for _ in range(min(KILLS_A_RUN, kills - before)):
            files_to_come = 2 * (ROUNDS - committed_rounds(folder)) + 3
            place = AT_RANDOM if generator.random() < 0.5 else generator.choice(PLACES)
            number, seconds = generator.randint(1, files_to_come), generator.uniform(0, duration)
            if not start(experiment, folder, place, number, seconds):
                break  # it ended before the kill
            outcome.kills[place] += 1
            outcome.committed[committed_rounds(folder)] += 1
        start(experiment, folder)
        again = (folder / "begun").stat().st_size - ROUNDS
        outcome.runs += 1
        outcome.redone += again
        outcome.same += ending(folder) == expected and again <= outcome.total - before
    return outcome


def new_folder(work: Path, method: str, name: str) -> Path:
    folder = work / f"{method}-{name}"
    folder.mkdir()
    return folder


def committed_rounds(folder: Path) -> int:
    return len(list((folder / "journal").glob("*.json")))


def kill_runs(methods: Sequence[str], kills: int, work: Path) -> dict[str, Campaign]:
    """Split kills among methods and return the outcome of each."""
    torch.set_num_threads(1)  # a process that forks must have no threads
    SMALL.dataset(str(draw_images(work)), None)  # once, for all children
    os.environ["FEDVL_CACHE"] = str(work / "cache")
    return {method: campaign(method, kills // len(methods), work) for method in methods}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = kill_runs(sys.argv[2:], int(sys.argv[1]), Path(name))
    print(json.dumps({method: vars(campaign) for method, campaign in found.items()}))
