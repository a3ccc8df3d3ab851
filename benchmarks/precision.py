"""Compare the accuracy of training in float32, TF32 and bfloat16 on the embedded model.

    python -m benchmarks.precision [--device cuda | cpu] [--methods promptfl linear] [--seeds 5] [--json]

The same seeds in each precision: clients, batches and noise are the same, so that differences are
paired. Intervals of the mean difference are Student's, at 95 %; beside them is how far seeds differ
from each other in float32. Evaluation is in float32 always. A processor computes in bfloat16 for this
comparison alone: runs do not use it there, and there is no TF32.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.federation import steps
from fedvl.federation.round import Federation
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.preparation import prepare
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator

ROUNDS = 20
DATA = {"shots": 64, "clients": 5, "partition": "iid"}
PHOTO = {"words": "a photo of a"}  # a random context would need more rounds
METHODS: dict[str, dict[str, Any]] = {
    "promptfl": {"method": PHOTO, "training": {"learning_rate": 0.01}},
    "fedotp": {"training": {"learning_rate": 0.02, "local_epochs": 2}, "data": {"shots": 32, "test_shots": 50}},
    "fedpp": {"training": {"local_epochs": 2}, "federation": {"rounds": 5}, "data": {"shots": 16, "test_shots": 50}},
    "linear": {"training": {"learning_rate": 0.1}},
    "cachefl": {"training": {"learning_rate": 1.0}},
}
STUDENT = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
    20: 2.093,
}  # by seeds
OPENER = Opener.once()


def measure(method: str, kind: str, seed: int, device: str) -> dict[str, float]:
    """Return the accuracy of one run, and the seconds of its rounds."""
    own = METHODS[method]
    experiment = resolve_experiment(
        {
            "seed": seed,
            "device": device,
            "method": {"name": method, **own.get("method", {})},
            "data": {**DATA, **own.get("data", {})},
            "training": {**own.get("training", {}), "precision": kind},
            "federation": {"rounds": ROUNDS, "threads": 1, **own.get("federation", {})},
        }
    )
    prepared = prepare(experiment, Silent(), OPENER)
    engine, start = local_engine(prepared), prepared.method.start(torch_generator(seed, "start"))
    run = Federation(prepared.method, engine, experiment.federation, seed, start, device=prepared.device)
    began = time.perf_counter()
    run.run()
    if prepared.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    judged = make_judge(prepared, engine).judge(run.shared, run.last)
    return {"accuracy": float(judged.figures["accuracy"]), "seconds": seconds}


def paired(lower: Sequence[float], exact: Sequence[float]) -> dict[str, float]:
    """Return the mean difference over seeds and the half-width of its interval, in points."""
    differences = [one - other for one, other in zip(lower, exact, strict=True)]
    half = STUDENT[len(differences)] * statistics.stdev(differences) / math.sqrt(len(differences))
    return {"difference": statistics.mean(differences), "half_width": half}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seeds", type=int, default=5, choices=STUDENT)
    parser.add_argument("--json", action="store_true", help="one line a method")
    arguments = parser.parse_args()
    kinds = ["float32", "tf32", "bfloat16"]
    if arguments.device == "cpu":
        kinds.remove("tf32")
        steps.FASTER.add("cpu")
    lower = kinds[1:]
    if not arguments.json:
        print(f"| method | float32 | between seeds | {' | '.join(f'{kind} less float32' for kind in lower)} |")
        print("|---|" + "---|" * (2 + len(lower)), flush=True)
    for method in arguments.methods:
        runs = {
            kind: [measure(method, kind, seed, arguments.device) for seed in range(arguments.seeds)] for kind in kinds
        }
        accuracies = {kind: [run["accuracy"] for run in of_kind] for kind, of_kind in runs.items()}
        exact = accuracies["float32"]
        differences = {kind: paired(accuracies[kind], exact) for kind in lower}
        mean, spread = statistics.mean(exact), statistics.stdev(exact)
        if arguments.json:
            seconds = {kind: statistics.median(run["seconds"] for run in of_kind) for kind, of_kind in runs.items()}
            found = {"accuracies": accuracies, "differences": differences, "seconds": seconds}
            print(
                json.dumps({"method": method, "device": arguments.device, "between_seeds": spread, **found}), flush=True
            )
            continue
        cells = [f"{each['difference']:+.2f} ± {each['half_width']:.2f}" for each in differences.values()]
        print(f"| {method} | {mean:.2f} | {spread:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
