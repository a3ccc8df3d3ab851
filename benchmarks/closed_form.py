"""What rules that read no test labels lose: the penalty of ridge at few shots, and the weights of fed-em.

    python -m benchmarks.closed_form shots [--dataset cifar10-mini] [--seeds 3]
    python -m benchmarks.closed_form unlabelled [--dataset cifar10-mini] [--shots 0]

``shots`` prints the accuracy of ridge with 1, 4 and 16 images of each class, and the best over a grid of penalties and
text weights that is chosen on the test images. ``unlabelled`` prints that of zero-shot and of three exchanges of EM: with
the full weight of the mixture, with n / (n + C d) and other public weights, with the shrinkage of the highest evidence, and
with the weight by which a mixture of half of the images best predicts the zero-shot answers of the other half. JSON.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvl.data.partition import few_shot
from fedvl.display import Silent
from fedvl.methods.parts.moments import Moments, indicators, moments_of, unit_rows
from fedvl.methods.parts.regression import Regression
from fedvl.runs.preparation import prepare
from fedvl.runs.settings import resolve_experiment

SHOTS = (1, 4, 16)
PENALTIES = (0.03, 0.1, 0.3, 0.6, 1, 1.5, 2, 3, 5, 8, 15, 30)
TEXTS = (0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3)
WEIGHTS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1)
SHRINKAGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
EXCHANGES, SHRINKAGE = 3, 0.5


@dataclass(frozen=True)
class Data:
    rows: Tensor
    labels: Tensor
    test_rows: Tensor
    test_labels: Tensor
    texts: Tensor  # C x d
    scale: float

    def accuracy(self, weight: Tensor, bias: Tensor) -> float:
        right = (self.test_rows @ weight + bias).argmax(1) == self.test_labels
        return 100 * float(right.double().mean())

    def few(self, shots: int, seed: int) -> "Data":
        kept = torch.from_numpy(np.asarray(few_shot(self.labels.numpy(), shots, seed=seed)))
        return replace(self, rows=self.rows[kept], labels=self.labels[kept])


def read(dataset: str) -> Data:
    settings = {"method": {"name": "ridge"}, "device": "cpu", "data": {"dataset": dataset, "clients": 1}}
    prepared = prepare(resolve_experiment(settings), Silent())
    train, test, method = prepared.training.samples, prepared.test.samples, prepared.method
    return Data(
        unit_rows(train.inputs["features"]),
        train.labels,
        unit_rows(test.inputs["features"]),
        test.labels,
        method.task.text_features.double(),
        float(method.scale),
    )


def shots(data: Data, seeds: int) -> dict[str, Any]:
    """Return mean accuracies by the evidence, and with the best penalty and text weight on the test."""
    found = {}
    for count in SHOTS:
        chosen, grid = [], np.zeros((len(PENALTIES), len(TEXTS)))
        for seed in range(seeds):
            few = data.few(count, seed)
            moments = Moments.of(moments_of(few.rows, indicators(few.labels, len(data.texts))))
            problem = Regression.of(moments, data.texts.T)
            fit = problem.best("evidence")
            chosen.append(data.accuracy(fit.weight, fit.bias))
            for i, a in enumerate(PENALTIES):
                for j, s in enumerate(TEXTS):
                    move = (problem.cross - s * problem.expected) / (problem.values + a)[:, None]
                    weight = s * problem.initial + problem.vectors @ move
                    bias = moments.counts / moments.count - moments.mean @ weight
                    grid[i, j] += data.accuracy(weight, bias) / seeds
        row, column = divmod(int(grid.argmax()), len(TEXTS))
        best = {"accuracy": float(grid.max()), "penalty": PENALTIES[row], "texts": TEXTS[column]}
        found[f"{count} shots"] = {"by the evidence": float(np.mean(chosen)), "best on the test": best}
    return found


Weigh = Callable[[Tensor, int], Tensor | float]  # n and C d


def em(data: Data, weigh: Weigh, shrinkage: float = SHRINKAGE) -> tuple[Tensor, Tensor, Tensor]:
    """Return W, b and the log prior of fed-em, whose mixture has another weight."""
    rows, zero_shot = data.rows, data.scale * data.texts.T
    weight, bias = zero_shot, torch.zeros(len(data.texts), dtype=torch.float64)
    prior = bias
    for _ in range(EXCHANGES):
        moments = Moments.of(moments_of(rows, torch.softmax(rows @ weight + bias + prior, 1)))
        means, spread = moments.class_means, moments.within / moments.count
        identity = torch.eye(len(means), dtype=torch.float64)
        spread = (1 - shrinkage) * spread + shrinkage * spread.trace() / len(means) * identity
        mixture = weigh(moments.count, means.numel()) * torch.linalg.solve(spread, means)
        prior = prior - 0.5 * ((moments.counts / moments.count).clamp(min=1e-6) * len(prior)).log()
        weight, bias = mixture + zero_shot, -(means * mixture).sum(0) / 2
    return weight, bias, prior


def likeliest_shrinkage(data: Data) -> float:
    """Return the shrinkage of the highest evidence, under an inverse Wishart prior on the covariance."""
    rows, (classes, width) = data.rows, data.texts.shape
    moments = Moments.of(moments_of(rows, torch.softmax(data.scale * rows @ data.texts.T, 1)))
    values, freedom = torch.linalg.eigvalsh(moments.within).clamp(min=0), len(rows) - classes

    def evidence(shrinkage: float) -> float:
        strength = shrinkage / (1 - shrinkage) * freedom
        spread, prior = strength * float(values.sum()) / freedom / width, strength + width + 1
        normal = [torch.lgamma((n - torch.arange(width).double()) / 2).sum() for n in (prior + freedom, prior)]
        scatter = prior * width * math.log(spread) - (prior + freedom) * float((spread + values).log().sum())
        return float(normal[0] - normal[1]) + scatter / 2

    return max(SHRINKAGES, key=evidence)


def stacked_weight(data: Data) -> float:
    """Return the weight by which mixtures of half of the images best predict the zero-shot answers of the others."""
    side = data.rows @ torch.randn(data.rows.shape[1], generator=torch.Generator().manual_seed(7)).double()
    halves = [replace(data, rows=data.rows[side > side.median()]), replace(data, rows=data.rows[side <= side.median()])]

    def cost(share: float) -> float:
        total = 0.0
        for one, other in (halves, halves[::-1]):
            weight, bias, _ = em(one, lambda n, size: share)
            zero_shot = data.scale * data.texts.T
            scores = torch.log_softmax(other.rows @ (weight - zero_shot) + bias, 1)
            total -= float((torch.softmax(other.rows @ zero_shot, 1) * scores).sum(1).mean())
        return total

    return min(WEIGHTS, key=cost)


def unlabelled(data: Data) -> dict[str, Any]:
    def accuracy(weigh: Weigh, shrinkage: float = SHRINKAGE) -> float:
        weight, bias, prior = em(data, weigh, shrinkage)
        return data.accuracy(weight, bias + prior)

    shrinkage, share = likeliest_shrinkage(data), stacked_weight(data)
    return {
        "zero-shot": data.accuracy(data.texts.T, torch.zeros(len(data.texts))),
        "full weight": accuracy(lambda n, size: 1.0),
        "n / (n + C d)": accuracy(lambda n, size: n / (n + size)),
        "n / (n + C d / 2)": accuracy(lambda n, size: n / (n + size / 2)),
        "n / (n + C d / 4)": accuracy(lambda n, size: n / (n + size / 4)),
        "n / (n + C d / 8)": accuracy(lambda n, size: n / (n + size / 8)),
        f"likeliest shrinkage ({shrinkage})": accuracy(lambda n, size: 1.0, shrinkage),
        f"stacked weight ({share})": accuracy(lambda n, size: share),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shots", "unlabelled"))
    parser.add_argument("--dataset", default="cifar10-mini")
    parser.add_argument("--shots", type=int, default=0, help="images of each class; 0: all")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    data = read(asked.dataset)
    data = data.few(asked.shots, 0) if asked.shots else data
    print(json.dumps(shots(data, asked.seeds) if asked.what == "shots" else unlabelled(data), indent=1))


if __name__ == "__main__":
    main()
