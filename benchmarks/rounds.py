"""Compare seconds per round of a federated linear probe: ours, a PyTorch loop, Flower, bare code.

    python -m benchmarks.rounds [--json] [--without-flower]

100 clients of 128 samples of 1,024 features, 100 classes, 10 clients per round, 10 rounds, batch
32, SGD with momentum. "bare" is matrix products without an engine, "flower" is Flower's simulation.
All do the same arithmetic from the same start; the accuracies and the distance of the final weights
are printed with the times. Flower needs ``pip install -e ".[bench]" -c constraints.txt``.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from fedvl.config import FederationConfig, TrainingConfig
from fedvl.federation.local import LocalEngine
from fedvl.federation.orders import order_of
from fedvl.federation.round import Federation
from fedvl.methods.base import Samples, Task
from fedvl.methods.linear import Linear, LinearOptions
from fedvl.seeding import numpy_generator
from fedvl.tensors import Tensors

CLIENTS, SAMPLES, WIDTH, CLASSES, PER_ROUND, ROUNDS, BATCH = 100, 128, 1024, 100, 10, 10, 32
RATE, MOMENTUM, SCALE, SEED = 0.01, 0.9, 20.0, 0


def problem() -> tuple[Samples, Tensors]:
    """Return features around random class centres, and the initial classifier."""
    generator = torch.Generator().manual_seed(SEED)
    centres = torch.nn.functional.normalize(torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
    labels = torch.randint(CLASSES, (CLIENTS * SAMPLES,), generator=generator)
    noise = torch.randn(CLIENTS * SAMPLES, WIDTH, generator=generator)
    features = torch.nn.functional.normalize(centres[labels] + 0.15 * noise, dim=-1)
    start = torch.nn.functional.normalize(centres + 0.15 * torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
    return Samples({"features": features}, labels), {"weight": start, "bias": torch.zeros(CLASSES)}


def cohort(round_index: int) -> list[int]:
    """Return the clients that our engine selects, so that the others train the same ones."""
    return sorted(
        int(c) for c in numpy_generator(SEED, "choose", round_index, 0).choice(CLIENTS, PER_ROUND, replace=False)
    )


def order(round_index: int, client: int) -> torch.Tensor:
    return order_of(SEED, round_index, client, SAMPLES)


def ours(samples: Samples, start: Tensors) -> tuple[list[float], Tensors]:
    encoder: Any = SimpleNamespace(logit_scale=SCALE)
    method = Linear(LinearOptions(), Task(tuple(map(str, range(CLASSES))), start["weight"], encoder, CLIENTS))
    config = FederationConfig(rounds=ROUNDS, per_round=PER_ROUND, chunk=PER_ROUND)
    training = TrainingConfig(batch_size=BATCH, learning_rate=RATE, momentum=MOMENTUM)
    rows = torch.arange(CLIENTS * SAMPLES).split(SAMPLES)
    engine = LocalEngine(method, samples, rows, training, config, SEED)
    federation = Federation(method, engine, config, SEED, dict(start))
    times = [time.perf_counter()]
    federation.run(after_round=lambda record: times.append(time.perf_counter()))
    return differences(times), federation.shared


def bare(samples: Samples, start: Tensors) -> tuple[list[float], Tensors]:
    """Train without an engine, by code written for this problem alone.

    Closed-form gradients with two batched matrix products per step.
    """
    features, labels = samples.inputs["features"], samples.labels
    shared = {name: tensor.clone() for name, tensor in start.items()}
    times = [time.perf_counter()]
    for round_index in range(ROUNDS):
        clients = cohort(round_index)
        rows = torch.stack([client * SAMPLES + order(round_index, client) for client in clients])
        weight, bias = (shared[name].expand(PER_ROUND, *shared[name].shape).clone() for name in ("weight", "bias"))
        weight_speed, bias_speed = torch.zeros_like(weight), torch.zeros_like(bias)
        for step in rows.split(BATCH, dim=1):
            inputs, targets = features[step], labels[step]
            error = torch.softmax(SCALE * torch.bmm(inputs, weight.transpose(1, 2)) + bias[:, None], dim=-1)
            error.scatter_add_(-1, targets[..., None], torch.full(targets[..., None].shape, -1.0))
            error.div_(BATCH)
            weight_speed.mul_(MOMENTUM).add_(torch.bmm(error.transpose(1, 2), inputs), alpha=SCALE)
            bias_speed.mul_(MOMENTUM).add_(error.sum(1))
            weight.sub_(weight_speed, alpha=RATE)
            bias.sub_(bias_speed, alpha=RATE)
        shared = {"weight": weight.mean(0), "bias": bias.mean(0)}
        times.append(time.perf_counter())
    return differences(times), shared


def train_one(features: torch.Tensor, labels: torch.Tensor, shared: Tensors, rows: torch.Tensor) -> Tensors:
    """Train as a user would first write it: DataLoader, nn.Linear and torch.optim.SGD."""
    from torch.utils.data import DataLoader, TensorDataset

    layer = torch.nn.Linear(WIDTH, CLASSES)
    layer.load_state_dict(shared)
    optimiser = torch.optim.SGD(layer.parameters(), lr=RATE, momentum=MOMENTUM)
    for inputs, targets in DataLoader(TensorDataset(features, labels), batch_size=BATCH, sampler=rows.tolist()):
        optimiser.zero_grad()
        scores = SCALE * torch.nn.functional.linear(inputs, layer.weight) + layer.bias
        torch.nn.functional.cross_entropy(scores, targets).backward()
        optimiser.step()
    return {name: tensor.detach() for name, tensor in layer.state_dict().items()}


def loop(samples: Samples, start: Tensors) -> tuple[list[float], Tensors]:
    shared = dict(start)
    times = [time.perf_counter()]
    for round_index in range(ROUNDS):
        trained = [
            train_one(samples.inputs["features"], samples.labels, shared, client * SAMPLES + order(round_index, client))
            for client in cohort(round_index)
        ]
        shared = {name: torch.stack([item[name] for item in trained]).mean(0) for name in shared}
        times.append(time.perf_counter())
    return differences(times), shared


def flower(samples: Samples, start: Tensors) -> tuple[list[float], Tensors]:
    """Run Flower's simulation with its own FedAvg, which selects other clients than ours."""
    from benchmarks.flower_app import simulate

    times, shared = simulate(start)
    return differences(times), shared


def differences(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


def accuracy(samples: Samples, shared: Tensors) -> float:
    scores = SCALE * samples.inputs["features"] @ shared["weight"].T + shared["bias"]
    return 100 * float((scores.argmax(1) == samples.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--without-flower", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="torch threads, the same for all")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of all but Flower")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    samples, start = problem()
    contestants: dict[str, Callable[[Samples, Tensors], tuple[list[float], Tensors]]] = {
        "bare": bare,
        "ours": ours,
        "loop": loop,
    }
    final: dict[str, Tensors] = {}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant(samples, start)  # imports and warm-up
    for _ in range(arguments.repeats):  # interleaved, so that noise of the machine affects all alike
        for name, contestant in contestants.items():
            measured, final[name] = contestant(samples, start)
            times[name] += measured
    flower_is_here = find_spec("flwr") is not None and find_spec("ray") is not None
    if not flower_is_here and not arguments.without_flower:
        print(
            'Flower\'s simulation is left out: Ray is missing; pip install -e ".[bench]" -c constraints.txt.',
            file=sys.stderr,
        )
    if flower_is_here and not arguments.without_flower:
        times["flower"], final["flower"] = flower(samples, start)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "threads": arguments.threads,
        "seconds_per_round": seconds,
        "seconds_of_the_first_round": {name: values[0] for name, values in times.items()},
        "mean_seconds_per_round": {name: statistics.mean(values) for name, values in times.items()},
        "ours_over_bare": seconds["ours"] / seconds["bare"],
        **{f"{name}_over_ours": seconds[name] / seconds["ours"] for name in seconds if name not in ("ours", "bare")},
        "accuracy": {name: accuracy(samples, shared) for name, shared in final.items()},
        "start_accuracy": accuracy(samples, start),
        "largest_difference_to_bare": {
            name: float((final[name]["weight"] - final["bare"]["weight"]).abs().max()) for name in ("ours", "loop")
        },
    }
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
