"""Measure client-level privacy for few large sites: independent against correlated noise.

    python -m benchmarks.few_sites [--clients 10] [--partition dirichlet:0.5] [--epsilon 3] [--seeds 5]
        [--subspace 16] [--json FILE]

Correlated noise (DP-FTRL; Kairouz et al., 2021, and Choquette-Choo et al., 2023) adds rows of C^-1 Z
to the sums of T rounds, Z independent. Clients take part in every b-th round, in a fixed order and
without a secret sample. If all moves have norm 1 at most, the whole run is one Gaussian mechanism of
sensitivity max over clients of the root of the sum of |C^T C|_ij over the rounds i, j that it takes
part in. C is optimised for the least mean squared error of the model of all rounds (prefix sums),
which is at most that of the binary tree. With b = 1 and C = I it is FedVL's mechanism.

Rounds, epochs, rate and clip are chosen for each mechanism among the same settings, by the accuracy on
300 labelled images of the server's own in three other draws (TUNED_ON). The test is looked at with the
chosen setting alone. Another 100 images of the server's give the public subspace.
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedvl.data.opener import Opener
from fedvl.display import Silent
from fedvl.experiment import local_engine, make_judge
from fedvl.federation.accounting import sigma_for
from fedvl.federation.fixed_point import unflat
from fedvl.federation.privacy import Subspace, clipped, directions
from fedvl.preparation import Prepared, prepare
from fedvl.seeding import torch_generator
from fedvl.settings import resolve_experiment

OPENER = Opener.once()
TUNED_ON = (100, 101, 102)  # seeds
OWN, PUBLIC = 400, 100  # labelled images of the server's, and those of them that give directions
DELTA = 1e-5
ROUNDS, STEPS, CLIPS = (1, 2, 5, 10, 20), ((1, 0.01), (1, 0.1), (5, 0.1)), (0.01, 0.03, 0.1, 0.3, 1.0)


class Setting(NamedTuple):
    rounds: int
    epochs: int
    rate: float
    clip: float


class Mechanism(NamedTuple):
    apart: int  # b: rounds from one round of a client to its next
    correlated: bool
    subspace: int | None = None

    def __str__(self) -> str:
        kind = "correlated" if self.correlated else "independent"
        return f"{kind}, b = {self.apart}{f', {self.subspace} directions' if self.subspace else ''}"


def sensitivity(matrix: Tensor, apart: int) -> Tensor:
    """Return how far one client moves C x, in which x has its moves of norm 1 as rows."""
    products = (matrix.T @ matrix).abs()
    parts = [torch.arange(first, len(matrix), apart) for first in range(min(apart, len(matrix)))]
    return torch.stack([products[part][:, part].sum() for part in parts]).max().sqrt()


@cache
def encoder(rounds: int, apart: int) -> Tensor:
    """Return a lower triangular C of small error and sensitivity, by L-BFGS from the root of A."""
    sums = torch.ones(rounds, rounds, dtype=torch.float64).tril()
    root = [math.comb(2 * lag, lag) / 4**lag for lag in range(rounds)]  # A = root root, both Toeplitz
    began = torch.tensor([[root[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)])
    candidates = []
    for begin in (began.double(), torch.eye(rounds, dtype=torch.float64)):
        values = begin.clone().requires_grad_()
        optimiser = torch.optim.LBFGS([values], max_iter=300, line_search_fn="strong_wolfe")

        def error(values: Tensor = values) -> Tensor:
            matrix = values.tril()
            found = torch.linalg.solve_triangular(matrix, sums, upper=False, left=False)
            return found.square().sum().log() + 2 * sensitivity(matrix, apart).log()

        def closure(optimiser: torch.optim.LBFGS = optimiser, error: Any = error) -> Tensor:
            optimiser.zero_grad()
            loss: Tensor = error()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call]
        candidates += [(error(matrix).item(), matrix) for matrix in (begin, values.detach().tril())]
    return min(candidates, key=lambda found: found[0])[1]


def relative_error(rounds: int, apart: int, correlated: bool) -> float:
    """Return the root mean squared noise of the models of all rounds, for moves of norm 1."""
    matrix = encoder(rounds, apart) if correlated else torch.eye(rounds, dtype=torch.float64)
    sums = torch.ones(rounds, rounds, dtype=torch.float64).tril()
    noise = torch.linalg.solve_triangular(matrix, sums, upper=False, left=False)
    return float(sensitivity(matrix, apart) * noise.square().sum().div(rounds).sqrt())


def noise_of(numbers: int, rounds: int, apart: int, correlated: bool, epsilon: float, seed: int) -> Tensor:
    """Return the noise of each round's sum, for moves of norm 1."""
    matrix = encoder(rounds, apart) if correlated else torch.eye(rounds, dtype=torch.float64)
    sigma = sigma_for(epsilon, 1.0, 1, DELTA) * float(sensitivity(matrix, apart))
    generator = torch_generator(seed, "few sites", rounds, apart, str(correlated))
    drawn = torch.randn(rounds, numbers, generator=generator, dtype=torch.float64) * sigma
    return torch.linalg.solve_triangular(matrix, drawn, upper=False)


@cache
def prepared_for(seed: int, method: str, clients: int, partition: str) -> Prepared:
    """Prepare images and partition, which no setting changes; the server has images of its own."""
    return prepare(
        resolve_experiment(
            {
                "seed": seed,
                "method": {"name": method},
                "data": {"clients": clients, "partition": partition},
                "federation": {"threads": 1, "root_images": OWN},
                "privacy": {"unit": "client", "subspace": 1},  # so that there are such images
            }
        ),
        Silent(),
        OPENER,
    )


def with_setting(prepared: Prepared, setting: Setting) -> Prepared:
    """Return the same images and clients for a run without FedVL's own noise."""
    before = prepared.experiment
    training = before.training.model_copy(update={"learning_rate": setting.rate, "local_epochs": setting.epochs})
    federation = before.federation.model_copy(update={"rounds": setting.rounds})
    privacy = type(before.privacy)()
    changed = before.model_copy(update={"training": training, "federation": federation, "privacy": privacy})
    return replace(prepared, experiment=changed)


def measure(mechanism: Mechanism, setting: Setting, given: argparse.Namespace, seed: int, tuning: bool) -> float:
    """Return the accuracy of one run, on the server's own images or on the test."""
    prepared = with_setting(prepared_for(seed, given.method, given.clients, given.partition), setting)
    engine, samples = local_engine(prepared), prepared.training.samples
    public, own = prepared.training.root[:PUBLIC], prepared.training.root[PUBLIC:]
    shared = prepared.method.start(torch_generator(seed, "start"))
    shapes = {name: tuple(tensor.shape) for name, tensor in shared.items()}
    held = frozenset(name for name in shared if prepared.method.role.shared(name).features)
    within = Subspace(directions(samples.inputs["features"][public], mechanism.subspace or 1), held)
    numbers = sum(tensor.numel() for tensor in shared.values())
    noise = noise_of(numbers, setting.rounds, mechanism.apart, mechanism.correlated, given.epsilon, seed)
    for index in range(setting.rounds):
        cohort = [client for client in range(given.clients) if client % mechanism.apart == index % mechanism.apart]
        total = unflat(noise[index] * setting.clip, shapes)
        for result in engine.train(index, cohort, shared):
            moves = {name: result.update.tensors[name].double() - shared[name].double() for name in shared}
            moves = within.project(moves) if mechanism.subspace else moves
            cut = clipped(moves, {name: torch.zeros_like(move) for name, move in moves.items()}, setting.clip)
            total = {name: total[name] + cut[name] for name in total}
        total = within.project(total) if mechanism.subspace else total
        expected = given.clients / mechanism.apart
        shared = {name: (shared[name].double() + total[name] / expected).float() for name in shared}
    judge = make_judge(prepared, engine)
    judge = replace(judge, test=samples.take(own), parts=[]) if tuning else judge
    return float(judge.judge(shared, {}).figures["accuracy"])


def tuned(mechanism: Mechanism, given: argparse.Namespace) -> tuple[Setting, float]:
    """Return the setting of the highest mean accuracy on the server's images, and that accuracy."""
    found = {}
    for rounds, (epochs, rate), clip in product(ROUNDS, STEPS, CLIPS):
        setting = Setting(rounds, epochs, rate, clip)
        if setting.rounds >= mechanism.apart:  # every client takes part
            scores = [measure(mechanism, setting, given, seed, tuning=True) for seed in TUNED_ON]
            found[setting] = statistics.mean(scores)
    best = max(found, key=lambda setting: found[setting])
    return best, found[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="linear")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--partition", default="dirichlet:0.5")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--subspace", type=int, default=16)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    print(
        "| noise | rounds, epochs, rate, clip | error, 10 rounds | validation | test, mean ± deviation |\n|---|---|---|---|---|"
    )
    for apart, correlated, subspace in product((1, 5), (False, True), (None, given.subspace)):
        mechanism = Mechanism(apart, correlated, subspace)
        setting, validation = tuned(mechanism, given)
        scores = [measure(mechanism, setting, given, seed, tuning=False) for seed in range(given.seeds)]
        found.append({"mechanism": str(mechanism), "setting": setting, "validation": validation, "test": scores})
        error = relative_error(10, apart, correlated) / (given.clients / apart)
        spread = f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
        shown = ", ".join(f"{value:g}" for value in setting)
        print(f"| {mechanism} | {shown} | {error:.2f} | {validation:.1f} | {spread} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
