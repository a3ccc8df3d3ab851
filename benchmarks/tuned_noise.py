"""Measure client-level privacy with tuned settings: independent against correlated noise.

    python -m benchmarks.tuned_noise [--method linear] [--clients 10] [--partition dirichlet:0.5]
        [--epsilon 3] [--steps 1:0.01 1:0.1 5:0.1] [--rounds 1 2 5 10 20] [--clips 0.01 0.03 0.1 0.3 1]
        [--noise none independent correlated] [--apart 1 5] [--subspace 0 16] [--set method.cache_shots=4 ...]
        [--seeds 5] [--json FILE]

Correlated noise (DP-FTRL; Kairouz et al., 2021, and Choquette-Choo et al., 2023) adds rows of C^-1 Z
to the sums of T rounds, Z independent. Clients take part in every b-th round, in a fixed order and
without a secret sample. If all moves have norm 1 at most, the whole run is one Gaussian mechanism of
sensitivity max over clients of the root of the sum of |C^T C|_ij over the rounds i, j that it takes
part in. C is optimised for the least mean squared error of the model of all rounds (prefix sums),
which is at most that of the binary tree. With b = 1 and C = I it is FedVL's mechanism.

Rounds, epochs:rate and clip are chosen for each mechanism among the same settings, by the accuracy on
300 labelled images of the server's own in three other draws (TUNED_ON). The test is looked at with the
chosen setting alone. Another 100 images of the server's give the public subspace (0: all directions).
"""

import argparse
import json
import math
import statistics
from dataclasses import replace
from functools import cache
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedvl.config import gather_settings
from fedvl.data.sources import Opener
from fedvl.display import Silent
from fedvl.federation.accounting import sigma_for
from fedvl.federation.fixed_point import unflat_statistics
from fedvl.federation.privacy import Subspace, clipped_move, directions
from fedvl.methods.roles import Shapes
from fedvl.runs.experiment import local_engine, make_judge
from fedvl.runs.preparation import Prepared, prepare
from fedvl.runs.settings import resolve_experiment
from fedvl.seeding import torch_generator

OPENER = Opener.once()
TUNED_ON = (100, 101, 102)  # seeds
OWN, PUBLIC = 400, 100  # labelled images of the server's, and those of them that give directions
DELTA = 1e-5
ENDLESS = 1e9  # a clip that no move reaches


class Setting(NamedTuple):
    rounds: int
    epochs: int
    rate: float
    clip: float


class Mechanism(NamedTuple):
    noise: str  # none (nor a clip), independent or correlated
    apart: int  # b: rounds from one round of a client to its next
    subspace: int  # directions that clients move in; 0: all

    def matrix(self, rounds: int) -> Tensor:
        """Return C, by whose inverse noise is correlated over rounds."""
        return encoder(rounds, self.apart) if self.noise == "correlated" else torch.eye(rounds, dtype=torch.float64)

    def __str__(self) -> str:
        where = f", {self.subspace} directions" if self.subspace else ""
        return f"{self.noise}, b = {self.apart}{where}"


def sensitivity(matrix: Tensor, apart: int) -> Tensor:
    """Return how far one client moves C x, in which x has its moves of norm 1 as rows."""
    products = (matrix.T @ matrix).abs()
    parts = [torch.arange(first, len(matrix), apart) for first in range(min(apart, len(matrix)))]
    found: Tensor = torch.stack([products[part][:, part].sum() for part in parts]).max().sqrt()
    return found


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


def relative_error(rounds: int, mechanism: Mechanism) -> float:
    """Return the root mean squared noise of the models of all rounds, for moves of norm 1."""
    matrix = mechanism.matrix(rounds)
    sums = torch.ones(rounds, rounds, dtype=torch.float64).tril()
    noise = torch.linalg.solve_triangular(matrix, sums, upper=False, left=False)
    return float(sensitivity(matrix, mechanism.apart) * noise.square().sum().div(rounds).sqrt())


def noise_of(numbers: int, rounds: int, mechanism: Mechanism, epsilon: float, seed: int) -> Tensor:
    """Return the noise of each round's sum, for moves of norm 1."""
    if mechanism.noise == "none":
        return torch.zeros(rounds, numbers, dtype=torch.float64)
    matrix = mechanism.matrix(rounds)
    sigma = sigma_for(epsilon, 1.0, 1, DELTA) * float(sensitivity(matrix, mechanism.apart))
    generator = torch_generator(seed, "tuned noise", rounds, *map(str, mechanism))
    drawn = torch.randn(rounds, numbers, generator=generator, dtype=torch.float64) * sigma
    found: Tensor = torch.linalg.solve_triangular(matrix, drawn, upper=False)
    return found


@cache
def prepared_for(seed: int, flags: tuple[tuple[str, Any], ...], assignments: tuple[str, ...]) -> Prepared:
    """Prepare images and partition, which no setting changes; the server has images of its own."""
    own = [f"federation.root_images={OWN}", "federation.threads=1", "privacy.unit=client", "privacy.subspace=1"]
    settings = gather_settings(None, {"seed": seed, **dict(flags)}, [*assignments, *own])
    return prepare(resolve_experiment(settings), Silent(), OPENER)


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
    flags = (("method", given.method), ("clients", given.clients), ("partition", given.partition))
    prepared = with_setting(prepared_for(seed, flags, tuple(given.set)), setting)
    engine, samples = local_engine(prepared), prepared.training.samples
    public, own = prepared.training.root[:PUBLIC], prepared.training.root[PUBLIC:]
    shared = prepared.method.start(torch_generator(seed, "start"))
    shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in shared.items()}
    held = frozenset(name for name in shared if prepared.method.role.shared(name).features)
    within = Subspace(directions(samples.inputs["features"][public], mechanism.subspace or 1), held)
    numbers = sum(tensor.numel() for tensor in shared.values())
    noise = noise_of(numbers, setting.rounds, mechanism, given.epsilon, seed)
    for index in range(setting.rounds):
        cohort = [client for client in range(given.clients) if client % mechanism.apart == index % mechanism.apart]
        total = unflat_statistics(noise[index] * setting.clip, shapes)
        if not all(bool(tensor.isfinite().all()) for tensor in shared.values()):
            return 0.0  # it diverged
        for result in engine.train(index, cohort, shared):
            moves = {name: result.update.tensors[name].double() - shared[name].double() for name in shared}
            moves = within.project(moves) if mechanism.subspace else moves
            cut = clipped_move(moves, {name: torch.zeros_like(move) for name, move in moves.items()}, setting.clip)
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
    clips = [ENDLESS] if mechanism.noise == "none" else given.clips
    for rounds, step, clip in product(given.rounds, given.steps, clips):
        epochs, _, rate = step.partition(":")
        setting = Setting(rounds, int(epochs), float(rate), clip)
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
    parser.add_argument("--steps", nargs="+", default=["1:0.01", "1:0.1", "5:0.1"])
    parser.add_argument("--rounds", nargs="+", type=int, default=[1, 2, 5, 10, 20])
    parser.add_argument("--clips", nargs="+", type=float, default=[0.01, 0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--noise", nargs="+", default=["none", "independent", "correlated"])
    parser.add_argument("--apart", nargs="+", type=int, default=[1, 5])
    parser.add_argument("--subspace", nargs="+", type=int, default=[0, 16])
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    print("| noise | rounds, epochs, rate, clip | noise, 10 rounds | validation | test, mean ± deviation |")
    print("|---|---|---|---|---|")
    for mechanism in starmap(Mechanism, product(given.noise, given.apart, given.subspace)):
        if mechanism.noise == "none" and (mechanism.apart > 1 or mechanism.subspace):
            continue
        setting, validation = tuned(mechanism, given)
        scores = [measure(mechanism, setting, given, seed, tuning=False) for seed in range(given.seeds)]
        found.append({"mechanism": str(mechanism), "setting": setting, "validation": validation, "test": scores})
        error = relative_error(10, mechanism) / (given.clients / mechanism.apart) if mechanism.noise != "none" else 0.0
        spread = f"{statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f}"
        shown = ", ".join(f"{value:g}" for value in setting)
        print(f"| {mechanism} | {shown} | {error:.2f} | {validation:.1f} | {spread} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
