"""Logistic regression with 1,000 clients for 100 rounds, the setting in which FLUTE compares simulators.

python -m benchmarks.flute [--json] [--device cpu|cuda] [--per-round 10 1000]

Inputs have MNIST's shape (784 numbers, 10 classes, 60 images a client) and are made up: times do not depend on
what is in them. "bare" trains the same clients by batched products without an engine, in the same order of batches,
and the largest difference of the final weights is printed. Published times, of other machines and with evaluation:
FLUTE 1:35, FedML 3:09, Flower 30:14 (minutes:seconds).
"""

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation.local import LocalEngine
from fedvl.federation.round import Federation
from fedvl.federation.stacks import SampleRows
from fedvl.methods.base import Samples, Task
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.seeding import derived_seed, numpy_generator, permutations
from fedvl.tensors import Tensors

CLIENTS, SAMPLES, WIDTH, CLASSES, ROUNDS, BATCH, RATE, SEED = 1000, 60, 784, 10, 100, 10, 0.03, 0


def problem(device: str) -> tuple[Samples, Tensors]:
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(CLASSES, (CLIENTS * SAMPLES,), generator=generator)
    centres = torch.rand(CLASSES, WIDTH, generator=generator)
    features = (centres[labels] + torch.randn(CLIENTS * SAMPLES, WIDTH, generator=generator)) / WIDTH**0.5
    start = {"weight": torch.zeros(CLASSES, WIDTH, device=device), "bias": torch.zeros(CLASSES, device=device)}
    return Samples({"features": features.to(device)}, labels.to(device)), start


def ours(samples: Samples, start: Tensors, per_round: int) -> Tensors:
    encoder = cast(Any, SimpleNamespace(logit_scale=1.0, name="made up"))
    task = Task(tuple(map(str, range(CLASSES))), start["weight"], encoder, CLIENTS)
    config = FederationConfig(rounds=ROUNDS, per_round=per_round)
    training = TrainingConfig(batch_size=BATCH, learning_rate=RATE, momentum=0.0)
    device = samples.labels.device
    rows = SampleRows(torch.arange(CLIENTS * SAMPLES, device=device), torch.full((CLIENTS,), SAMPLES, device=device))
    engine = LocalEngine(Linear(LinearOptions(scale=1.0, initial="zeros"), task), samples, rows, training, config, SEED)
    federation = Federation(engine.method, engine, config, SEED, dict(start))
    federation.run()
    return federation.shared


def bare(samples: Samples, start: Tensors, per_round: int) -> Tensors:
    """Train by code written for this problem alone, 100 clients at a time."""
    features, labels, device = samples.inputs["features"], samples.labels, samples.labels.device
    shared = dict(start)
    for round_index in range(ROUNDS):
        chosen = numpy_generator(SEED, "choose", round_index, 0).choice(CLIENTS, per_round, replace=False)
        chosen.sort()
        seed, totals = derived_seed(SEED, "order", round_index), {name: 0.0 * tensor for name, tensor in shared.items()}
        for clients in torch.split(torch.from_numpy(chosen).to(device), 100):
            everything = torch.ones(len(clients), SAMPLES, dtype=torch.bool, device=device)
            rows = clients[:, None] * SAMPLES + permutations(seed, clients, everything, 0)
            weight, bias = (shared[name].expand(len(clients), *shared[name].shape).clone() for name in shared)
            for step in rows.split(BATCH, dim=1):
                inputs, targets = features[step], labels[step]
                error = torch.softmax(torch.bmm(inputs, weight.mT) + bias[:, None], dim=-1)
                error.scatter_add_(-1, targets[..., None], torch.full_like(error[..., :1], -1.0))
                weight.sub_(torch.bmm(error.mT, inputs), alpha=RATE / BATCH)
                bias.sub_(error.sum(1), alpha=RATE / BATCH)
            totals = {"weight": totals["weight"] + weight.sum(0), "bias": totals["bias"] + bias.sum(0)}
        shared = {name: total / per_round for name, total in totals.items()}
    return shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--per-round", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--threads", type=int, default=2)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    samples, start = problem(settings.device)
    for per_round in settings.per_round:
        found, seconds = {}, {}
        for name, contestant in (("bare", bare), ("ours", ours)):
            began = time.perf_counter()
            found[name] = contestant(samples, start, per_round)
            if settings.device == "cuda":
                torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - began
        result = {
            "clients": CLIENTS,
            "rounds": ROUNDS,
            "per_round": per_round,
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "ours_over_bare": round(seconds["ours"] / seconds["bare"], 2),
            "largest_difference": float((found["ours"]["weight"] - found["bare"]["weight"]).abs().max()),
            "device": settings.device,
        }
        print(json.dumps(result, indent=None if settings.json else 1), flush=True)


if __name__ == "__main__":
    main()
