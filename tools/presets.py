"""Choose the learning rates of the preset `embedded` on validation images, and test the preset.

    python -m tools.presets [--jobs 1] [--limit SECONDS] [--test SECONDS] FILE [METHOD ...]

Each method starts from its preset `paper`, with ten rounds and the changes in ``CHANGES``, which make it run on the embedded sets.
It tries five learning rates, ten apart, with one seed and without a look at the test: a fifth of the training images of each client
is held out. The rate with the highest accuracy on these, the smaller of equals, is chosen. Then the method is trained on all images
with three seeds, and tested. FILE has a line for each run; a run that is there is not repeated. ``--limit`` starts no run
after so many seconds, ``--test`` tests only methods whose trials took less. ``python -m tools.presets_page`` makes the table.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedvl.comparisons.grid import layered
from fedvl.comparisons.sweep import blind
from fedvl.config import Settings
from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.errors import FedVLError
from fedvl.evaluation.statistics import mcnemar
from fedvl.methods import load_method, method_names
from fedvl.methods.base import Method
from fedvl.runs.experiment import complete
from fedvl.runs.folder import RunFolder
from fedvl.runs.settings import new_experiment

SHARE, SEEDS = 0.2, 3
SGD = (0.001, 0.01, 0.1, 1.0, 10.0)
ADAM = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
WORDS: Settings = {"method": {"words": "a photo of a"}}  # a random context takes many more rounds
LONGER: Settings = {"federation": {"rounds": 20}}  # contexts that cannot start as words
OPEN: Settings = {"data": {"clients": 4, "partition": "iid"}, "evaluation": {"protocol": "open"}}  # ten classes
ALL_SHOTS: Settings = {"data": {"shots": 1000}}  # more than there are
LIGHT: Settings = {"training": {"batch_size": 32, "local_epochs": 1}}  # steps through the image encoder
CHANGES: dict[str, Settings] = {
    **dict.fromkeys(("promptfl", "promptprox", "fedotp", "fedpha"), WORDS),
    **dict.fromkeys(("pfedprompt", "promptfolio", "pfedmoap", "fedpgp"), LONGER),
    **dict.fromkeys(("fed-mp", "faa-clip", "facmic", "fedka", "fedavg-nn", "fedprox-nn"), OPEN),
    **dict.fromkeys(("fedmgp", "fedmvp", "pfedmma"), LIGHT),
    **dict.fromkeys(("adapterfl", "cachefl"), ALL_SHOTS),
    "fedpp": layered(WORDS, LIGHT, {"training": {"local_epochs": 2}}),
}


class Case(NamedTuple):
    """One run of a method: a trial on validation images, or a test with one of the seeds."""

    method: str
    rate: float
    seed: int | None  # None: a trial


def preset_settings(name: str) -> Settings:
    """Return what the preset changes in the preset `paper`, but for the learning rate."""
    if name not in tuned_methods():
        return {}
    return layered({"federation": {"rounds": 10}}, CHANGES.get(name, {}))


def tuned_methods() -> list[str]:
    """Return the methods that have a learning rate."""
    trained = (name for name in method_names() if load_method(name).start is not Method.start)
    return [name for name in trained if load_method(name).statistics is Method.statistics]


# Methods whose trials take too long on two cores: the rate of a method that trains the same tensors, which was tried.
LIKE = dict.fromkeys(("fed-prime", "fedavg-p", "fedprox-p", "fedmsplit-p"), "fed-inter")


def rates_of(name: str) -> tuple[float, ...]:
    return SGD if load_method(name).presets["paper"].get("training", {}).get("optimiser", "sgd") == "sgd" else ADAM


opener = cache(Opener.once)


def perform(case: Case) -> dict[str, Any]:
    """Run once; return the line of the file."""
    began = time.perf_counter()
    mode = {"seed": 0, **blind(SHARE)} if case.seed is None else {"seed": case.seed}
    rate = {"method": {"name": case.method}, "training": {"learning_rate": case.rate}, "federation": {"threads": 1}}
    line: dict[str, Any] = {**case._asdict(), "machine": machine()}
    try:
        with tempfile.TemporaryDirectory() as folder:
            experiment = new_experiment(layered(preset_settings(case.method), rate, mode))
            with RunFolder.create(Path(folder) / "run", experiment) as made:
                result = complete(made, Silent(), opener())
                if case.seed is None:
                    line["validation"] = made.rounds[-1].validation
                else:
                    line |= {"accuracy": result.accuracy, "zero_shot": result.zero_shot_accuracy}
                    paired = mcnemar(result.zero_shot_right or "", result.right or "")
                    line |= {"gained": paired.gained, "lost": paired.lost, "p": paired.p} if paired else {}
    except FedVLError as error:
        line["error"] = str(error)
    return {**line, "seconds": round(time.perf_counter() - began, 1)}


def machine() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU ({platform.machine()})"


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def chosen_rate(lines: Iterable[dict[str, Any]], name: str) -> float | None:
    """Return the rate with the highest validation accuracy, the smaller of equals; None if none is known."""
    trials = {line["rate"]: line for line in lines if line["method"] == name and line["seed"] is None}
    known = {rate: line["validation"] for rate, line in trials.items() if line.get("validation") is not None}
    complete_enough = len(trials) >= len(rates_of(name)) - 1  # one of the rates of fed-intra was not tried
    return max(sorted(known), key=lambda rate: known[rate]) if known and complete_enough else None


def cases_to_run(lines: list[dict[str, Any]], names: list[str], testable: float) -> list[Case]:
    """Return the trials that are missing; of a method that has all, the missing tests."""
    done = {Case(line["method"], line["rate"], line["seed"]) for line in lines}
    cost = {line["method"]: line["seconds"] for line in lines if line["seed"] is None}
    cases = []
    for name in names:
        rate = chosen_rate(lines, name)
        if rate is None:
            cases += [Case(name, each, None) for each in rates_of(name)]
        elif cost.get(name, 0.0) <= testable:
            cases += [Case(name, rate, seed) for seed in range(SEEDS)]
    return [case for case in cases if case not in done]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="all if absent")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9)
    parser.add_argument("--test", type=float, default=1e9)
    arguments = parser.parse_args()
    names, began = arguments.methods or tuned_methods(), time.monotonic()
    lines = read_lines(arguments.file)
    with arguments.file.open("a", encoding="utf-8") as file, ProcessPoolExecutor(arguments.jobs) as pool:
        while cases := cases_to_run(lines, names, arguments.test):
            futures = [pool.submit(perform, case) for case in cases]
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                lines.append(future.result())
                file.write(json.dumps(lines[-1]) + "\n")
                file.flush()
                print(json.dumps(lines[-1]), flush=True)
                if time.monotonic() - began > arguments.limit:
                    for waiting in futures:
                        waiting.cancel()
            if time.monotonic() - began > arguments.limit:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
