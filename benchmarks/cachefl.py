"""Measure CacheFL and AdapterFL on real images, and the cost of CacheFL's training.

    python -m benchmarks.cachefl DATASET... [--root FOLDER] [--seeds 3] [--local-epochs 1] [--json]
    python -m benchmarks.cachefl --speed [--json]

16 images per class, 10 clients, 20 rounds, as in the paper; the cache is drawn around the class
texts. For each dataset and partition, accuracy on the test split as mean and standard deviation
over seeds, of

- zero-shot;
- cache: the untrained cache with the catalogue's alpha and beta, and with the best on validation;
- cachefl: trained with the paper's rate (0.001), and with rate, alpha and beta chosen on
  validation;
- adapterfl: trained with the paper's rate, and with rate and ratio chosen on validation from as
  many settings.

Validation is the dataset's `val` split or, if it has none, the training images that are not among
the 16 per class; the test split is not used for any choice. Settings are chosen once per dataset,
with seed 0, by the mean over the three partitions.

"steps" is the largest number of gradient steps that a client takes in a round. If it is 1, the
partition does not matter: the mean of one step of each client, weighted by its samples, is one step
on all data together, however they are split. That is so for 10 classes of 16 images, 10 clients and
batches of 32, and such rows do not show the effect of skew; with more --local-epochs they do.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from fedvl.config import Experiment, FederationConfig, TrainingConfig
from fedvl.data.features import encode_split
from fedvl.data.partition import few_shot
from fedvl.data.protocols import Labels, closed
from fedvl.data.sources import open_dataset
from fedvl.errors import FedVLError
from fedvl.federation.local import LocalEngine
from fedvl.federation.orders import order_of
from fedvl.federation.round import Federation
from fedvl.methods import load_method
from fedvl.methods.base import Method, Samples, Task
from fedvl.methods.cachefl import CacheFL, CacheOptions
from fedvl.methods.parts.heads import class_scores
from fedvl.models.checkpoint import load_model
from fedvl.runs.preparation import embed_classes
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator
from fedvl.tensors import Tensors

PARTITIONS = ("iid", "dirichlet:0.1", "disjoint")
CACHE_GRID = {"rate": (0.1, 1.0, 3.0, 10.0, 30.0), "alpha": (1.0, 3.0, 10.0), "beta": (1.0, 3.0)}
ADAPTER_GRID = {"rate": (0.001, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0), "ratio": (0.2, 0.4, 0.6, 0.8)}  # as many points
SEARCHED_ALPHAS = tuple(float(value) for value in np.linspace(0, 20, 41))
SEARCHED_BETAS = tuple(float(value) for value in np.linspace(0.5, 10, 20))
MAX_VALIDATION = 2000  # rows, drawn at random: more would not change the choice

# The speed problem: Flowers-102 under CLIP RN50
CLIENTS, SAMPLES, WIDTH, CLASSES, SHOTS, BATCH, ROUNDS = 10, 160, 1024, 102, 16, 32, 5


@dataclass
class Data:
    """A dataset as features, loaded once for all runs."""

    name: str
    train: Samples
    test: Samples
    given_validation: Samples | None
    task: Task
    local_epochs: int

    def validation(self, shots: int, seed: int) -> Samples:
        pool = self.given_validation or self.train
        rows = np.arange(len(pool))
        if pool is self.train:
            rows = np.setdiff1d(rows, few_shot(pool.labels.numpy(), shots, seed))
        rows = np.random.default_rng(seed).permutation(rows)[:MAX_VALIDATION]
        return pool.take(torch.from_numpy(np.sort(rows)))


def open_data(name: str, root: Path | None, local_epochs: int = 1) -> Data:
    dataset, encoder = open_dataset(name, root), load_model("fedvl-tiny")

    def samples(split: str) -> Samples:
        encoded = encode_split(dataset.splits[split], encoder, "features")
        labels = torch.from_numpy(dataset.splits[split].labels[encoded.kept])
        return Samples({"features": normalize(encoded.tensor, dim=-1)}, labels)

    texts = embed_classes(dataset, "default", encoder, "cpu")
    task = Task(dataset.class_names, texts, encoder, 10)
    given = samples("val") if "val" in dataset.splits else None
    return Data(dataset.name, samples("train"), samples("test"), given, task, local_epochs)


def describe(data: Data, partition: str, method: str, rate: float | None = None, **options: Any) -> Experiment:
    """Return an experiment with the paper's preset, changed by ``rate`` and ``options``."""
    training = {"local_epochs": data.local_epochs} | ({} if rate is None else {"learning_rate": rate})
    return resolve_experiment(
        {
            "method": {"name": method, **options},
            "data": {"dataset": data.name, "partition": partition},
            "training": training,
        }
    )


def client_rows(data: Data, experiment: Experiment, seed: int) -> list[torch.Tensor]:
    classes = len(data.task.class_names)
    labels = Labels(data.train.labels.numpy(), data.test.labels.numpy(), classes)
    assigned = closed(labels, experiment.data, seed)
    return [torch.from_numpy(client) for client in assigned.clients]


def most_steps(data: Data, partition: str, seeds: int) -> int:
    experiment = describe(data, partition, "cachefl")
    largest = max(len(client) for seed in range(seeds) for client in client_rows(data, experiment, seed))
    return data.local_epochs * -(-largest // experiment.training.batch_size)


def train(data: Data, partition: str, seed: int, name: str, **settings: Any) -> tuple[Method, Tensors]:
    """Return the method and its tensors after 20 rounds."""
    experiment = describe(data, partition, name, **settings)
    method_type = load_method(name)
    method = method_type(method_type.options_type.model_validate(experiment.method.options), data.task)
    rows = client_rows(data, experiment, seed)
    engine = LocalEngine(method, data.train, rows, experiment.training, experiment.federation, seed)
    federation = Federation(method, engine, experiment.federation, seed, method.start(torch_generator(seed, "start")))
    federation.run()
    return method, federation.shared


def accuracy(method: Method, tensors: Tensors, samples: Samples) -> float:
    return 100 * float((method.predict(tensors, samples.inputs).argmax(1) == samples.labels).float().mean())


def choose(data: Data, name: str, grid: dict[str, tuple[float, ...]]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the settings with the best mean validation accuracy over the partitions.

    Settings that diverge count as accuracy 0.
    """
    validation = data.validation(16, 0)
    alike = all(most_steps(data, partition, 1) == 1 for partition in PARTITIONS)  # then one of them represents all
    best: tuple[dict[str, float], float] = ({}, -1.0)
    for values in product(*grid.values()):
        settings, scores = dict(zip(grid, values, strict=True)), []
        for partition in PARTITIONS[:1] if alike else PARTITIONS:
            try:
                method, tensors = train(data, partition, 0, name, **settings)
                scores.append(accuracy(method, tensors, validation))
            except FedVLError:
                scores.append(0.0)
        if statistics.mean(scores) > best[1]:
            best = settings, statistics.mean(scores)
    edges = [key for key, value in best[0].items() if value in (grid[key][0], grid[key][-1])]
    return best[0], {**best[0], "validation": round(best[1], 1), "on_the_edge_of_the_grid": edges}


def search(
    method: CacheFL, tensors: Tensors, validation: Samples, alphas: Sequence[float], betas: Sequence[float]
) -> tuple[float, float]:
    """Return the best alpha and beta on ``validation`` (never the test); the first of equals."""
    features = validation.inputs["features"]
    zero_shot = class_scores(method, tensors, features)
    affinity = features @ tensors["keys"].T
    best = (-1, 0.0, 0.0)
    for beta in betas:
        retrieved = method.retrieved(affinity, beta)
        for alpha in alphas:
            right = int(((zero_shot + alpha * retrieved).argmax(-1) == validation.labels).sum())
            best = max(best, (right, alpha, beta), key=lambda found: found[0])
    return best[1:]


def measure(data: Data, seeds: int) -> dict[str, Any]:
    cache_choice, cache_report = choose(data, "cachefl", CACHE_GRID)
    adapter_choice, adapter_report = choose(data, "adapterfl", ADAPTER_GRID)
    options = CacheOptions.model_validate(describe(data, "iid", "cachefl").method.options)
    untrained = CacheFL(options, data.task)
    plain = load_method("zero-shot")(load_method("zero-shot").options_type(), data.task)
    zero_shot = accuracy(plain, {}, data.test)
    rows: dict[str, dict[str, list[float]]] = {}
    for partition in PARTITIONS:
        found: dict[str, list[float]] = {}
        for seed in range(seeds):
            keys = untrained.start(torch_generator(seed, "start"))
            alpha, beta = search(untrained, keys, data.validation(16, seed), SEARCHED_ALPHAS, SEARCHED_BETAS)
            searched = CacheFL(options.model_copy(update={"alpha": alpha, "beta": beta}), data.task)
            contestants = {
                "zero-shot": (plain, {}),
                "cache": (untrained, keys),
                "cache, chosen": (searched, keys),
                "cachefl": train(data, partition, seed, "cachefl"),
                "cachefl, chosen": train(data, partition, seed, "cachefl", **cache_choice),
                "adapterfl": train(data, partition, seed, "adapterfl"),
                "adapterfl, chosen": train(data, partition, seed, "adapterfl", **adapter_choice),
            }
            for name, (method, tensors) in contestants.items():
                found.setdefault(name, []).append(accuracy(method, tensors, data.test))
        rows[partition] = found
    return {
        "dataset": data.name,
        "classes": len(data.task.class_names),
        "test_images": len(data.test),
        "zero_shot": zero_shot,
        "paper_alpha_beta": [options.alpha, options.beta],
        "cachefl_choice": cache_report,
        "adapterfl_choice": adapter_report,
        "local_epochs": data.local_epochs,
        "steps": {partition: most_steps(data, partition, seeds) for partition in PARTITIONS},
        "accuracy": rows,
    }


def show(result: dict[str, Any]) -> None:
    alpha, beta = result["paper_alpha_beta"]
    print(f"\n{result['dataset']}: {result['classes']} classes, {result['test_images']} test images")
    print(f"  paper: rate 0.001, alpha {alpha:g}, beta {beta:g}; chosen on validation: {result['cachefl_choice']}")
    print(f"  adapterfl chosen on validation: {result['adapterfl_choice']}")
    names = list(result["accuracy"][PARTITIONS[0]])
    print("  " + "partition".ljust(15) + "steps" + "".join(name.rjust(19) for name in names))
    for partition, found in result["accuracy"].items():
        cells = [f"{statistics.mean(v):.1f} ± {statistics.pstdev(v):.1f}".rjust(19) for v in found.values()]
        print("  " + partition.ljust(15) + str(result["steps"][partition]).rjust(5) + "".join(cells))


def show_average(results: list[dict[str, Any]]) -> None:
    print(f"\nmean over {len(results)} datasets")
    for partition in PARTITIONS:
        names = results[0]["accuracy"][partition]
        means = [statistics.mean(statistics.mean(r["accuracy"][partition][name]) for r in results) for name in names]
        print("  " + partition.ljust(20) + "".join(f"{value:.1f}".rjust(19) for value in means))


# --- speed


def problem() -> tuple[CacheFL, Samples, Tensors]:
    generator = torch.Generator().manual_seed(0)
    texts = normalize(torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
    labels = torch.randint(CLASSES, (CLIENTS * SAMPLES,), generator=generator)
    noise = torch.randn(CLIENTS * SAMPLES, WIDTH, generator=generator)
    encoder: Any = SimpleNamespace(logit_scale=100.0)
    method = CacheFL(CacheOptions(cache_shots=SHOTS), Task(tuple(map(str, range(CLASSES))), texts, encoder, CLIENTS))
    return (
        method,
        Samples({"features": normalize(texts[labels] + 0.1 * noise, dim=-1)}, labels),
        method.start(generator),
    )


def order(round_index: int, client: int) -> torch.Tensor:
    return order_of(0, round_index, client, SAMPLES)


def ours(method: CacheFL, samples: Samples, start: Tensors) -> tuple[list[float], Tensors]:
    config = FederationConfig(rounds=ROUNDS)
    preset = CacheFL.presets["paper"]["training"]
    rows = torch.arange(CLIENTS * SAMPLES).split(SAMPLES)
    engine = LocalEngine(method, samples, rows, TrainingConfig(**preset), config, 0)
    federation = Federation(method, engine, config, 0, dict(start))
    times = [time.perf_counter()]
    federation.run(after_round=lambda record: times.append(time.perf_counter()))
    return [after - before for before, after in pairwise(times)], federation.shared


def bare(method: CacheFL, samples: Samples, start: Tensors) -> tuple[list[float], Tensors]:
    """Train without an engine, by code written for this problem alone.

    Closed-form gradients with two matrix products per step, momentum and weight decay.
    """
    alpha, beta, text = method.options.alpha, method.options.beta, method.task.text_features
    features, labels, shared = samples.inputs["features"], samples.labels, start["keys"]
    seconds = []
    for round_index in range(ROUNDS):
        began = time.perf_counter()
        rows = torch.stack([client * SAMPLES + order(round_index, client) for client in range(CLIENTS)])
        keys = shared.expand(CLIENTS, *shared.shape).clone()
        speed = torch.zeros_like(keys)
        for step in rows.split(BATCH, dim=1):
            inputs, targets = features[step], labels[step]
            near = (
                torch.bmm(inputs, keys.transpose(1, 2))
                .mul_(beta)
                .sub_(beta)
                .exp_()
                .view(CLIENTS, BATCH, CLASSES, SHOTS)
            )
            error = torch.softmax(100.0 * inputs @ text.T + alpha * near.sum(-1), dim=-1)
            error.scatter_add_(-1, targets[..., None], torch.full(targets[..., None].shape, -1.0))
            slope = near.mul_(error.mul_(alpha * beta / BATCH)[..., None]).view(CLIENTS, BATCH, -1)
            speed.mul_(0.9).add_(torch.bmm(slope.transpose(1, 2), inputs)).add_(keys, alpha=5e-4)
            keys.sub_(speed, alpha=0.001)
        shared = keys.mean(0)
        seconds.append(time.perf_counter() - began)
    return seconds, {"keys": shared}


def products(method: CacheFL, samples: Samples, start: Tensors) -> tuple[list[float], Tensors]:
    """Run only the two matrix products of each step."""
    keys = start["keys"].expand(CLIENTS, *start["keys"].shape).clone()
    batch = samples.inputs["features"].view(CLIENTS, SAMPLES, WIDTH)[:, :BATCH]
    affinity, gradient = torch.empty(CLIENTS, BATCH, keys.shape[1]), torch.empty_like(keys)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(SAMPLES // BATCH):
            torch.bmm(batch, keys.transpose(1, 2), out=affinity)
            torch.bmm(affinity.transpose(1, 2), batch, out=gradient)
        seconds.append(time.perf_counter() - began)
    return seconds, start


def measure_speed(repeats: int) -> dict[str, Any]:
    method, samples, start = problem()
    contestants: dict[str, Callable[..., tuple[list[float], Tensors]]] = {
        "products": products,
        "bare": bare,
        "ours": ours,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    final: dict[str, Tensors] = {}
    for number in range(repeats + 1):  # interleaved, so that noise of the machine affects all alike; the first warms up
        for name, contestant in contestants.items():
            measured, final[name] = contestant(method, samples, start)
            times[name] += measured if number else []
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return {
        "seconds_per_round": seconds,
        "ours_over_bare": seconds["ours"] / seconds["bare"],
        "ours_over_products": seconds["ours"] / seconds["products"],
        "largest_difference_to_bare": float((final["ours"]["keys"] - final["bare"]["keys"]).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="*", default=["cifar10-mini"])
    parser.add_argument("--root", type=Path, help="folder of the catalogue datasets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--local-epochs", type=int, default=1)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of --speed")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.speed:
        print(json.dumps(measure_speed(arguments.repeats), indent=None if arguments.json else 1))
        return
    results = []
    for name in arguments.datasets:
        results.append(measure(open_data(name, arguments.root, arguments.local_epochs), arguments.seeds))
        if not arguments.json:
            show(results[-1])
    if arguments.json:
        print(json.dumps(results))
    elif len(results) > 1:
        show_average(results)


if __name__ == "__main__":
    main()
