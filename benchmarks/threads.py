"""Measure steps on one thread and on several, alone and beside busy processes.

    python -m benchmarks.threads [--threads 2] [--repeats 15] [--json]

The linear classifier on random features of width 512, eight steps a client, with clients and classes
such that a step takes from 1 million to 1,000 million floating-point operations. The load is as many
processes as threads that do nothing but count. ``fitting`` is what FedVL chooses by the size of a
step (federation/threads.py). Milliseconds of a step are medians over rounds, in which the ways take
turns.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.nn.functional import normalize

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation import threads
from fedvl.federation.local import LocalEngine
from fedvl.methods import load_method
from fedvl.methods.base import Samples, Task
from fedvl.models.clip import DualEncoder
from fedvl.tensors import on_threads

WIDTH, BATCH, STEPS = 512, 32, 8
CASES = ((1, 10), (10, 10), (20, 20), (40, 40), (80, 40), (100, 100))  # clients, classes


def count_on() -> None:
    number = 0
    while True:
        number += 1


def engine_of(clients: int, classes: int) -> LocalEngine:
    generator = torch.Generator().manual_seed(0)
    features = normalize(torch.randn(clients * BATCH * STEPS, WIDTH, generator=generator), dim=-1)
    labels = torch.randint(classes, (len(features),), generator=generator)
    names = tuple(f"class {index}" for index in range(classes))
    encoder = cast("DualEncoder", SimpleNamespace(logit_scale=100.0))
    task = Task(names, torch.randn(classes, WIDTH, generator=generator), encoder, clients)
    method_type = load_method("linear")
    method = method_type(method_type.options_type(), task)
    config = FederationConfig(rounds=1000, chunk=clients)
    rows = torch.arange(len(features)).split(BATCH * STEPS)
    return LocalEngine(
        method, Samples({"features": features}, labels), rows, TrainingConfig(batch_size=BATCH), config, 0
    )


def measure(clients: int, classes: int, ways: dict[str, tuple[int, bool]], repeats: int) -> dict[str, float]:
    """Return the median seconds of a step in each way; the ways take turns."""
    engine, usual = engine_of(clients, classes), threads.SMALL_STEP
    shared, found = engine.start, {name: list[float]() for name in ways}
    for index in range(repeats + 1):
        for name, (number, fitting) in ways.items():
            threads.SMALL_STEP = usual if fitting else 0
            began = time.perf_counter()
            with on_threads(number):
                engine.train(index, range(clients), shared)
            found[name].append(time.perf_counter() - began)
    threads.SMALL_STEP = usual
    return {name: statistics.median(seconds[1:]) / STEPS for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    most = arguments.threads
    ways = {"one": (1, False), "all": (most, False), "fitting": (most, True)}
    lines: list[dict[str, Any]] = [
        {"clients": clients, "classes": classes, "operations": 6 * clients * BATCH * (WIDTH + 1) * classes}
        for clients, classes in CASES
    ]
    for load in (0, most):
        busy = [multiprocessing.Process(target=count_on, daemon=True) for _ in range(load)]
        for process in busy:
            process.start()
        for line in lines:
            for name, seconds in measure(line["clients"], line["classes"], ways, arguments.repeats).items():
                line[f"{name}_{'busy' if load else 'alone'}_ms"] = round(1000 * seconds, 2)
        for process in busy:
            process.terminate()
            process.join()
    if arguments.json:
        for line in lines:
            print(json.dumps(line))
        return
    columns = [f"{name}_{state}_ms" for state in ("alone", "busy") for name in ways]
    print(f"| million operations a step | {' | '.join(column.replace('_', ' ') for column in columns)} |")
    print("|---|" + "---|" * len(columns))
    for line in lines:
        print(f"| {line['operations'] / 1e6:.0f} | {' | '.join(str(line[column]) for column in columns)} |")


if __name__ == "__main__":
    main()
